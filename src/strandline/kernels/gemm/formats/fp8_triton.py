"""Weights in FP8 in kernels, with scales of groups of inputs; rows of x are in FP8, too.

Few rows of x may also come as they are: they are quantised in registers (``quantize_pieces``), by the same exact
operations as ``quantizing_triton.quantize_groups``, so that results are the same to the last bit.

Few rows read a weight in pieces of 16 inputs, one per load of a thread. A piece belongs to one group, so that a thread
multiplies the sum of a piece by the group's scales, and not every product.

Shape suffixes: as in ``dense_triton.py``; in tiles K the inputs of a group; R groups, J pieces of a group, P inputs of
a piece.
"""
# mypy: ignore-errors

from math import gcd
from typing import NamedTuple

import triton
import triton.language as tl

from strandline.kernels.gemm.formats.operand_triton import DeviceFunctions, RowFunctions
from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.rowwise import quantized_rows
from strandline.kernels.rowwise.quantizing_triton import MAX_E4M3, MIN_SCALE

GROUP = tl.constexpr(quantized_rows.GROUP)

PIECE = tl.constexpr(16)
"""Inputs that a thread reads at once for few rows of x: 16 bytes of a weight, all of one group."""

MIN_ROWS_HOPPER = tl.constexpr(64)
"""Fewest rows of a tile of x for Hopper's tensor cores. In smaller tiles, outputs take the place of rows."""


