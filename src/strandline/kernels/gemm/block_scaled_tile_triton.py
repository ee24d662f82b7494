"""What kernels in FP8 have in common: rows quantised by groups of inputs, and products of tiles and of pieces.

Rows are quantised in a matrix-vector product's registers (``quantize_pieces``), in a separate launch, or by the norm or
activation before (``quantize_groups``). Both functions do the same exact operations, whatever the tile: results are the
same to the last bit.

Matrix-vector products read a weight in pieces of 16 inputs, one per load of a thread. A piece belongs to one group, so
that a thread multiplies the sum of a piece by the group's scales, and not every product.

Shape suffixes: as in ``block_scaled.py``; in kernels M rows of x, N outputs, K inputs, R groups, G inputs of a group,
J pieces of a group, P inputs of a piece.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

MIN_ROWS_HOPPER = 64
"""Fewest rows of a tile of x for Hopper's tensor cores. In smaller tiles, outputs take the place of rows."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
def multiply_tile(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    read_M,
    row_N,
    first_group,
    end_group,
    N,
    K,
    stride_xs,
    stride_sy,
    stride_sx,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the products of rows of x over some groups with rows of the weight, and with others, swapped or not.

    Args:
        read_M: rows of x; none is behind the last one.
        row_N: rows of the weight; with a gate, the others are ``N + row_N``.
    """
    offset_K = tl.arange(0, GROUP)
    is_row_N = row_N < N
    last_group = tl.cdiv(K, GROUP) - 1
    x_KM_ptr = x_ptr + read_M[None, :].to(tl.int64) * K + offset_K[:, None]
    weight_NK_ptr = weight_ptr + row_N[:, None].to(tl.int64) * K + offset_K[None, :]
    up_NK_ptr = weight_NK_ptr + N * K
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    first_ptr = scale_ptr + first_group * stride_sx
    x_scale_M = tl.load(x_scale_ptr + first_group * stride_xs + read_M)
    scale_N = load_scales(first_ptr, row_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
    if IS_GATED:
        up_scale_N = load_scales(first_ptr, N + row_N, 2 * N, stride_sy, SCALE_ROWS, BLOCK_N)
    for group in range(first_group, end_group):
        # The next group's scales are on their way while this one's numbers are multiplied.
        following = tl.minimum(group + 1, last_group)
        next_ptr = scale_ptr + following * stride_sx
        next_x_scale_M = tl.load(x_scale_ptr + following * stride_xs + read_M)
        next_scale_N = load_scales(next_ptr, row_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
        if IS_GATED:
            next_up_scale_N = load_scales(next_ptr, N + row_N, 2 * N, stride_sy, SCALE_ROWS, BLOCK_N)
        start = group * GROUP
        if IS_EVEN:
            weight_NK = tl.load(weight_NK_ptr + start)
            x_KM = tl.load(x_KM_ptr + start)
            if IS_GATED:
                up_NK = tl.load(up_NK_ptr + start)
        else:
            is_K = start + offset_K < K
            mask_NK = is_row_N[:, None] & is_K[None, :]
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
    return acc, acc_up
