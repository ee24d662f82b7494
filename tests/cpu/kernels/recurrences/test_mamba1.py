"""Mamba against transformers, and with logs against itself without. Shape suffixes as in ``mamba1.py``."""

import random
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from strandline.ids import NULL_LOG
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs, mamba1_decode, mamba1_prefill
from strandline.kernels.recurrences.mamba1_log import LOG_TOKENS, mamba1_log
from strandline.kernels.recurrences.recurrence import Recurrence, bind_folds
from strandline.kernels.recurrences.state_recurrence import StateRecurrence
from strandline.specs import LayerSpec, ModelSpec

NUM_CHANNELS, STATE_DIM = 20, 5
NUM_SLABS, NUM_LOGS = 12, 5

Functions = tuple[Callable[..., Any], ...] | None


def random_inputs(num_tokens: int, A_log_VK: Tensor) -> Mamba1Inputs:
    sizes = (NUM_CHANNELS, NUM_CHANNELS, STATE_DIM, STATE_DIM, NUM_CHANNELS)
    x_TV, z_TV, B_TK, C_TK, dt_TV = (torch.randn(num_tokens, size) for size in sizes)
    D_V, dt_bias_V = torch.randn(2, NUM_CHANNELS)
    return Mamba1Inputs(x_TV, z_TV, B_TK, C_TK, dt_TV, D_V, dt_bias_V, A_log_VK)


def random_rates() -> Tensor:
    return torch.empty(NUM_CHANNELS, STATE_DIM).uniform_(0.001, 4).log()


