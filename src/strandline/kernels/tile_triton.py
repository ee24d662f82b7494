"""Tiles of GEMMs with weights of every format: which one a program computes, and where it is stored.

A dense weight may be multiplied in the launch of a quantised one, by programs of its own (``gemm_dense``).

Shape suffixes: M rows of x, N or O outputs, K inputs, S spans of the inputs.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv

GROUP_ROWS = tl.constexpr(8)
"""Row tiles that share the weight's tiles while they are in the second-level cache."""

BLOCK_SPANS = 256
"""Outputs of a program that adds up spans."""


@triton.jit
def locate_tile(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows and outputs of a program's tile."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    first_m = program // (num_n * GROUP_ROWS) * GROUP_ROWS
    group_m = tl.minimum(num_m - first_m, GROUP_ROWS)
    row_M = (first_m + program % (num_n * GROUP_ROWS) % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_N = program % (num_n * GROUP_ROWS) // group_m * BLOCK_N + tl.arange(0, BLOCK_N)
    return row_M, row_N


@triton.jit
def store_tile(out_ptr, acc, row_M, row_N, M, N, stride_out, IS_SPLIT: tl.constexpr, IS_SWAPPED: tl.constexpr):
    """Store a tile of the product, or of its swap; split, that of the program's span of the inputs."""
    acc_MN = tl.trans(acc) if IS_SWAPPED else acc
    out_row_M = row_M.to(tl.int64)
    if IS_SPLIT:
        out_row_M += tl.program_id(1) * M
    out_MN_ptr = out_ptr + out_row_M[:, None] * stride_out + row_N[None, :]
    tl.store(out_MN_ptr, acc_MN.to(out_ptr.dtype.element_ty), mask=(row_M < M)[:, None] & (row_N < N)[None, :])


@triton.jit
def gemm_dense(
    x_ptr,
    weight_ptr,
    out_ptr,
    program,
    M,
    N,
    K,
    span,
    stride_x,
    stride_out,
    IS_SPLIT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write a tile of the product of plain rows and a dense weight."""
    row_M, row_N = locate_tile(program, M, N, BLOCK_M, BLOCK_N)
    # As many bytes at a time as of a weight in FP8: the shared memory that programs take decides how many run at once.
    BLOCK_K: tl.constexpr = GROUP // 2
    col_K = tl.arange(0, BLOCK_K)
    x_KM_ptr = x_ptr + (row_M % M).to(tl.int64)[None, :] * stride_x + col_K[:, None]
    weight_NK_ptr = weight_ptr + row_N.to(tl.int64)[:, None] * K + col_K[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1) * span * GROUP
    for start in range(first, tl.minimum(first + span * GROUP, K), BLOCK_K):
        is_K = start + col_K < K
        weight_NK = tl.load(weight_NK_ptr + start, mask=(row_N < N)[:, None] & is_K[None, :], other=0.0)
        x_KM = tl.load(x_KM_ptr + start, mask=is_K[:, None], other=0.0)
        if IS_SWAPPED:
            acc = tl.dot(weight_NK, x_KM, acc, input_precision="ieee")
        else:
            acc = tl.dot(tl.trans(x_KM), tl.trans(weight_NK), acc, input_precision="ieee")
    store_tile(out_ptr, acc, row_M, row_N, M, N, stride_out, IS_SPLIT, IS_SWAPPED)


@triton.jit
def _add_spans_kernel(
    part_ptr,
    bias_ptr,
    out_ptr,
    size,
    N,
    stride_out,
    HAS_BIAS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the spans' products, in their order."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_offset = offset < size
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for span in tl.static_range(SPANS):
        total += tl.load(part_ptr + span * size + offset, mask=is_offset, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + offset % N, mask=is_offset, other=0.0).to(tl.float32)
    out_offset = (offset // N).to(tl.int64) * stride_out + offset % N
    tl.store(out_ptr + out_offset, total.to(out_ptr.dtype.element_ty), mask=is_offset)


def add_spans(part_SMO: Tensor, bias_O: Tensor | None, out_MO: Tensor) -> None:
    """Fill ``out_MO``, whose rows are dense, with the sum of the spans' products, in their order, and a bias."""
    size = out_MO.numel()
    _add_spans_kernel[(cdiv(size, BLOCK_SPANS),)](
        part_SMO,
        bias_O,
        out_MO,
        size,
        out_MO.shape[1],
        out_MO.stride(0),
        HAS_BIAS=bias_O is not None,
        SPANS=len(part_SMO),
        BLOCK=BLOCK_SPANS,
        num_warps=2,
        **overlap_options(out_MO),
    )
