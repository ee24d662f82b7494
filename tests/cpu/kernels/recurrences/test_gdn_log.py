"""Decode with a log against the per-token recurrence: outputs, and the state that a fold leaves.

The ``check_`` functions take either version of the operations, on any device; shape suffixes as in
``kernels/recurrences/gdn_log.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.ids import NULL_LOG, NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.recurrences import gdn_log
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_recurrent_reference
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory
from tests.bound import bound
from tests.cpu.kernels.recurrences.test_gdn import FLOAT32, Shape, make_arena, make_layer
from tests.poison import poisoned_memory

pytestmark = pytest.mark.usefixtures("each_version")

NUM_LOGS = 9
USUAL = Shape()

BFLOAT16 = {"rtol": 2**-7, "atol": 2e-2}
"""One rounding of outputs of several units; Triton's interpreter cuts off."""


DECODE, FOLD = bound(gdn_log.gdn_decode_logged), bound(gdn_log.gdn_fold)


@dataclass(frozen=True)
class Setting:
    """Which version of the operations runs where, and on what."""

    decode: Callable[..., Tensor] = DECODE
    fold: Callable[..., None] = FOLD
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    shape: Shape = USUAL
    max_beta: int = 1


USUAL_SETTING = Setting()


def make_logs(shape: Shape, num_layers: int = 1) -> LogMemory:
    """Return logs of several layers, full of what must not be read."""
    return LogMemory(
        torch.full((num_layers, NUM_LOGS, shape.key_heads, LOG_TOKENS, shape.key_dim), torch.nan),
        torch.full((num_layers, NUM_LOGS, shape.value_heads, LOG_TOKENS, shape.value_dim), torch.nan),
        torch.full((num_layers, NUM_LOGS, shape.value_heads, LOG_TOKENS), torch.nan),
    )


def on_device(memory: LogMemory, device: str) -> LogMemory:
    return LogMemory(*(x.to(device) for x in (memory.key_JGLK, memory.value_JHLV, memory.decay_JHL)))


def batch(logs: Sequence[int], lens: Sequence[int], num_folded: Sequence[int], device: str) -> LogBatch:
    """Return where the logs of a step's sequences are, how much is in them, and how much is folded."""
    log_N = torch.tensor(logs, device=device)
    counts_up = list(logs) == list(range(logs[0], logs[0] + len(logs)))
    return LogBatch(
        log_N,
        torch.tensor(lens, device=device),
        slice(logs[0], logs[0] + len(logs)) if counts_up else log_N,
        tuple(lens),
        torch.tensor(num_folded, device=device),
        tuple(num_folded),
    )