class Fp8Layout(NamedTuple):
    """What is compiled in of a weight in FP8."""

    scale_rows: int
    """Rows that share a scale."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number: they share a scale."""
        return gcd(block_n, self.scale_rows)


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
def load_scales(scale_ptr, row_N, stride_y, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the factors of a tile's rows, for one group of inputs: one load where all rows share one."""
    if SCALE_ROWS % BLOCK_N == 0:
        scale = tl.load(scale_ptr + tl.min(row_N, axis=0) // SCALE_ROWS * stride_y)
        scale_N = tl.broadcast_to(scale, [BLOCK_N])
    else:
        scale_N = tl.load(scale_ptr + row_N // SCALE_ROWS * stride_y)
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
    # Outputs after the last read its row again: masks that differ among rows take registers.
    read_N = tl.minimum(col_N, N - 1)
    last_group = tl.cdiv(K, BLOCK_K) - 1
    x_KM_ptr = x_ptr + read_M[None, :].to(tl.int64) * K + offset_K[:, None]
    weight_NK_ptr = weight_ptr + read_N[:, None].to(tl.int64) * K + offset_K[None, :]
    up_NK_ptr = weight_NK_ptr + N * K
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    first_ptr = scale_ptr + first * stride_sx
    x_scale_M = tl.load(x_scale_ptr + first * stride_xs + read_M)
    scale_N = load_scales(first_ptr, read_N, stride_sy, SCALE_ROWS, BLOCK_N)
    if IS_GATED:
        up_scale_N = load_scales(first_ptr, N + read_N, stride_sy, SCALE_ROWS, BLOCK_N)
    for group in range(first, end):
        # The next group's scales are on their way while this one's numbers are multiplied.
        following = tl.minimum(group + 1, last_group)
        next_ptr = scale_ptr + following * stride_sx
        next_x_scale_M = tl.load(x_scale_ptr + following * stride_xs + read_M)
        next_scale_N = load_scales(next_ptr, read_N, stride_sy, SCALE_ROWS, BLOCK_N)
        if IS_GATED:
            next_up_scale_N = load_scales(next_ptr, N + read_N, stride_sy, SCALE_ROWS, BLOCK_N)
        start = group * BLOCK_K
        if IS_EVEN:
            weight_NK = tl.load(weight_NK_ptr + start)
            x_KM = tl.load(x_KM_ptr + start)
            if IS_GATED:
                up_NK = tl.load(up_NK_ptr + start)
        else:
            is_K = start + offset_K < K
            weight_NK = tl.load(weight_NK_ptr + start, mask=is_K[None, :], other=0.0)
            x_KM = tl.load(x_KM_ptr + start, mask=is_K[:, None], other=0.0)
            if IS_GATED:
                up_NK = tl.load(up_NK_ptr + start, mask=is_K[None, :], other=0.0)
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


@triton.jit
def _piece_columns(start, BLOCK_K: tl.constexpr):
    """Return the first input of each piece of a chunk, ``[J, R]``, and all inputs, ``[J, R, P]``.

    Triton deals out threads along the first dimension first: a warp reads four groups of a weight's row.
    """
    piece_J1 = (tl.arange(0, GROUP // PIECE) * PIECE)[:, None]
    col_JR = piece_J1 + (start + tl.arange(0, BLOCK_K // GROUP) * GROUP)[None, :]
    return col_JR, col_JR[:, :, None] + tl.arange(0, PIECE)[None, None, :]


@triton.jit
def _row_scales(scale_C_ptr, first_row, col_JR, K, stride_sy, stride_sx, SCALE_ROWS: tl.constexpr):
    """Load the scales of pieces, ``[J, R, C]``; a program's rows share one."""
    first_C_ptr = scale_C_ptr + first_row // SCALE_ROWS * stride_sy
    scale_JRC_ptr = first_C_ptr[None, None, :] + (col_JR // GROUP * stride_sx)[:, :, None]
    return tl.load(scale_JRC_ptr, mask=(col_JR < K)[:, :, None], other=0.0)


@triton.jit
def load_rows(
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load as ``operand_triton.py`` says: numbers ``[J, R, C, N, P]`` and scales ``[J, R, C]``."""
    weight_ptr, scale_ptr, stride_se, stride_sy, stride_sx, extra_ptr, extra_scale_ptr, num_matrices = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    SCALE_ROWS: tl.constexpr = LAYOUT.scale_rows
    row_N = first_N + tl.arange(0, BLOCK_N)
    col_JR, col_JRP = _piece_columns(start, BLOCK_K)
    first_C_ptr = weight_ptr + matrix_C.to(tl.int64) * (NUM_PARTS * N * K)
    scale_C_ptr = scale_ptr + matrix_C.to(tl.int64) * stride_se
    if extra_ptr is not None:
        first_C_ptr = tl.where(matrix_C == num_matrices, extra_ptr, first_C_ptr)
        scale_C_ptr = tl.where(matrix_C == num_matrices, extra_scale_ptr, scale_C_ptr)
    first_CN_ptr = first_C_ptr[:, None] + (row_N * K)[None, :]
    ptr_JRCNP = first_CN_ptr[None, None, :, :, None] + col_JRP[:, :, None, None, :]
    up_JRCNP_ptr = ptr_JRCNP + tl.cast(N, tl.int64) * K
    if IS_EVEN:
        weight_JRCNP = tl.load(ptr_JRCNP, eviction_policy="evict_first")
    else:
        is_JRCNP = (row_N < N)[None, None, None, :, None] & (col_JRP < K)[:, :, None, None, :]
        weight_JRCNP = tl.load(ptr_JRCNP, mask=is_JRCNP, other=0.0, eviction_policy="evict_first")
    up_JRCNP = weight_JRCNP
    if IS_GATED:
        if IS_EVEN:
            up_JRCNP = tl.load(up_JRCNP_ptr, eviction_policy="evict_first")
        else:
            up_JRCNP = tl.load(up_JRCNP_ptr, mask=is_JRCNP, other=0.0, eviction_policy="evict_first")
    strides = (stride_sy, stride_sx)
    scale_JRC = _row_scales(scale_C_ptr, first_N, col_JR, K, *strides, SCALE_ROWS)
    up_scale_JRC = scale_JRC
    if IS_GATED:
        up_scale_JRC = _row_scales(scale_C_ptr, N + first_N, col_JR, K, *strides, SCALE_ROWS)
    return weight_JRCNP, scale_JRC, up_JRCNP, up_scale_JRC


@triton.jit
def multiply_rows(
    loaded,
    x,
    norm,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says: sums of pieces, ``[J, R, M, N]``."""
    tl.static_assert(NORM is None, "only dense weights normalise rows as they read them")
    weight_JRCNP, scale_JRC, up_JRCNP, up_scale_JRC = loaded
    x_JRMP, x_scale_JRM = _read_pieces(x, row_M, is_row_M, start, K, BLOCK_K)
    x_JRM1P = x_JRMP[:, :, :, None, :]
    products = tl.sum(weight_JRCNP.to(tl.float32) * x_JRM1P, axis=4) * (x_scale_JRM * scale_JRC)[:, :, :, None]
    up_products = products
    if IS_GATED:
        up_scale_JRM1 = (x_scale_JRM * up_scale_JRC)[:, :, :, None]
        up_products = tl.sum(up_JRCNP.to(tl.float32) * x_JRM1P, axis=4) * up_scale_JRM1
    return products, up_products


@triton.jit
def add_rows(sums_JRMN):
    """Return the sums of pieces' sums, ``[M, N]``."""
    J: tl.constexpr = sums_JRMN.shape[0] * sums_JRMN.shape[1]
    return tl.sum(tl.reshape(sums_JRMN, [J, sums_JRMN.shape[2], sums_JRMN.shape[3]]), axis=0)


@triton.jit
def quantize_pieces(x_JRMP):
    """Return float32 numbers as quantised, in float32, and the scales of their groups, ``[J, R, M]``."""
    largest_RM = tl.max(tl.max(tl.abs(x_JRMP), axis=3), axis=0)
    scale_RM = tl.maximum(tl.div_rn(largest_RM, MAX_E4M3), MIN_SCALE)
    quantized_JRMP = (x_JRMP * tl.div_rn(1.0, scale_RM)[None, :, :, None]).to(tl.float8e4nv)
    return quantized_JRMP.to(tl.float32), tl.broadcast_to(scale_RM[None, :, :], x_JRMP.shape[:3])


@triton.jit
def _read_pieces(x, row_M, is_row_M, start, K, BLOCK_K: tl.constexpr):
    """Return numbers ``[J, R, M, P]`` as they are after quantising, in float32, and scales ``[J, R, M]``."""
    x_ptr, x_scale_ptr, stride_x, stride_xs = x
    col_JR, _ = _piece_columns(start, BLOCK_K)
    row_1M = row_M[None, None, :]
    is_row_1M = is_row_M[None, None, :]
    x_JRM_ptr = x_ptr + row_1M.to(tl.int64) * stride_x + col_JR[:, :, None]
    if x_scale_ptr is None:
        # A thread loads half a piece at once. It must get the other half, too: sums have the same order then.
        HALF: tl.constexpr = PIECE // 2
        low_JRMP = _read_row_parts(x_JRM_ptr, is_row_1M, col_JR, K, HALF)
        high_JRMP = _read_row_parts(x_JRM_ptr + HALF, is_row_1M, col_JR + HALF, K, HALF)
        x_JRMP = tl.permute(tl.join(low_JRMP, high_JRMP), (0, 1, 2, 4, 3))
        x_JRMP = tl.reshape(x_JRMP, [GROUP // PIECE, BLOCK_K // GROUP, row_M.shape[0], PIECE])
        x_JRMP, scale_JRM = quantize_pieces(x_JRMP)
    else:
        x_JRMP = _read_row_parts(x_JRM_ptr, is_row_1M, col_JR, K, PIECE)
        scale_JRM_ptr = x_scale_ptr + (col_JR // GROUP * stride_xs)[:, :, None] + row_1M
        scale_JRM = tl.load(scale_JRM_ptr, mask=is_row_1M & (col_JR < K)[:, :, None], other=0.0)
    return x_JRMP, scale_JRM


@triton.jit
def _read_row_parts(x_JRM_ptr, is_row_1M, col_JR, K, SIZE: tl.constexpr):
    """Read the inputs of each row from these columns on, in float32."""
    offset_P = tl.arange(0, SIZE)
    is_KP = (col_JR[:, :, None] + offset_P[None, None, :] < K)[:, :, None, :]
    x_JRMP_ptr = x_JRM_ptr[:, :, :, None] + offset_P[None, None, None, :]
    return tl.load(x_JRMP_ptr, mask=is_row_1M[:, :, :, None] & is_KP, other=0.0).to(tl.float32)


FUNCTIONS = DeviceFunctions(
    tile,
    RowFunctions(load_rows, multiply_rows, add_rows),
    data,
    layout,
    min_block_k=GROUP.value,
    min_rows=MIN_ROWS_HOPPER.value,
    can_extend=can_extend,
)
