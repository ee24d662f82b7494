"""Decode with a log against the per-token recurrence: outputs, and the state that a fold leaves.

Shape suffixes as in ``kernels/gdn_log.py``.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import LogBatch, LogMemory
from strandline.kernels.gdn import gdn_recurrent_reference
from strandline.kernels.gdn_log import LOG_TOKENS, gdn_decode_logged, gdn_fold
from tests.cpu.kernels.test_gdn import FLOAT32, Layer, Shape, initial_state, make_arena, make_layer

NUM_LOGS = 9
USUAL = Shape()


def make_logs(shape: Shape) -> LogMemory:
    """Return empty logs."""
    return LogMemory(
        torch.zeros(NUM_LOGS, shape.key_heads, LOG_TOKENS, shape.key_dim),
        torch.zeros(NUM_LOGS, shape.value_heads, LOG_TOKENS, shape.value_dim),
        torch.zeros(NUM_LOGS, shape.value_heads, LOG_TOKENS, dtype=torch.float64),
    )


def batch(logs: Sequence[int], lens: Sequence[int]) -> LogBatch:
    """Say where the logs of a step's sequences are, and how much is in them."""
    log_N = torch.tensor(logs)
    place_N = torch.tensor(lens) % LOG_TOKENS
    counts_up = list(logs) == list(range(logs[0], logs[0] + len(logs)))
    return LogBatch(
        log_N,
        place_N,
        torch.arange(LOG_TOKENS) >= place_N.unsqueeze(-1),
        slice(logs[0], logs[0] + len(logs)) if counts_up else log_N,
        tuple(lens),
        tuple(place_N.tolist()),
    )


class Decoding:
    """Sequences that decode rows of layers of their own, each with a log."""

    def __init__(self, num_sequences: int, num_tokens: int, logs: Sequence[int], shape: Shape = USUAL) -> None:
        one = make_layer(num_tokens, shape)
        self.layers = [
            Layer(*make_layer(num_tokens, shape).arguments()[:5], one.A_log_H, one.dt_bias_H)
            for _ in range(num_sequences)
        ]
        self.state_SHKV = make_arena(range(1, num_sequences + 1), shape)
        self.initial = [initial_state(self.state_SHKV, slot) for slot in range(1, num_sequences + 1)]
        self.memory = make_logs(shape)
        self.logs = list(logs)
        self.slots = list(range(1, num_sequences + 1))
        self.done = [0] * num_sequences
        self.logged = [0] * num_sequences
        self.outs: list[list[Tensor]] = [[] for _ in range(num_sequences)]

    def step(self, members: Sequence[int], dst: Sequence[int] | None = None) -> None:
        """Advance some sequences by a token; ``dst`` says where their states go, if not to where they are."""
        rows = [self.layers[i].rows(self.done[i], self.done[i] + 1).arguments() for i in members]
        inputs = [torch.cat(column) for column in list(zip(*rows, strict=True))[:5]]
        src = [self.slots[i] for i in members]
        dst = src if dst is None else dst
        logs = batch([self.logs[i] for i in members], [self.logged[i] for i in members])
        gates = (self.layers[0].A_log_H, self.layers[0].dt_bias_H)
        slots = (torch.tensor(src), torch.tensor(dst))
        out_NHV = gdn_decode_logged(*inputs, *gates, self.state_SHKV, *slots, self.memory, logs)
        for i, target, out_HV in zip(members, dst, out_NHV, strict=True):
            if target == NULL_SLOT:
                continue
            self.slots[i] = target
            self.outs[i].append(out_HV)
            self.logged[i] = self.logged[i] % LOG_TOKENS + 1
            self.done[i] += 1

    def check(self, i: int) -> None:
        """Assert that a sequence's outputs are those of the recurrence, and its state after a fold, too."""
        layer = self.layers[i].rows(0, self.done[i])
        expected_THV, state_HKV = gdn_recurrent_reference(*layer.arguments(), self.initial[i])
        torch.testing.assert_close(torch.stack(self.outs[i]), expected_THV, **FLOAT32)
        gdn_fold(self.state_SHKV, self.slots[i], self.memory, self.logs[i], self.logged[i])
        torch.testing.assert_close(self.state_SHKV[self.slots[i]], state_HKV, **FLOAT32)
        self.logged[i] = 0