class Decoding:
    """Sequences that decode rows of layers of their own, each with a log."""

    def __init__(
        self,
        num_sequences: int,
        num_tokens: int,
        logs: Sequence[int],
        setting: Setting,
    ) -> None:
        self.setting, shape = setting, setting.shape
        one = make_layer(num_tokens, shape)
        self.layers = [
            make_layer(num_tokens, shape, setting.dtype)._replace(
                A_log_H=one.A_log_H, dt_bias_H=one.dt_bias_H, max_beta=setting.max_beta
            )
            for _ in range(num_sequences)
        ]
        state_SHKV = make_arena(range(1, num_sequences + 1), shape)
        self.initial = [state_SHKV[slot].clone() for slot in range(1, num_sequences + 1)]
        self.state_SHKV = state_SHKV.to(setting.device)
        self.memory = on_device(make_logs(shape), setting.device)
        self.logs = list(logs)
        self.slots = list(range(1, num_sequences + 1))
        self.done = [0] * num_sequences
        self.logged = [0] * num_sequences
        self.outs: list[list[Tensor]] = [[] for _ in range(num_sequences)]

    def step(
        self,
        members: Sequence[int],
        dst: Sequence[int] | None = None,
        *,
        num_padding: int = 0,
        early: Sequence[int] = (),
    ) -> None:
        """Advance some sequences by a token.

        Args:
            dst: where their states go, if not to where they are.
            early: the sequences that fold although their logs have room.
        """
        device = self.setting.device
        rows = [self.layers[i].rows(self.done[i], self.done[i] + 1)[:5] for i in members]
        rows += [rows[0]] * num_padding
        tensors: list[Any] = [*map(torch.cat, zip(*rows, strict=True)), *self.layers[0][5:7]]
        inputs = GatedDeltaInputs(*(x.to(device) for x in tensors), self.setting.max_beta)
        src = [self.slots[i] for i in members]
        dst = src if dst is None else dst
        padding = [NULL_SLOT] * num_padding
        folds = {i: i in early or self._must_fold(i, target) for i, target in zip(members, dst, strict=True)}
        logs = batch(
            [*(self.logs[i] for i in members), *padding],
            [*(self.logged[i] for i in members), *padding],
            [*(self.logged[i] + 1 if folds[i] else 0 for i in members), *padding],
            device,
        )
        slots = Slots(*(torch.tensor([*column, *padding], device=device) for column in (src, dst)))
        with poisoned_memory():
            out_NHV = self.setting.decode(inputs, self.state_SHKV, slots, self.memory.of_layer(0), logs)
        assert out_NHV.dtype == self.setting.dtype
        for i, target, out_HV in zip(members, dst, out_NHV.cpu(), strict=False):
            if target == NULL_SLOT:
                continue
            self.logged[i] = 0 if folds[i] else self.logged[i] + 1
            self.slots[i] = target
            self.outs[i].append(out_HV)
            self.done[i] += 1

    def _must_fold(self, i: int, target: int) -> bool:
        return self.logs[i] == NULL_LOG or self.logged[i] == LOG_TOKENS or self.slots[i] != target

    def check(self, i: int) -> None:
        """Assert that a sequence's outputs are those of the recurrence, and its state after a fold, too."""
        layer = self.layers[i].rows(0, self.done[i])
        expected_THV, state_HKV = gdn_recurrent_reference(layer, self.initial[i])
        tolerance = FLOAT32 if self.setting.dtype == torch.float32 else BFLOAT16
        torch.testing.assert_close(torch.stack(self.outs[i]).float(), expected_THV.float(), **tolerance)
        self.fold([i])
        torch.testing.assert_close(self.state_SHKV[self.slots[i]].cpu(), state_HKV, **FLOAT32)

    def fold(self, members: Sequence[int]) -> None:
        members = [i for i in members if self.logged[i]]
        if members:
            columns = [(self.slots[i], self.logs[i], self.logged[i]) for i in members]
            tensors = (torch.tensor(column, device=self.setting.device) for column in zip(*columns, strict=True))
            self.setting.fold(self.state_SHKV.unsqueeze(0), self.memory, *tensors)
        for i in members:
            self.logged[i] = 0


def check_however_full(num_tokens: int, setting: Setting, logs: Sequence[int] = (4, 5, 6)) -> None:
    decoding = Decoding(len(logs), num_tokens, logs, setting)
    for _ in range(num_tokens):
        decoding.step(range(len(logs)), num_padding=1)
    for i in range(len(logs)):
        decoding.check(i)


def check_sequences_that_come_and_go(random: Random, setting: Setting, num_steps: int = 25) -> None:
    decoding = Decoding(4, 30, random.sample([1, 3, 4, 8], 4), setting)
    for _ in range(num_steps):
        members = random.sample(range(4), random.randint(1, 4))
        decoding.step(members)
        if random.random() < 0.5:
            decoding.check(members[0])
    for i in range(4):
        if decoding.done[i]:
            decoding.check(i)


def check_a_shared_snapshot_is_only_read(setting: Setting) -> None:
    decoding = Decoding(2, 2 * LOG_TOKENS, [1, 2], setting)
    decoding.slots = [1, 1]
    decoding.initial[1] = decoding.initial[0]
    decoding.step([0, 1], dst=[10, 11])
    for _ in range(2 * LOG_TOKENS - 1):
        decoding.step([0, 1])
    assert torch.equal(decoding.state_SHKV[1].cpu(), decoding.initial[0])
    decoding.check(0)
    decoding.check(1)


