"""What adapters add to products (``low_rank.py``), in the kernel that multiplies.

A launch before it multiplies the rows with all first factors. The kernel of few rows waits for that when it has loaded
what does not depend on the rows; the kernel of tiles when it has multiplied.

Shape suffixes: as in ``low_rank.py``; X spans of the inputs, Q ranks of all parts; in kernels M rows of x, N outputs,
R ranks of a part.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.sizes import next_power_of_2

MAX_BLOCK_RANKS = 32
MIN_TILE_RANKS = 16
"""As many as the smallest operand of a tensor core has."""

MANY = tl.constexpr(1 << 30)
"""More than there are slots, and parts."""


class Expansion(NamedTuple):
    """Rows times first factors, and the second ones: a runtime argument of kernels."""

    hidden_XTQ: Tensor
    """float32, to be added up over spans of the inputs; ranks that an adapter does not have hold anything, and so do
    rows without one."""
    up_SOR: Tensor
    part_O: Tensor
    rank_SP: Tensor
    slots_T: Tensor
    stride_span: int
    stride_hidden: int
    stride_slot: int
    stride_rank: int

    @classmethod
    def of(cls, hidden_XTQ: Tensor, term: LowRankTerm) -> "Expansion":
        """Return what a term adds."""
        weights = term.weights
        up_SOR, rank_SP = weights.up_SOR, weights.rank_SP
        # Equal for all numbers of rows, as far as kernels are compiled by it.
        stride_span = hidden_XTQ.stride(0) if len(hidden_XTQ) > 1 else 0
        strides = (stride_span, hidden_XTQ.stride(1), up_SOR.stride(0), rank_SP.stride(0))
        return cls(hidden_XTQ, up_SOR, weights.part_O, rank_SP, term.tiled.slots_T, *strides)

    def of_outputs(self, outputs: slice) -> "Expansion":
        """Return what is added to some of the outputs."""
        return self._replace(up_SOR=self.up_SOR[:, outputs], part_O=self.part_O[outputs])

    @property
    def constants(self) -> "ExpansionConstants":
        """What is compiled in."""
        max_rank = self.up_SOR.shape[2]
        block_ranks = min(MAX_BLOCK_RANKS, next_power_of_2(max_rank))
        return ExpansionConstants(max_rank, block_ranks, max(MIN_TILE_RANKS, block_ranks), len(self.hidden_XTQ))


class ExpansionConstants(NamedTuple):
    """What is compiled in of an expansion."""

    max_rank: int
    block_ranks: int
    tile_ranks: int
    """As many at a time on tensor cores."""
    num_spans: int


@triton.jit
def find_factors(expansion, row_M, is_row_M, output_N, is_output_N):
    """Load the slots of rows and the parts of outputs: what ``load_factors`` and ``load_hidden`` need."""
    slot_M = tl.load(expansion.slots_T + row_M, mask=is_row_M, other=-1)
    part_N = tl.load(expansion.part_O + output_N, mask=is_output_N, other=-1)
    return slot_M, part_N


@triton.jit
def load_factors(expansion, found, output_N, first_rank, EXPANSION: tl.constexpr):
    """Load second factors from a rank on, ``[M, N, R]``, and how many ranks are in use, ``[M, N]``."""
    slot_M, part_N = found
    rank_R = first_rank + tl.arange(0, EXPANSION.block_ranks)
    is_MN = (slot_M >= 0)[:, None] & (part_N >= 0)[None, :]
    rank_MN_ptr = expansion.rank_SP + (slot_M * expansion.stride_rank)[:, None] + part_N[None, :]
    rank_MN = tl.load(rank_MN_ptr, mask=is_MN, other=0)
    up_MN_ptr = expansion.up_SOR + (slot_M * expansion.stride_slot)[:, None] + (output_N * EXPANSION.max_rank)[None, :]
    is_rank_R = rank_R < EXPANSION.max_rank
    # Not only ranks in use: both loads are under way at once.
    up_MNR = tl.load(up_MN_ptr[:, :, None] + rank_R[None, None, :], mask=is_MN[:, :, None] & is_rank_R, other=0.0)
    return up_MNR, rank_MN


@triton.jit
def load_hidden(expansion, found, row_M, first_rank, EXPANSION: tl.constexpr):
    """Load the rows times first factors of the parts of outputs, ``[M, N, R]``; only after the wait."""
    slot_M, part_N = found
    rank_R = first_rank + tl.arange(0, EXPANSION.block_ranks)
    is_MN = (slot_M >= 0)[:, None] & (part_N >= 0)[None, :]
    hidden_M_ptr = expansion.hidden_XTQ + row_M.to(tl.int64) * expansion.stride_hidden
    hidden_MN_ptr = hidden_M_ptr[:, None] + (part_N * EXPANSION.max_rank)[None, :]
    mask_MNR = is_MN[:, :, None] & (rank_R < EXPANSION.max_rank)
    hidden_MNR_ptr = hidden_MN_ptr[:, :, None] + rank_R[None, None, :]
    return _add_spans(expansion, hidden_MNR_ptr, mask_MNR, EXPANSION)


@triton.jit
def _add_spans(expansion, hidden_ptr, mask, EXPANSION: tl.constexpr):
    """Load rows times first factors."""
    NUM_SPANS: tl.constexpr = EXPANSION.num_spans
    hidden = tl.load(hidden_ptr, mask=mask, other=0.0)
    for span in tl.static_range(1, NUM_SPANS):
        hidden += tl.load(hidden_ptr + tl.cast(span, tl.int64) * expansion.stride_span, mask=mask, other=0.0)
    return hidden


@triton.jit
def _multiply_ranks(factors, hidden_MNR, first_rank, EXPANSION: tl.constexpr):
    """Return the sums over some ranks; what is not in use may be NaN."""
    up_MNR, rank_MN = factors
    rank_R = first_rank + tl.arange(0, EXPANSION.block_ranks)
    products_MNR = hidden_MNR * up_MNR.to(tl.float32)
    return tl.sum(tl.where(rank_R[None, None, :] < rank_MN[:, :, None], products_MNR, 0.0), axis=2)


@triton.jit
def expand(expansion, found, factors, hidden_MNR, row_M, output_N, EXPANSION: tl.constexpr):
    """Return what is added to outputs, ``[M, N]``, given what was loaded for the first ranks."""
    MAX_RANK: tl.constexpr = EXPANSION.max_rank
    BLOCK_R: tl.constexpr = EXPANSION.block_ranks
    out_MN = _multiply_ranks(factors, hidden_MNR, 0, EXPANSION)
    for first_rank in tl.static_range(BLOCK_R, MAX_RANK, BLOCK_R):
        factors = load_factors(expansion, found, output_N, first_rank, EXPANSION)
        hidden_MNR = load_hidden(expansion, found, row_M, first_rank, EXPANSION)
        out_MN += _multiply_ranks(factors, hidden_MNR, first_rank, EXPANSION)
    return out_MN


@triton.jit
def expand_tile(acc_MN, expansion, slot_M, part_N, row_M, output_N, EXPANSION: tl.constexpr):
    """Add to a tile of outputs on tensor cores, adapter by adapter, and part by part; only after the wait.

    Args:
        slot_M: below 0 for rows without an adapter, and after the last one; ``part_N`` so of outputs.
    """
    MAX_RANK: tl.constexpr = EXPANSION.max_rank
    BLOCK_R: tl.constexpr = EXPANSION.tile_ranks
    NUM_BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    first_slot, last_slot = tl.min(tl.where(slot_M < 0, MANY, slot_M)), tl.max(slot_M)
    first_part, last_part = tl.min(tl.where(part_N < 0, MANY, part_N)), tl.max(part_N)
    blocks_of_slot = tl.maximum(last_part + 1 - first_part, 0) * NUM_BLOCKS
    hidden_M_ptr = expansion.hidden_XTQ + row_M.to(tl.int64) * expansion.stride_hidden
    up_N_ptr = expansion.up_SOR + output_N.to(tl.int64) * MAX_RANK
    for index in range(tl.maximum(last_slot + 1 - first_slot, 0) * blocks_of_slot):
        slot = first_slot + index // blocks_of_slot
        part = first_part + index % blocks_of_slot // NUM_BLOCKS
        rank_R = index % NUM_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
        rank = tl.load(expansion.rank_SP + slot * expansion.stride_rank + part)
        up_RN_ptr = (up_N_ptr + slot * expansion.stride_slot)[None, :] + rank_R[:, None]
        # Not only ranks in use: all loads are under way at once.
        is_rank_R = rank_R < MAX_RANK
        up_RN = tl.load(up_RN_ptr, mask=(part_N == part)[None, :] & is_rank_R[:, None], other=0.0)
        hidden_MR_ptr = hidden_M_ptr[:, None] + (part * MAX_RANK + rank_R)[None, :]
        hidden_MR = _add_spans(expansion, hidden_MR_ptr, (slot_M == slot)[:, None] & is_rank_R[None, :], EXPANSION)
        is_used_R = rank_R < rank
        up_RN = tl.where(is_used_R[:, None], up_RN, 0.0)
        hidden_MR = tl.where(is_used_R[None, :], hidden_MR, 0.0)
        acc_MN = tl.dot(hidden_MR.to(up_RN.dtype), up_RN, acc_MN, input_precision="ieee")
    return acc_MN