def test_prefill_equals_transformers() -> None:
    inputs = random_inputs(150, random_rates())
    x_TV, z_TV, B_TK, C_TK, dt_TV, D_V, dt_bias_V, A_log_VK = inputs
    expected_BVT, expected_BVK = mamba_selective_scan(
        x_TV.T[None],
        dt_TV.T[None],
        -A_log_VK.exp(),
        B_TK.T[None],
        C_TK.T[None],
        D=D_V,
        z=z_TV.T[None],
        delta_bias=dt_bias_V,
        delta_softplus=True,
        return_last_state=True,
    )
    state_SVK, slots = torch.full((3, NUM_CHANNELS, STATE_DIM), torch.nan), Slots(torch.tensor([0]), torch.tensor([2]))
    out_TV = mamba1_prefill.reference(inputs, state_SVK, slots, build_chunk_table([(0, 150)], [()]))
    torch.testing.assert_close(out_TV, expected_BVT[0].T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state_SVK[2], expected_BVK[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dt", [-200.0, 20.0, 3e4])
def test_extreme_time_steps_give_numbers(dt: float) -> None:
    inputs = random_inputs(100, random_rates())
    inputs.dt_TV[::7] = dt
    state_SVK, slots = torch.randn(3, NUM_CHANNELS, STATE_DIM), Slots(torch.tensor([1]), torch.tensor([2]))
    table = build_chunk_table([(5, 105)], [()])
    out_TV = mamba1_prefill.reference(inputs, state_SVK, slots, table)
    assert out_TV.isfinite().all()
    assert state_SVK[2].isfinite().all()


def test_a_recurrence_equals_itself_alone() -> None:
    A_log_VK = random_rates()
    one, two = recurrence_of(A_log_VK), recurrence_of(A_log_VK.clone())
    assert one == one
    assert one != two
    assert one.states == two.states
    assert one.log == two.log


def recurrence_of(A_log_VK: Tensor, functions: Functions = None) -> StateRecurrence[Mamba1Inputs]:
    return StateRecurrence(
        (mamba1_prefill, mamba1_decode), tuple(A_log_VK.shape), "float32", mamba1_log(A_log_VK), functions
    )


class Sequences:
    """Sequences that decode side by side, each with a log of its own, and the same again without logs."""

    def __init__(self, count: int, kernels: Functions) -> None:
        self.A_log_VK = random_rates()
        self.recurrence = recurrence_of(self.A_log_VK, kernels)
        spec = ModelSpec((LayerSpec(states=self.recurrence.states, log=self.recurrence.log),), 4, "float32")
        self.arena = ArenaTensors(spec, NUM_SLABS, num_logs=NUM_LOGS)
        self.memory = self.recurrence.bind(self.arena.layers[0].states, self.arena.layers[0].log)
        recurrences: list[Recurrence[Mamba1Inputs, object]] = [self.recurrence]
        (self.fold,) = bind_folds(recurrences, self.arena.stacks)
        assert self.memory.log is not None
        for tensor in (self.memory.log.step_JLV, self.memory.log.input_JLV, self.memory.log.B_JLK):
            tensor.fill_(torch.nan)
        self.state_SVK = self.memory.state_SX
        self.state_SVK[1 : 1 + count] = torch.randn(count, NUM_CHANNELS, STATE_DIM)
        self.plain_SVK = self.state_SVK.clone()
        self.lens = [0] * count

    def step(self, members: Sequence[int], folding: Sequence[int]) -> None:
        """Advance some sequences by a token; both ways of computing give the same bits."""
        inputs = random_inputs(len(members), self.A_log_VK)
        slots = torch.tensor([1 + member for member in members])
        lens = [self.lens[member] for member in members]
        num_folded = [n + 1 if member in folding else 0 for member, n in zip(members, lens, strict=True)]
        logs = LogBatch(slots, torch.tensor(lens), slots, tuple(lens), torch.tensor(num_folded), tuple(num_folded))
        out_NV = self.recurrence.decode(inputs, self.memory, Slots(slots, slots), logs)
        plain = self.recurrence.bind({"state": self.plain_SVK}, None)
        assert torch.equal(out_NV, self.recurrence.decode(inputs, plain, Slots(slots, slots), None))
        for member in members:
            self.lens[member] = 0 if member in folding else self.lens[member] + 1

    def fold_all(self) -> None:
        """Fold every log that holds something; then the states of both are equal."""
        slot_N = torch.tensor([1 + member for member, length in enumerate(self.lens) if length])
        if len(slot_N):
            self.fold(slot_N, slot_N, torch.tensor([length for length in self.lens if length]))
        self.lens = [0] * len(self.lens)
        assert torch.equal(self.state_SVK, self.plain_SVK)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Functions:
    if request.param == "torch":
        return None
    pytest.importorskip("triton")
    operations = recurrence_of(random_rates()).all_operations
    versions = ((operation.name, operation.backends[0].module) for operation in operations)
    return tuple(getattr(import_module(f"strandline.kernels.{module}"), name) for name, module in versions)


@pytest.mark.parametrize("seed", range(3))
def test_logs_change_no_bit(seed: int, kernels: Functions) -> None:
    rng, sequences = random.Random(seed), Sequences(4, kernels)
    for _ in range(30):
        members = rng.sample(range(4), rng.randint(1, 4))
        full = [member for member in members if sequences.lens[member] == LOG_TOKENS]
        sequences.step(members, full + [member for member in members if rng.random() < 0.1])
        if rng.random() < 0.2:
            sequences.fold_all()
    sequences.fold_all()


def test_an_ended_sequence_changes_neither_state_nor_log(kernels: Functions) -> None:
    sequences = Sequences(2, kernels)
    sequences.step([0, 1], [])
    before = [tensor.clone() for tensor in (sequences.state_SVK, sequences.arena.stacks[0].log["step"])]
    logs = LogBatch(torch.tensor([1, 2]), torch.tensor([1, 1]), slice(1, 3), (1, 1), torch.tensor([0, 2]), (0, 2))
    inputs = random_inputs(2, sequences.A_log_VK)
    slots = Slots(torch.tensor([1, 2]), torch.tensor([0, 0]))
    sequences.recurrence.decode(inputs, sequences.memory, slots, logs)
    after = [sequences.state_SVK, sequences.arena.stacks[0].log["step"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_a_state_that_moves_leaves_its_source_as_it_was(kernels: Functions) -> None:
    sequences = Sequences(1, kernels)
    before_VK = sequences.state_SVK[1].clone()
    logs = LogBatch(torch.tensor([NULL_LOG]), torch.tensor([0]), slice(0, 1), (0,), torch.tensor([1]), (1,))
    inputs, slots = random_inputs(1, sequences.A_log_VK), Slots(torch.tensor([1]), torch.tensor([7]))
    out_NV = sequences.recurrence.decode(inputs, sequences.memory, slots, logs)
    plain = sequences.recurrence.bind({"state": sequences.plain_SVK}, None)
    assert torch.equal(out_NV, sequences.recurrence.decode(inputs, plain, slots, None))
    assert torch.equal(sequences.state_SVK[1], before_VK)
    assert torch.equal(sequences.state_SVK, sequences.plain_SVK)