def check_a_state_that_moves(logged: int, setting: Setting) -> None:
    """Move a state after its log was folded, as where a snapshot is left."""
    decoding = Decoding(2, 20, [1, 2], setting)
    for _ in range(logged):
        decoding.step([0, 1])
    decoding.fold([0, 1])
    decoding.step([0, 1], dst=[9, 2])
    for _ in range(3):
        decoding.step([0, 1])
    decoding.check(0)
    decoding.check(1)


def check_from_zeros(setting: Setting) -> None:
    decoding = Decoding(1, 12, [3], setting)
    decoding.slots = [NULL_SLOT]
    decoding.initial = [torch.zeros_like(decoding.initial[0])]
    decoding.step([0], dst=[9])
    for _ in range(11):
        decoding.step([0])
    decoding.check(0)


def check_an_ended_sequence_changes_nothing(logged: int, setting: Setting) -> None:
    decoding = Decoding(2, 20, [5, 6], setting)
    for _ in range(logged):
        decoding.step([0, 1])
    before_SHKV = decoding.state_SHKV.cpu()
    decoding.step([0, 1], dst=[NULL_SLOT, 2])
    assert torch.equal(decoding.state_SHKV[1].cpu(), before_SHKV[1])
    if logged:
        decoding.check(0)
    decoding.check(1)


def check_a_sequence_without_a_log(setting: Setting) -> None:
    decoding = Decoding(2, 12, [NULL_LOG, 2], setting)
    for _ in range(12):
        decoding.step([0, 1])
    assert decoding.logged[0] == 0
    decoding.check(0)
    decoding.check(1)


def check_fold_follows_plan(setting: Setting) -> None:
    """Fold one log that has room and append to another one that is as full: the plan decides, not the kernel."""
    decoding = Decoding(2, 12, [3, 5], setting)
    for _ in range(3):
        decoding.step([0, 1])
    before_SHKV = decoding.state_SHKV.cpu()
    decoding.step([0, 1], early=[0])
    assert decoding.logged == [0, 4]
    _, folded_HKV = gdn_recurrent_reference(decoding.layers[0].rows(0, 4), decoding.initial[0])
    torch.testing.assert_close(decoding.state_SHKV[1].cpu(), folded_HKV, **FLOAT32)
    assert torch.equal(decoding.state_SHKV[2].cpu(), before_SHKV[2])
    for _ in range(4):
        decoding.step([0, 1], early=[0, 1])
    decoding.check(0)
    decoding.check(1)


