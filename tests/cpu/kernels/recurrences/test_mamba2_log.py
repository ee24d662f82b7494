"""Mamba-2 decode with a log against the same without one: outputs, and the states that folds leave.

The ``check_`` functions take any version of the operations, on any device; shape suffixes as in ``mamba2_log.py``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.ids import NULL_LOG, NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.binding import why_unavailable
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory, gdn_fold
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs, mamba2_decode
from strandline.kernels.recurrences.mamba2_log import mamba2_decode_logged, mamba2_log
from tests.poison import poisoned_memory

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 4e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-2},
}
"""Sums in another order; outputs of several units are rounded once more."""

NUM_SLOTS = NUM_LOGS = 12


class Shape(NamedTuple):
    """Sizes of a layer."""

    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int


USUAL = Shape(2, 4, 16, 12)
SHAPES = [Shape(1, 3, 5, 7), Shape(1, 1, 24, 80), Shape(2, 12, 8, 24)]


@dataclass(frozen=True)
class Setting:
    """Which version of the operations runs where, and on what."""

    decode: Callable[..., Tensor] = mamba2_decode_logged.reference
    fold: Callable[..., None] = gdn_fold.reference
    shape: Shape = USUAL
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


class Sequences:
    """Sequences that decode side by side, each with a log of its own, and the same again without logs."""

    def __init__(self, count: int, setting: Setting) -> None:
        self.setting, shape = setting, setting.shape
        heads = shape.num_heads
        self.parameters = (torch.empty(heads).uniform_(0.001, 4).log(), torch.randn(heads), torch.randn(heads))
        self.plain_SHKV = torch.randn(NUM_SLOTS, heads, shape.state_dim, shape.head_dim)
        self.plain_SHKV[NULL_SLOT] = torch.nan
        self.state_SHKV = self.plain_SHKV.to(setting.device, copy=True)
        tensors = mamba2_log(*shape).spec.tensors
        self.memory = LogMemory(
            *(torch.full((1, NUM_LOGS, *x.shape), torch.nan, device=setting.device) for x in tensors)
        )
        self.logs, self.slots = list(range(1, count + 1)), list(range(1, count + 1))
        self.lens = [0] * count

    def step(self, members: Sequence[int], folding: Sequence[int] = (), dst: Sequence[int] | None = None) -> None:
        """Advance sequences by a token, both with logs and without.

        Args:
            folding: sequences that fold although they need not.
            dst: where states go; None: where they are.
        """
        setting, count = self.setting, len(members)
        src = [self.slots[i] for i in members]
        dst = src if dst is None else dst
        lens = [self.lens[i] for i in members]
        must_fold = [
            i in folding or self.logs[i] == NULL_LOG or self.lens[i] == LOG_TOKENS or self.slots[i] != target
            for i, target in zip(members, dst, strict=True)
        ]
        num_folded = [n + 1 if folds else 0 for n, folds in zip(lens, must_fold, strict=True)]
        columns = ([self.logs[i] for i in members], lens, num_folded)
        log_N, len_N, num_folded_N = (torch.tensor(x, device=setting.device) for x in columns)
        logs = LogBatch(log_N, len_N, log_N, tuple(lens), num_folded_N, tuple(num_folded))
        inputs = self.random_inputs(count)
        moved = Mamba2Inputs(*(x.to(setting.device) if isinstance(x, Tensor) else x for x in inputs))
        slots = Slots(*(torch.tensor(x, device=setting.device) for x in (src, dst)))
        with poisoned_memory():
            out_NHV = setting.decode(moved, self.state_SHKV, slots, self.memory.of_layer(0), logs)
        expected_NHV = mamba2_decode.reference(inputs, self.plain_SHKV, Slots(*(x.cpu() for x in slots)))
        torch.testing.assert_close(out_NHV.cpu(), expected_NHV, **TOLERANCES[setting.dtype], equal_nan=True)
        for i, target, folds in zip(members, dst, must_fold, strict=True):
            if target != NULL_SLOT:
                self.slots[i], self.lens[i] = target, 0 if folds else self.lens[i] + 1

    def random_inputs(self, count: int) -> Mamba2Inputs:
        shape = self.setting.shape
        sizes = [(shape.num_heads, shape.head_dim), *[(shape.num_groups, shape.state_dim)] * 2, (shape.num_heads,)]
        x, B, C, dt = (torch.randn(count, *size).to(self.setting.dtype) for size in sizes)
        return Mamba2Inputs(x, B, C, dt, *self.parameters, (0.01, torch.inf))

    def fold(self) -> None:
        """Fold all logs; then the states are those without logs, in every slot."""
        rows = [i for i, length in enumerate(self.lens) if length]
        if rows:
            columns = ([self.slots[i] for i in rows], [self.logs[i] for i in rows], [self.lens[i] for i in rows])
            tensors = (torch.tensor(column, device=self.setting.device) for column in columns)
            self.setting.fold(self.state_SHKV.unsqueeze(0), self.memory, *tensors)
        self.lens = [0] * len(self.lens)
        found_SHKV = self.state_SHKV.cpu()
        torch.testing.assert_close(found_SHKV, self.plain_SHKV, **TOLERANCES[torch.float32], equal_nan=True)


def check_any_schedule(setting: Setting, seed: int, num_steps: int = 30) -> None:
    rng, sequences = random.Random(seed), Sequences(6, setting)
    for _ in range(num_steps):
        members = rng.sample(range(6), rng.randint(1, 6))
        sequences.step(members, folding=[i for i in members if rng.random() < 0.1])
        if rng.random() < 0.1:
            sequences.fold()
    sequences.fold()


def check_states_that_move_or_end(setting: Setting) -> None:
    sequences = Sequences(3, setting)
    sequences.slots = [1, 1, NULL_SLOT]  # two resume from one snapshot, one starts from zeros
    sequences.step([0, 1, 2], dst=[4, 5, 6])
    for _ in range(3):
        sequences.step([0, 1, 2])
    before_SHKV = sequences.state_SHKV.clone()
    sequences.step([0, 1, 2], dst=[NULL_SLOT] * 3)
    assert torch.equal(sequences.state_SHKV.nan_to_num(9.0), before_SHKV.nan_to_num(9.0))
    for _ in range(LOG_TOKENS):
        sequences.step([0, 1, 2])
    sequences.fold()


def check_a_sequence_without_a_log(setting: Setting) -> None:
    sequences = Sequences(2, setting)
    sequences.logs[0] = NULL_LOG
    for _ in range(3):
        sequences.step([0, 1])
        found_HKV, expected_HKV = sequences.state_SHKV[1].cpu(), sequences.plain_SHKV[1]
        torch.testing.assert_close(found_HKV, expected_HKV, **TOLERANCES[torch.float32])
    sequences.fold()


def version(name: str) -> Setting:
    """Return the functions of a backend, or skip the test."""
    if name == "torch":
        return Setting()
    if name == "numba" and why_unavailable("Numba", "cpu") is not None:
        pytest.skip("needs Numba")
    if name == "triton":
        pytest.importorskip("triton")
    functions = [
        getattr(import_module(f"strandline.kernels.{backend.module}"), operation.name)
        for operation in (mamba2_decode_logged, gdn_fold)
        for backend in operation.backends
        if backend.name.lower() == name
    ]
    return Setting(*functions)


@pytest.fixture(params=["torch", "numba", "triton"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return version(request.param)


def test_logs_change_neither_outputs_nor_states(setting: Setting) -> None:
    check_any_schedule(setting, seed=0)


@pytest.mark.parametrize("name", ["numba", "triton"])
def test_logs_hold_for_any_ratio_and_size_of_heads(name: str) -> None:
    setting = replace(version(name), dtype=torch.bfloat16)
    for shape in SHAPES:
        check_any_schedule(replace(setting, shape=shape), seed=1, num_steps=12)


def test_launches_of_many_sequences_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("strandline.kernels.recurrences.mamba2_log_triton")
    monkeypatch.setattr(module, "choose_decode", lambda measured, num_sequences: measured.many)
    check_any_schedule(replace(version("triton"), shape=Shape(1, 2, 8, 80)), seed=3, num_steps=15)


def test_states_that_move_or_end_leave_other_slots_alone(setting: Setting) -> None:
    check_states_that_move_or_end(setting)


def test_state_without_log_is_written_every_step(setting: Setting) -> None:
    check_a_sequence_without_a_log(setting)