@pytest.mark.parametrize("num_tokens", [1, 2, LOG_TOKENS - 1, LOG_TOKENS, LOG_TOKENS + 1, 3 * LOG_TOKENS + 2])
def test_decode_with_a_log_equals_the_recurrence_however_full_the_log_is(num_tokens: int) -> None:
    decoding = Decoding(3, num_tokens, logs=[4, 5, 6])
    for _ in range(num_tokens):
        decoding.step([0, 1, 2])
    for i in range(3):
        decoding.check(i)


@pytest.mark.parametrize(
    "shape", [Shape(1, 1, 16, 16), Shape(2, 6, 8, 40), Shape(3, 3, 128, 16)], ids=["one head", "three to one", "wide"]
)
def test_a_log_holds_for_any_ratio_of_heads(shape: Shape) -> None:
    decoding = Decoding(2, 11, logs=[7, 2], shape=shape)
    for _ in range(11):
        decoding.step([0, 1])
    decoding.check(0)
    decoding.check(1)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sequences_that_come_go_and_fold_as_they_please_do_not_see_each_other(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    decoding = Decoding(4, 30, logs=data.draw(st.permutations([1, 3, 4, 8])))
    for _ in range(25):
        members = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        decoding.step(members)
        if data.draw(st.booleans()):
            decoding.check(members[0])
    for i in range(4):
        if decoding.done[i]:
            decoding.check(i)


def test_a_shared_snapshot_is_read_and_never_written() -> None:
    decoding = Decoding(2, 2 * LOG_TOKENS, logs=[1, 2])
    decoding.slots = [1, 1]
    decoding.initial[1] = decoding.initial[0]
    decoding.step([0, 1], dst=[10, 11])
    for _ in range(2 * LOG_TOKENS - 1):
        decoding.step([0, 1])
    assert torch.equal(decoding.state_SHKV[1], decoding.initial[0])
    decoding.check(0)
    decoding.check(1)


def test_a_sequence_without_a_snapshot_starts_from_zeros() -> None:
    decoding = Decoding(1, 12, logs=[3])
    decoding.slots = [NULL_SLOT]
    decoding.initial = [torch.zeros_like(decoding.initial[0])]
    decoding.step([0], dst=[9])
    for _ in range(11):
        decoding.step([0])
    decoding.check(0)


@pytest.mark.parametrize("logged", [3, LOG_TOKENS])
def test_a_sequence_that_has_ended_changes_neither_its_state_nor_its_log(logged: int) -> None:
    decoding = Decoding(2, 20, logs=[5, 6])
    for _ in range(logged):
        decoding.step([0, 1])
    decoding.step([0, 1], dst=[NULL_SLOT, 2])
    decoding.check(0)
    decoding.check(1)


def test_a_log_is_not_read_past_its_end_whatever_was_there_before() -> None:
    decoding = Decoding(2, 20, logs=[5, 6])
    for tensor in (decoding.memory.key_JGLK, decoding.memory.value_JHLV, decoding.memory.sum_JHL):
        tensor[5] = float("nan")
    for _ in range(10):
        decoding.step([0, 1])
    decoding.check(0)
    decoding.check(1)


@pytest.mark.parametrize("gate", ["vanishing", "absent", "strong once"])
def test_extreme_decays_in_a_log_neither_overflow_nor_lose_the_weak_ones(gate: str) -> None:
    decoding = Decoding(1, 2 * LOG_TOKENS, logs=[1])
    a_TH = decoding.layers[0].a_TH
    a_TH.fill_({"vanishing": 300.0, "absent": -300.0, "strong once": -2.0}[gate])
    if gate == "strong once":
        a_TH[LOG_TOKENS // 2] = 1e6
    for _ in range(2 * LOG_TOKENS):
        decoding.step([0])
    decoding.check(0)
