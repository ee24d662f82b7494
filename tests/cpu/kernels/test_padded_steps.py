"""Kernels on a step with room to spare, as it is recorded: the same results and memory as without, and nothing of NaN.

Slots, blocks and windows that no sequence owns are NaN, and so is what ``torch.empty`` returns; the null ones are zero.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.device.batches.batch import HostBatch, build_host_batch, to_device
from strandline.device.batches.padded_step import PaddedStep, StepSize, fill_buffer
from strandline.ids import BLOCK_TOKENS, NULL_LOG, PendingToken, RequestId, SlotId
from strandline.kernels.batch import KVMemory, StepBatch
from strandline.kernels.binding import reference_kernels
from strandline.kernels.step import locate_rows
from strandline.records.plan import SequencePlan
from tests.cpu.device.test_padded_step import places_of
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import attention_triton, indexed_attention_triton
from strandline.kernels.attention.indexed_latent_attention import PooledIndex
from strandline.kernels.recurrences import (
    conv1d_triton,
    gdn_prefill_triton,
    kda_triton,
    mamba1_prefill_triton,
    mamba2_triton,
    rglru_triton,
)
from strandline.kernels.recurrences.conv1d import Convolution
from strandline.kernels.recurrences.gdn import GatedDeltaInputs
from strandline.kernels.recurrences.kda import KimiDeltaInputs
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs
from strandline.kernels.recurrences.rglru import GatedUnitInputs

NUM_SLOTS = 40
SIZES = [StepSize(2, 89), StepSize(5, 170), pytest.param(StepSize(16, 1536), marks=pytest.mark.long)]
"""Without a row to spare, with room for all kinds, and with much room; the steps below have 2 decodes and 89 rows of
prompts."""


@dataclass(frozen=True)
class Step:
    """One step as it is, and with room to spare."""

    host: HostBatch
    plain: StepBatch
    padded: StepBatch
    size: StepSize

    def spread(self, x_T: Tensor) -> Tensor:
        """Put rows where they are in the padded step, any numbers between them."""
        wide = torch.randn(self.size.num_rows, *x_T.shape[1:]).to(x_T.dtype)
        wide[: self.host.num_decodes] = x_T[: self.host.num_decodes]
        wide[self._prompt_rows] = x_T[self.host.num_decodes :]
        return wide

    def gather(self, x_T: Tensor) -> Tensor:
        """Take back the rows that are not padding."""
        return torch.cat([x_T[: self.host.num_decodes], x_T[self._prompt_rows]])

    @property
    def _prompt_rows(self) -> slice:
        return slice(self.size.num_decodes, self.size.num_decodes + self.host.num_prompt_rows)


def make_step(size: StepSize) -> Step:
    """Return two decodes and five prompts: fresh, resumed inside a block, of one token, with cuts everywhere."""
    ranges = [(70, 71), (5, 6), (0, 65), (37, 38), (60, 66), (64, 72), (3, 12)]
    cuts: dict[int, tuple[int, ...]] = {2: (1, 64, 65), 3: (38,), 4: (61, 63), 6: (7,)}
    num_decodes = 2
    next_slot, next_block = 1, 1
    sequences = []
    for index, (start, end) in enumerate(ranges):
        num_blocks = -(-end // BLOCK_TOKENS)
        here = cuts.get(index, ())
        src, dst = (next_slot if start else 0), next_slot + 1
        sequences.append(
            SequencePlan(
                request_id=RequestId(f"{index}"),
                start=start,
                end=end,
                token_ids=(7,) * (end - start),
                block_table=array("i", range(next_block, next_block + num_blocks)).tobytes(),
                kv_start=start,
                state_src=SlotId(src),
                state_dst=SlotId(dst),
                cuts=tuple((position, SlotId(dst + 1 + i)) for i, position in enumerate(here)),
                is_sampled=True,
                pending=PendingToken.NONE,
                is_prefill=False,
                log=NULL_LOG,
                num_logged=0,
                num_folded=end - start,
            )
        )
        next_slot += 2 + len(here)
        next_block += num_blocks
    host = build_host_batch(sequences, num_decodes)
    padded = PaddedStep(size, torch.zeros(size.num_integers, dtype=torch.int64))
    assert size.has_room_for(host)
    fill_buffer(size, padded.buffer_I.numpy(), host)
    table_NM = torch.zeros(size.num_sequences, max(8, size.num_blocks(256)), dtype=torch.int32)
    for number, row in zip(places_of(host, size), torch.from_numpy(host.block_tables[0]), strict=True):
        table_NM[number, : len(row)] = row
    # What is left of an earlier, longer step is not read.
    table_NM[places_of(host, size), host.block_tables[0].shape[1] :] = next_block
    kernels = reference_kernels([locate_rows])
    plain = to_device(host, torch.device("cpu"), kernels).step
    return Step(host, plain, padded.batch([table_NM], 256, kernels).step, size)


def make_slots(step: Step, *shape: int) -> Tensor:
    """Return slots: random ones that are read, zeros in the null slot, NaN in all others."""
    slots = torch.full((NUM_SLOTS, *shape), torch.nan)
    slots[step.plain.recurrent.src_N] = torch.randn(len(step.plain.recurrent.src_N), *shape)
    slots[0] = 0
    return slots


@dataclass(frozen=True)
class Kind:
    """A recurrence, the shapes of a token's inputs, and a state's."""

    prefill: Callable[..., Tensor]
    tokens: tuple[tuple[int, ...], ...]
    inputs: Callable[..., Any]
    parameters: Callable[[], tuple[Any, ...]]
    state: tuple[int, ...]


KINDS = {
    "gdn": Kind(
        gdn_prefill_triton.gdn_prefill,
        ((1, 16), (1, 16), (2, 16), (2,), (2,)),
        GatedDeltaInputs,
        lambda: (torch.rand(2).log(), torch.randn(2)),
        (2, 16, 16),
    ),
    "mamba2": Kind(
        mamba2_triton.mamba2_prefill,
        ((2, 16), (1, 16), (1, 16), (2,)),
        Mamba2Inputs,
        lambda: (torch.rand(2).log(), torch.randn(2), torch.randn(2), (0.01, torch.inf)),
        (2, 16, 16),
    ),
    "rglru": Kind(
        rglru_triton.rglru_prefill,
        ((20,), (20,), (20,), (1,)),
        GatedUnitInputs,
        lambda: (torch.randn(20),),
        (20,),
    ),
    "mamba1": Kind(
        mamba1_prefill_triton.mamba1_prefill,
        ((20,), (20,), (5,), (5,), (20,)),
        Mamba1Inputs,
        lambda: (torch.randn(20), torch.randn(20), torch.rand(20, 5).log()),
        (20, 5),
    ),
    "kda": Kind(
        kda_triton.kda_prefill,
        ((2, 16), (2, 16), (2, 16), (2, 16), (2,)),
        KimiDeltaInputs,
        lambda: (torch.rand(2).log(), torch.randn(2, 16), None),
        (2, 16, 16),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_recurrence_gives_the_same_and_leaves_the_same(size: StepSize, kind: str) -> None:
    torch.manual_seed(1)
    step, recurrence = make_step(size), KINDS[kind]
    num_decodes, num_rows = step.host.num_decodes, len(step.host.token_ids_T)
    inputs = [torch.randn(num_rows, *shape) for shape in recurrence.tokens]
    parameters = recurrence.parameters()
    state_SX = make_slots(step, *recurrence.state)
    padded_SX = state_SX.clone()

    def run(batch: StepBatch, inputs: list[Tensor], state_SX: Tensor) -> Tensor:
        first = batch.num_decodes
        prefilled = recurrence.inputs(*(x[first:] for x in inputs), *parameters)
        with poisoned_memory():
            out_T = recurrence.prefill(prefilled, state_SX, batch.prefill_slots, batch.recurrent.chunks)
        return torch.cat([torch.zeros(first, *out_T.shape[1:]), out_T])

    expected = run(step.plain, inputs, state_SX)
    out = run(step.padded, [step.spread(x) for x in inputs], padded_SX)
    assert out.isfinite().all()
    assert torch.equal(step.gather(out)[num_decodes:], expected[num_decodes:])
    assert torch.equal(padded_SX.nan_to_num(99.0), state_SX.nan_to_num(99.0))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_convolution_gives_the_same_and_leaves_the_same(size: StepSize) -> None:
    torch.manual_seed(2)
    step = make_step(size)
    num_decodes = step.host.num_decodes
    x_TC, weight_CW = torch.randn(len(step.host.token_ids_T), 48), torch.randn(48, 4)
    window_SRC = make_slots(step, 3, 48)
    padded_SRC = window_SRC.clone()

    def run(batch: StepBatch, x_TC: Tensor, window_SRC: Tensor) -> Tensor:
        first, where = batch.num_decodes, (batch.prefill_slots, batch.recurrent.chunks)
        with poisoned_memory():
            y_TC = conv1d_triton.causal_conv1d_prefill(x_TC[first:], Convolution(weight_CW), window_SRC, *where)
        return torch.cat([torch.zeros(first, 48), y_TC])

    expected = run(step.plain, x_TC, window_SRC)
    out = run(step.padded, step.spread(x_TC), padded_SRC)
    assert out.isfinite().all()
    assert torch.equal(step.gather(out)[num_decodes:], expected[num_decodes:])
    assert torch.equal(padded_SRC.nan_to_num(99.0), window_SRC.nan_to_num(99.0))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_gives_the_same(size: StepSize) -> None:
    torch.manual_seed(3)
    step = make_step(size)
    q_THD = torch.randn(len(step.host.token_ids_T), 2, 16)
    k_BPGD, v_BPGD = torch.full((2, 20, BLOCK_TOKENS, 1, 16), torch.nan)
    for memory in (k_BPGD, v_BPGD):
        memory[0] = 0
        for row, end in zip(step.host.block_tables[0], step.host.columns.end, strict=True):
            for position in range(end):
                memory[row[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = torch.randn(1, 16)

    def run(batch: StepBatch, q_THD: Tensor) -> Tensor:
        with poisoned_memory():
            return attention_triton.paged_attention(
                q_THD, KVMemory(k_BPGD, v_BPGD), batch.attention, batch.num_decodes, scale=0.3
            )

    expected = run(step.plain, q_THD)
    out = run(step.padded, step.spread(q_THD))
    assert out.isfinite().all()
    # Another number of programs shares the context: sums are in another order.
    torch.testing.assert_close(step.gather(out), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_indexed_attention_gives_the_same(size: StepSize) -> None:
    torch.manual_seed(4)
    step = make_step(size)
    latent_BPD, index_BPX = (torch.full((20, BLOCK_TOKENS, channels), torch.nan) for channels in (16, 32))
    for memory in (latent_BPD, index_BPX):
        memory[0] = 0
        for row, end in zip(step.host.block_tables[0], step.host.columns.end, strict=True):
            for position in range(end):
                memory[row[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = torch.randn(memory.shape[-1])
    num_tokens = len(step.host.token_ids_T)
    rows = torch.randn(num_tokens, 2, 16), torch.randn(num_tokens, 4, 16), torch.randn(num_tokens, 4)
    index = PooledIndex(4, 5, torch.randn(4, 16))

    def run(batch: StepBatch, q_THD: Tensor, index_q_TJC: Tensor, weight_TJ: Tensor) -> tuple[Tensor, Tensor]:
        with poisoned_memory():
            group_TK = indexed_attention_triton.choose_groups(index_q_TJC, weight_TJ, index_BPX, batch.attention, index)
            chosen = (group_TK, batch.attention, 4, 16)
            return group_TK, indexed_attention_triton.indexed_latent_attention(q_THD, latent_BPD, *chosen, scale=0.3)

    assert step.plain.attention.has_lengths
    assert not step.padded.attention.has_lengths
    expected_TK, expected = run(step.plain, *rows)
    group_TK, out = run(step.padded, *map(step.spread, rows))
    assert out.isfinite().all()
    assert torch.equal(step.gather(group_TK), expected_TK)
    # Another number of programs shares the keys: sums are in another order.
    torch.testing.assert_close(step.gather(out), expected, rtol=1e-5, atol=1e-6)
