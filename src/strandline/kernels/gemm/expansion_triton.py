"""What adapters add to products of few rows (``low_rank.py``), in the kernel that multiplies.

A launch before it has multiplied the rows with all first factors. Whatever does not depend on the rows is loaded before
the kernel waits for that.

Shape suffixes: as in ``low_rank.py``; Q ranks of all parts; in kernels M rows of x, N outputs, R ranks of a part.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.sizes import next_power_of_2

MAX_BLOCK_RANKS = 32


class Expansion(NamedTuple):
    """Rows times first factors, and the second ones: a runtime argument of kernels."""

    hidden_TQ: Tensor
    """float32; ranks that an adapter does not have hold anything, and so do rows without one."""
    up_SOR: Tensor
    part_O: Tensor
    rank_SP: Tensor
    slots_T: Tensor
    stride_hidden: int
    stride_slot: int
    stride_rank: int

    @classmethod
    def of(cls, hidden_TQ: Tensor, term: LowRankTerm) -> "Expansion":
        """Return what a term adds."""
        weights = term.weights
        up_SOR, rank_SP = weights.up_SOR, weights.rank_SP
        strides = (hidden_TQ.stride(0), up_SOR.stride(0), rank_SP.stride(0))
        return cls(hidden_TQ, up_SOR, weights.part_O, rank_SP, term.tiled.slots_T, *strides)

    def of_outputs(self, outputs: slice) -> "Expansion":
        """Return what is added to some of the outputs."""
        return self._replace(up_SOR=self.up_SOR[:, outputs], part_O=self.part_O[outputs])

    @property
    def constants(self) -> "ExpansionConstants":
        """What is compiled in."""
        max_rank = self.up_SOR.shape[2]
        return ExpansionConstants(max_rank, min(MAX_BLOCK_RANKS, next_power_of_2(max_rank)))


class ExpansionConstants(NamedTuple):
    """What is compiled in of an expansion."""

    max_rank: int
    block_ranks: int


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
    hidden_M_ptr = expansion.hidden_TQ + row_M.to(tl.int64) * expansion.stride_hidden
    hidden_MN_ptr = hidden_M_ptr[:, None] + (part_N * EXPANSION.max_rank)[None, :]
    mask_MNR = is_MN[:, :, None] & (rank_R < EXPANSION.max_rank)
    return tl.load(hidden_MN_ptr[:, :, None] + rank_R[None, None, :], mask=mask_MNR, other=0.0)


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
