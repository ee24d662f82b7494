"""What programs leave of rows that they attend, and the sums of splits, in Triton.

Shared by the kernels of attention. With one split, a program writes rows of the result. With more, each split leaves
its normalised result and the logarithm of its sum, and a small kernel combines them.

Shape suffixes: as in ``attention_triton.py``; R rows of a token and a head.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

COMBINED = 32
"""Splits that are added up together; what lies beyond the context adds exact zeros."""

COMBINE_ELEMENTS = 4096
"""Elements of partial results that one program has loaded at once: 32 per thread."""


@triton.jit
def store_rows(
    acc_MD,
    max_M,
    sum_M,
    out_ptr,
    partial_ptr,
    lse_ptr,
    row_M,
    head_M,
    is_row_M,
    first_row,
    split,
    num_splits,
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Write rows of ``out_THD``; or, of one split, normalised results and the log2 of their sums."""
    channel_D = tl.arange(0, BLOCK_D)
    # The sum of a row that has seen NaN is NaN: its result is, too.
    has_seen_M = sum_M != 0.0
    divisor_M = tl.where(has_seen_M, sum_M, 1.0)
    result_MD = acc_MD / divisor_M[:, None] * v_scale
    if IS_SPLIT:
        partial_M = ((row_M - first_row) * NUM_HEADS + head_M) * num_splits + split
        tl.store(lse_ptr + partial_M, tl.where(has_seen_M, max_M + tl.log2(divisor_M), float("-inf")), mask=is_row_M)
        # A split that has seen nothing leaves its partial result unwritten.
        is_stored_MD = (is_row_M & has_seen_M)[:, None] & (channel_D < HEAD_DIM)[None, :]
        tl.store(partial_ptr + (partial_M * HEAD_DIM)[:, None] + channel_D[None, :], result_MD, mask=is_stored_MD)
    else:
        out_ptr_M = out_ptr + (row_M * NUM_HEADS + head_M) * HEAD_DIM
        is_stored_MD = is_row_M[:, None] & (channel_D < HEAD_DIM)[None, :]
        result_MD = result_MD.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr_M[:, None] + channel_D[None, :], result_MD, mask=is_stored_MD)


@triton.jit
def _add_splits(
    out_D,
    total,
    max_lse,
    lse_S,
    partial_ptr,
    split_S,
    num_splits,
    channel_D,
    HEAD_DIM: tl.constexpr,
):
    """Return the weighted sum of results, the sum of weights and the maximum that they are relative to, after more
    splits.
    """
    # Loaded with their sums, not after them: what a split has not written is dropped.
    partial_ptr_SD = partial_ptr + (split_S * HEAD_DIM)[:, None] + channel_D[None, :]
    is_read_SD = (split_S < num_splits)[:, None] & (channel_D < HEAD_DIM)[None, :]
    partial_SD = tl.load(partial_ptr_SD, mask=is_read_SD, other=0.0)
    partial_SD = tl.where((lse_S != float("-inf"))[:, None], partial_SD, 0.0)
    new_max = tl.maximum(max_lse, tl.max(lse_S, axis=0))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight_S = tl.exp2(lse_S - finite_max)
    decay = tl.exp2(max_lse - finite_max)
    total = total * decay + tl.sum(weight_S, axis=0)
    out_D = out_D * decay + tl.sum(partial_SD * weight_S[:, None], axis=0)
    return out_D, total, new_max


@triton.jit
def _sums_of(lse_ptr, split_S, num_splits):
    """Return the logarithms of sums of some splits; minus infinity after the last split."""
    return tl.load(lse_ptr + split_S, mask=split_S < num_splits, other=float("-inf"))


@triton.jit(do_not_specialize=["first_row", "num_splits"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    first_row,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Weigh the splits of one row and head by their sums; a row that no split has seen keys for gives zeros.

    A row's sum is the same when more empty splits follow; of these, no more than ``BLOCK_S`` are read.
    """
    row = tl.program_id(0).to(tl.int64)
    split_S = tl.arange(0, BLOCK_S)
    channel_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse_ptr += row * num_splits
    partial_ptr += row * num_splits * HEAD_DIM
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    out_D = tl.zeros([BLOCK_D], dtype=tl.float32)
    no_splits = float("-inf")
    lse_S = _sums_of(lse_ptr, split_S, num_splits)
    # Splits are added up in blocks. Whether a block has a result is known before its turn.
    next_lse_S = _sums_of(lse_ptr, BLOCK_S + split_S, num_splits)
    out_D, total, max_lse = _add_splits(
        out_D, 0.0, no_splits, lse_S, partial_ptr, split_S, num_splits, channel_D, HEAD_DIM
    )
    for first in range(BLOCK_S, num_splits, BLOCK_S):
        lse_S = next_lse_S
        next_lse_S = _sums_of(lse_ptr, first + BLOCK_S + split_S, num_splits)
        # A maximum leaves out NaN.
        if tl.max((lse_S != no_splits).to(tl.int32), axis=0) > 0:
            out_D, total, max_lse = _add_splits(
                out_D, total, max_lse, lse_S, partial_ptr, first + split_S, num_splits, channel_D, HEAD_DIM
            )
    out_D = out_D / tl.where(total > 0.0, total, 1.0)
    out_ptr_D = out_ptr + (first_row.to(tl.int64) * NUM_HEADS + row) * HEAD_DIM + channel_D
    tl.store(out_ptr_D, out_D.to(out_ptr.dtype.element_ty), mask=channel_D < HEAD_DIM)


def combine(
    partial_RSD: Tensor, lse_RS: Tensor, out_THD: Tensor, first_row: int, num_rows: int, num_splits: int
) -> None:
    """Write ``num_rows`` rows of the result from ``first_row`` on; one kernel for any number of splits."""
    _, num_heads, head_dim = out_THD.shape
    block_d = min(padded(head_dim), COMBINE_ELEMENTS // COMBINED)
    _combine_kernel[(num_rows * num_heads, cdiv(head_dim, block_d))](
        partial_RSD,
        lse_RS,
        out_THD,
        first_row,
        num_splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_S=COMBINED,
        BLOCK_D=block_d,
        num_warps=4,
        **overlap_options(out_THD),
    )


def scratch(out_THD: Tensor, num_rows: int, num_splits: int, *, is_needed: bool) -> tuple[Tensor, Tensor]:
    """Return ``partial_RSD`` and ``lse_RS`` for rows of a token and a head; any tensors where none are needed."""
    if not is_needed:
        return out_THD, out_THD
    _, num_heads, head_dim = out_THD.shape
    rows = num_rows * num_heads * num_splits
    memory = torch.empty(rows * (head_dim + 1), dtype=torch.float32, device=out_THD.device)
    return memory, memory[rows * head_dim :]


def padded(head_dim: int) -> int:
    """Return the power of two that a head's channels are padded to; a dot takes 16 at least."""
    return max(16, next_power_of_2(head_dim))
