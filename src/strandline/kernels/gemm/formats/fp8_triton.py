"""Weights in FP8 in kernels, with scales of groups of inputs; rows of x are in FP8, too.

Shape suffixes: as in ``dense_triton.py``; in kernels K the inputs of a group.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from strandline.kernels.gemm.weights import ScaledWeight

MIN_ROWS_HOPPER = tl.constexpr(64)
"""Fewest rows of a tile of x for Hopper's tensor cores. In smaller tiles, outputs take the place of rows."""


class Fp8Layout(NamedTuple):
    """What is compiled in of a weight in FP8."""

    scale_rows: int
    """Rows that share a scale."""


def data(weight: ScaledWeight, extra: ScaledWeight | None = None) -> tuple:
    """Return numbers, which are contiguous, and scales, with their strides of matrices, rows and groups.

    Args:
        extra: one more matrix, whose number comes after the others'; it is as each of them.
    """
    scales = weight.scales
    strides = (scales.stride(0) if scales.dim() == 3 else 0, *scales.stride()[-2:])
    more = (None, None, 0) if extra is None else (extra.values, extra.scales, len(weight.values))
    return weight.values, scales, *strides, *more


def can_extend(weight: ScaledWeight, extra: object) -> bool:
    """Return whether a matrix is as each of several, so that it can be one more of them."""
    return (
        isinstance(extra, ScaledWeight)
        and extra.values.shape == weight.values.shape[1:]
        and extra.rows_per_scale == weight.rows_per_scale
        and extra.scales.stride() == weight.scales.stride()[1:]
    )


def layout(weight: ScaledWeight) -> Fp8Layout:
    return Fp8Layout(weight.rows_per_scale)


@triton.jit
def load_scales(scale_ptr, row_N, N, stride_y, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the factors of a tile's rows, for one group of inputs: one load where all rows share one."""
    if SCALE_ROWS % BLOCK_N == 0:
        first = tl.min(row_N, axis=0)
        scale = tl.load(scale_ptr + tl.minimum(first, N - 1) // SCALE_ROWS * stride_y)
        scale_N = tl.broadcast_to(scale, [BLOCK_N])
    else:
        scale_N = tl.load(scale_ptr + row_N // SCALE_ROWS * stride_y, mask=row_N < N, other=0.0)
    return scale_N


@triton.jit
def multiply_group(weight_NK, x_KM, scale_N, x_scale_M, IS_SWAPPED: tl.constexpr):
    """Return the product of one group of inputs times its scales: ``[M, N]``, swapped ``[N, M]``."""
    if IS_SWAPPED:
        product = tl.dot(weight_NK, x_KM, out_dtype=tl.float32) * (scale_N[:, None] * x_scale_M[None, :])
    else:
        product = tl.dot(tl.trans(x_KM), tl.trans(weight_NK), out_dtype=tl.float32)
        product = product * (x_scale_M[:, None] * scale_N[None, :])
    return product


@triton.jit
def tile(
    x,
    weight,
    matrix,
    read_M,
    is_row_M,
    col_N,
    first,
    end,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says; x is in FP8 and contiguous, and ``BLOCK_K`` is a group."""
    x_ptr, x_scale_ptr, _, stride_xs = x
    weight_ptr, scale_ptr, stride_se, stride_sy, stride_sx, extra_ptr, extra_scale_ptr, num_matrices = weight
    IS_SWAPPED: tl.constexpr = BLOCK_M < MIN_ROWS_HOPPER
    SCALE_ROWS: tl.constexpr = LAYOUT.scale_rows
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    weight_ptr += matrix * (NUM_PARTS * N * K)
    scale_ptr += matrix * stride_se
    if extra_ptr is not None:
        weight_ptr = tl.where(matrix == num_matrices, extra_ptr, weight_ptr)
        scale_ptr = tl.where(matrix == num_matrices, extra_scale_ptr, scale_ptr)
    offset_K = tl.arange(0, BLOCK_K)
    is_col_N = col_N < N
    last_group = tl.cdiv(K, BLOCK_K) - 1
    x_KM_ptr = x_ptr + read_M[None, :].to(tl.int64) * K + offset_K[:, None]
    weight_NK_ptr = weight_ptr + col_N[:, None].to(tl.int64) * K + offset_K[None, :]
    up_NK_ptr = weight_NK_ptr + N * K
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    first_ptr = scale_ptr + first * stride_sx
    x_scale_M = tl.load(x_scale_ptr + first * stride_xs + read_M)
    scale_N = load_scales(first_ptr, col_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
    if IS_GATED:
        up_scale_N = load_scales(first_ptr, N + col_N, 2 * N, stride_sy, SCALE_ROWS, BLOCK_N)
    for group in range(first, end):
        # The next group's scales are on their way while this one's numbers are multiplied.
        following = tl.minimum(group + 1, last_group)
        next_ptr = scale_ptr + following * stride_sx
        next_x_scale_M = tl.load(x_scale_ptr + following * stride_xs + read_M)
        next_scale_N = load_scales(next_ptr, col_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
        if IS_GATED:
            next_up_scale_N = load_scales(next_ptr, N + col_N, 2 * N, stride_sy, SCALE_ROWS, BLOCK_N)
        start = group * BLOCK_K
        if IS_EVEN:
            weight_NK = tl.load(weight_NK_ptr + start)
            x_KM = tl.load(x_KM_ptr + start)
            if IS_GATED:
                up_NK = tl.load(up_NK_ptr + start)
        else:
            is_K = start + offset_K < K
            mask_NK = is_col_N[:, None] & is_K[None, :]
            weight_NK = tl.load(weight_NK_ptr + start, mask=mask_NK, other=0.0)
            x_KM = tl.load(x_KM_ptr + start, mask=is_K[:, None], other=0.0)
            if IS_GATED:
                up_NK = tl.load(up_NK_ptr + start, mask=mask_NK, other=0.0)
        acc += multiply_group(weight_NK, x_KM, scale_N, x_scale_M, IS_SWAPPED)
        if IS_GATED:
            acc_up += multiply_group(up_NK, x_KM, up_scale_N, x_scale_M, IS_SWAPPED)
            up_scale_N = next_up_scale_N
        x_scale_M = next_x_scale_M
        scale_N = next_scale_N
    if IS_SWAPPED:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    return acc, acc_up