def check_extreme_decays(gate: str, setting: Setting) -> None:
    decoding = Decoding(1, 2 * LOG_TOKENS, [1], setting)
    a_TH = decoding.layers[0].a_TH
    a_TH.fill_({"vanishing": 300.0, "absent": -300.0, "strong once": -2.0}[gate])
    if gate == "strong once":
        a_TH[LOG_TOKENS // 2] = 1e6
    for _ in range(2 * LOG_TOKENS):
        decoding.step([0])
    decoding.check(0)


def check_nan_stays_in_its_sequence(setting: Setting) -> None:
    decoding = Decoding(2, 20, [1, 2], setting)
    decoding.layers[0].v_THV.fill_(torch.nan)
    for _ in range(12):
        decoding.step([0, 1])
    decoding.check(1)
    assert torch.stack(decoding.outs[0]).isnan().all()
    # The log's next holder does not see it.
    decoding.logs, decoding.logged[1] = [2, 1], 0
    for _ in range(5):
        decoding.step([1])
    decoding.check(1)


def check_folds_of_several_layers(setting: Setting) -> None:
    """Two layers of a model whose states lie beside each other, folded at once, equal to one after the other."""
    arena_SRHKV = torch.randn(6, 2, USUAL.value_heads, USUAL.key_dim, USUAL.value_dim)
    memory = make_logs(USUAL, num_layers=2)
    for x in (memory.key_JGLK, memory.value_JHLV):
        x.normal_()
    memory.decay_JHL.uniform_(-1, 0)
    columns = torch.tensor([(3, 7, 2), (1, 4, LOG_TOKENS), (5, 5, 1)]).T.contiguous()
    for _, log, length in columns.T:
        for x in (memory.key_JGLK, memory.value_JHLV, memory.decay_JHL):
            x[:, log].narrow(2, int(length), LOG_TOKENS - int(length)).zero_()
    expected_SRHKV = arena_SRHKV.clone()
    for layer in range(2):
        for slot, log, length in columns.T.tolist():
            state_HKV = expected_SRHKV[slot, layer]
            for i in range(length):
                state_HKV *= memory.decay_JHL[layer, log, :, i].exp().view(-1, 1, 1)
                key_HK = memory.key_JGLK[layer, log, :, i].repeat_interleave(USUAL.value_heads // USUAL.key_heads, 0)
                state_HKV += key_HK.unsqueeze(2) * memory.value_JHLV[layer, log, :, i].unsqueeze(1)
    state_SRHKV = arena_SRHKV.to(setting.device)
    setting.fold(state_SRHKV.transpose(0, 1), on_device(memory, setting.device), *columns.to(setting.device))
    torch.testing.assert_close(state_SRHKV.cpu(), expected_SRHKV, **FLOAT32)
    untouched = [0, 2, 4]
    assert torch.equal(state_SRHKV[untouched].cpu(), arena_SRHKV[untouched])


LENGTHS = [1, 2, LOG_TOKENS - 1, LOG_TOKENS, LOG_TOKENS + 1, 3 * LOG_TOKENS + 5]
SHAPES = [Shape(1, 1, 16, 16), Shape(2, 6, 8, 40), Shape(3, 3, 128, 16), Shape(1, 2, 5, 7)]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_decode_with_log_of_any_length_equals_recurrence(num_tokens: int) -> None:
    check_however_full(num_tokens, USUAL_SETTING)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_log_holds_for_any_ratio_and_size_of_heads(shape: Shape) -> None:
    check_however_full(11, replace(USUAL_SETTING, shape=shape), logs=[7, 2])


@given(random=st.randoms(use_true_random=False))
@settings(max_examples=settings().max_examples // 4)
def test_sequences_with_independent_lifetimes_do_not_interact(random: Random) -> None:
    torch.manual_seed(random.randrange(1000))
    check_sequences_that_come_and_go(random, USUAL_SETTING)


def test_negative_eigenvalues_with_a_log_equal_the_recurrence() -> None:
    check_however_full(2 * LOG_TOKENS + 3, replace(USUAL_SETTING, max_beta=2))


def test_a_shared_snapshot_is_read_and_never_written() -> None:
    check_a_shared_snapshot_is_only_read(USUAL_SETTING)


@pytest.mark.parametrize("logged", [0, 3, LOG_TOKENS])
def test_state_moves_to_another_slot_after_log_fold(logged: int) -> None:
    check_a_state_that_moves(logged, USUAL_SETTING)


def test_a_sequence_without_a_snapshot_starts_from_zeros() -> None:
    check_from_zeros(USUAL_SETTING)


@pytest.mark.parametrize("logged", [0, 3, LOG_TOKENS])
def test_ended_sequence_changes_neither_state_nor_log(logged: int) -> None:
    check_an_ended_sequence_changes_nothing(logged, USUAL_SETTING)


def test_state_without_log_is_written_every_step() -> None:
    check_a_sequence_without_a_log(USUAL_SETTING)


def test_fold_follows_plan() -> None:
    check_fold_follows_plan(USUAL_SETTING)


@pytest.mark.parametrize("gate", ["vanishing", "absent", "strong once"])
def test_extreme_decays_in_log_neither_overflow_nor_lose_weak_ones(gate: str) -> None:
    check_extreme_decays(gate, USUAL_SETTING)


def test_nan_does_not_reach_other_sequences_or_next_log_holder() -> None:
    check_nan_stays_in_its_sequence(USUAL_SETTING)


def test_fold_of_several_layers_adds_each_layers_log() -> None:
    check_folds_of_several_layers(USUAL_SETTING)
