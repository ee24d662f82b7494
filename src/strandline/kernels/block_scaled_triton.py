"""Matrix products in FP8 in Triton (``block_scaled.py``): few rows streamed through registers, more on tensor cores.

Up to ``MAX_ROWS_GEMV`` rows: every program quantises them and multiplies a few of the weight's rows, in float32. More:
one launch quantises them, then tiles of rows and outputs are multiplied, of many rows by torch where it can. With few
rows narrow weights are split among programs along the inputs, too, and the parts are added up in order.

Invariant: ``_invariant`` versions add up in an order that depends on neither the number of rows nor the tile.

Shape suffixes: as in ``block_scaled.py``; S spans of the inputs; in kernels M rows of x, N outputs, K the inputs of a
group or a chunk.
"""
# mypy: ignore-errors

from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.activation_triton import swiglu
from strandline.kernels.block_scaled_tile_triton import (
    MIN_ROWS_HOPPER,
    load_scales,
    multiply_group,
    quantize_rows,
    round_groups,
)
from strandline.kernels.linear_triton import add_spans, silu_times
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2
from strandline.kernels.weights import GROUP, ScaledWeight

MAX_ROWS_GEMV = 4


class Gemv(NamedTuple):
    """How a product of one to four rows is tiled."""

    block_n: int
    block_k: int
    warps: int


class Tile(NamedTuple):
    """How a product of more rows is tiled."""

    block_n: int
    block_m: int
    warps: int
    stages: int


GEMV_WIDE = Gemv(8, 1024, 4)
GEMV_NARROW = Gemv(4, 2048, 4)
GEMV_MORE = Gemv(4, 512, 4)
"""For one row and many or few outputs, and for two to four rows (benchmarks/kernels/block_scaled.py; the last is not
tuned)."""

WIDE_OUTPUTS = 8192
"""From here on a program of one row has eight outputs."""

TILES = {
    16: Tile(64, 16, 4, 6),
    32: Tile(64, 32, 4, 5),
    64: Tile(64, 64, 4, 4),
}
"""By the largest number of rows."""

TILE_MANY = Tile(64, 128, 4, 4)

MAX_ROWS_TILES = 128
"""With more rows, torch's product takes two thirds of the time."""

TORCH_INPUTS = 4 * GROUP
"""What inputs are a multiple of, so that torch takes scales as they lie."""

TORCH_CUDA = (12, 9)
"""The first CUDA version whose library multiplies with scales of blocks."""

MAX_ROWS_SPLIT = 64
"""Up to this many rows a weight with few outputs is split along the inputs."""

PROGRAMS_SPLIT = 2 * NUM_SMS
"""What a split aims at: two programs per multiprocessor."""

MAX_SPANS = 8

GROUP_ROWS = 8
"""Row tiles that share the weight's tiles while they are in the second-level cache."""


@triton.jit
def _load_weight(weight_ptr, row_N, col_K, K, N, IS_EVEN: tl.constexpr):
    """Load ``[1, N, K]``, bytes that are read once and need not stay in the cache."""
    ptr_1NK = weight_ptr + (row_N * K)[None, :, None] + col_K[None, None, :]
    if IS_EVEN:
        return tl.load(ptr_1NK, eviction_policy="evict_first")
    mask_1NK = (row_N < N)[None, :, None] & (col_K < K)[None, None, :]
    return tl.load(ptr_1NK, mask=mask_1NK, other=0.0, eviction_policy="evict_first")


@triton.jit
def _times_scales(x_MK, scale_ptr, first_row, col_K, K, stride_y, stride_x, SCALE_ROWS, GROUP: tl.constexpr):
    """Multiply inputs by the factors that a weight's row has for them."""
    scale_K_ptr = scale_ptr + first_row // SCALE_ROWS * stride_y + col_K // GROUP * stride_x
    return x_MK * tl.load(scale_K_ptr, mask=col_K < K, other=0.0)[None, :]


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    K,
    N,
    stride_x,
    stride_out,
    stride_sy,
    stride_sx,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first_N = tl.program_id(0).to(tl.int64) * BLOCK_N
    row_N = first_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    row_M = tl.arange(0, BLOCK_M)
    up_ptr = weight_ptr + tl.cast(N, tl.int64) * K
    weight_1NK = _load_weight(weight_ptr, row_N, col_K, K, N, IS_EVEN)
    if IS_GATED:
        up_1NK = _load_weight(up_ptr, row_N, col_K, K, N, IS_EVEN)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_MK_ptr = x_ptr + row_M.to(tl.int64)[:, None] * stride_x + col_K[None, :]
    acc_MNK = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc_up_MNK = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], dtype=tl.float32)
    for chunk in tl.static_range(NUM_K):
        start = chunk * BLOCK_K
        if chunk > 0:
            weight_1NK = _load_weight(weight_ptr, row_N, start + col_K, K, N, IS_EVEN)
            if IS_GATED:
                up_1NK = _load_weight(up_ptr, row_N, start + col_K, K, N, IS_EVEN)
        mask_MK = (row_M < M)[:, None] & (start + col_K < K)[None, :]
        x_MK = tl.load(x_MK_ptr + start, mask=mask_MK, other=0.0).to(tl.float32)
        x_MK = round_groups(x_MK, BLOCK_M, BLOCK_K, GROUP)
        scales = (K, stride_sy, stride_sx, SCALE_ROWS, GROUP)
        scaled_MK = _times_scales(x_MK, scale_ptr, first_N, start + col_K, *scales)
        acc_MNK += weight_1NK.to(tl.float32) * scaled_MK[:, None, :]
        if IS_GATED:
            scaled_MK = _times_scales(x_MK, scale_ptr, N + first_N, start + col_K, *scales)
            acc_up_MNK += up_1NK.to(tl.float32) * scaled_MK[:, None, :]
    out_MN = tl.sum(acc_MNK, axis=2)
    if HAS_BIAS:
        out_MN += tl.load(bias_ptr + row_N, mask=row_N < N, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        out_MN = silu_times(out_MN, tl.sum(acc_up_MNK, axis=2), out_ptr.dtype.element_ty)
    out_MN_ptr = out_ptr + row_M[:, None] * stride_out + row_N[None, :]
    tl.store(out_MN_ptr, out_MN.to(out_ptr.dtype.element_ty), mask=(row_M < M)[:, None] & (row_N < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xs,
    stride_out,
    stride_sy,
    stride_sx,
    span,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    row_M = (first_m + program % (GROUP_M * num_n) % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_N = program % (GROUP_M * num_n) // group_m * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, GROUP)
    is_row_M = row_M < M
    is_row_N = row_N < N
    # Rows behind the last one read that: what becomes of them is not stored.
    read_M = tl.minimum(row_M, M - 1)
    x_KM_ptr = x_ptr + read_M.to(tl.int64)[None, :] * K + col_K[:, None]
    weight_NK_ptr = weight_ptr + row_N.to(tl.int64)[:, None] * K + col_K[None, :]
    num_groups = tl.cdiv(K, GROUP)
    first = tl.program_id(1) * span
    end = tl.minimum(first + span, num_groups)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    x_scale_M = tl.load(x_scale_ptr + first * stride_xs + read_M)
    scale_N = load_scales(scale_ptr + first * stride_sx, row_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
    for group in range(first, end):
        # The next group's scales are on their way while this one's numbers are multiplied.
        following = tl.minimum(group + 1, num_groups - 1)
        next_x_scale_M = tl.load(x_scale_ptr + following * stride_xs + read_M)
        next_scale_N = load_scales(scale_ptr + following * stride_sx, row_N, N, stride_sy, SCALE_ROWS, BLOCK_N)
        start = group * GROUP
        if IS_EVEN:
            weight_NK = tl.load(weight_NK_ptr + start)
            x_KM = tl.load(x_KM_ptr + start)
        else:
            is_K = start + col_K < K
            weight_NK = tl.load(weight_NK_ptr + start, mask=is_row_N[:, None] & is_K[None, :], other=0.0)
            x_KM = tl.load(x_KM_ptr + start, mask=is_K[:, None], other=0.0)
        acc += multiply_group(weight_NK, x_KM, scale_N, x_scale_M, IS_SWAPPED)
        x_scale_M = next_x_scale_M
        scale_N = next_scale_N
    acc_MN = tl.trans(acc) if IS_SWAPPED else acc
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + row_N, mask=is_row_N, other=0.0).to(tl.float32)[None, :]
    out_row_M = row_M.to(tl.int64)
    if IS_SPLIT:
        out_row_M += tl.program_id(1) * M
    out_MN_ptr = out_ptr + out_row_M[:, None] * stride_out + row_N[None, :]
    tl.store(out_MN_ptr, acc_MN.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_row_N[None, :])


def block_scaled_linear(x: Tensor, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """Triton version of :func:`strandline.kernels.block_scaled.block_scaled_linear`."""
    x_TI = _rows(x)
    if 0 < len(x_TI) <= MAX_ROWS_GEMV:
        gemv = choose_gemv(len(x_TI), len(weight.values))
        out_TO = launch_gemv(x_TI, weight, bias_O, gemv, is_gated=False)
    elif len(x_TI) > MAX_ROWS_TILES and can_multiply_in_torch(x_TI, weight):
        out_TO = multiply_in_torch(x_TI, weight, bias_O)
    else:
        tile = choose_tile(len(x_TI))
        out_TO = _multiply(x_TI, weight, bias_O, tile, choose_spans(len(x_TI), weight, tile))
    return out_TO.view(*x.shape[:-1], out_TO.shape[1])


def block_scaled_linear_invariant(x: Tensor, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`block_scaled_linear`, with the same order of sums for any number of rows."""
    x_TI = _rows(x)
    out_TO = _multiply(x_TI, weight, bias_O, choose_tile(max(len(x_TI), MIN_ROWS_HOPPER)), 1)
    return out_TO.view(*x.shape[:-1], out_TO.shape[1])


def block_scaled_gated_linear(x: Tensor, gate_up: ScaledWeight) -> Tensor:
    """Triton version of :func:`strandline.kernels.block_scaled.block_scaled_gated_linear`."""
    x_TI = _rows(x)
    if not 0 < len(x_TI) <= MAX_ROWS_GEMV:
        return swiglu(block_scaled_linear(x, gate_up))
    gemv = choose_gemv(len(x_TI), len(gate_up.values) // 2)
    out_TO = launch_gemv(x_TI, gate_up, None, gemv, is_gated=True)
    return out_TO.view(*x.shape[:-1], out_TO.shape[1])


def block_scaled_gated_linear_invariant(x: Tensor, gate_up: ScaledWeight) -> Tensor:
    """As :func:`block_scaled_gated_linear`, with the same order of sums for any number of rows."""
    return swiglu(block_scaled_linear_invariant(x, gate_up))


def _rows(x: Tensor) -> Tensor:
    """Return a matrix whose inputs lie together."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def can_multiply_in_torch(x_TI: Tensor, weight: ScaledWeight) -> bool:
    """Return whether torch multiplies rows with this weight: on Hopper GPUs, with a scale for each whole block."""
    num_outputs, num_inputs = weight.values.shape
    return (
        x_TI.dtype == torch.bfloat16
        and weight.rows_per_scale == GROUP
        and num_outputs % GROUP == num_inputs % TORCH_INPUTS == 0
        and weight.scales.is_contiguous()
        and x_TI.is_cuda
        and _has_block_scales_in_torch(x_TI.get_device())
    )


@cache
def _has_block_scales_in_torch(device: int) -> bool:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == 9 and version >= TORCH_CUDA


def multiply_in_torch(x_TI: Tensor, weight: ScaledWeight, bias_O: Tensor | None) -> Tensor:
    """Return torch's product of quantised rows."""
    quantized_TI, scale_XT = quantize_rows(x_TI)
    scales = {"scale_a": scale_XT.t(), "scale_b": weight.scales.t()}
    out_TO = torch._scaled_mm(quantized_TI, weight.values.t(), **scales, out_dtype=x_TI.dtype)[: len(x_TI)]
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def choose_gemv(num_rows: int, num_outputs: int) -> Gemv:
    if num_rows > 1:
        return GEMV_MORE
    return GEMV_WIDE if num_outputs >= WIDE_OUTPUTS else GEMV_NARROW


def choose_tile(num_rows: int) -> Tile:
    return next((tile for rows, tile in TILES.items() if num_rows <= rows), TILE_MANY)


def choose_spans(num_rows: int, weight: ScaledWeight, tile: Tile) -> int:
    """Return among how many programs the inputs of a tile are dealt out."""
    if not 0 < num_rows <= MAX_ROWS_SPLIT:
        return 1
    num_outputs, num_inputs = weight.values.shape
    num_tiles = cdiv(num_outputs, tile.block_n) * cdiv(num_rows, tile.block_m)
    return max(1, min(MAX_SPANS, PROGRAMS_SPLIT // num_tiles, cdiv(num_inputs, GROUP)))


def _multiply(x_TI: Tensor, weight: ScaledWeight, bias_O: Tensor | None, tile: Tile, spans: int) -> Tensor:
    if not len(x_TI):
        return x_TI.new_empty((0, len(weight.values)))
    return launch_gemm(*quantize_rows(x_TI), weight, bias_O, tile, spans, (len(x_TI), x_TI.dtype))


def launch_gemv(x_MI: Tensor, weight: ScaledWeight, bias_O: Tensor | None, gemv: Gemv, *, is_gated: bool) -> Tensor:
    """Return the product of up to four rows; gated, of ``silu(gate x) * up x``."""
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight.values)
    if is_gated:
        num_outputs //= 2
    block_n = gcd(gemv.block_n, weight.rows_per_scale)
    block_k = min(gemv.block_k, max(GROUP, next_power_of_2(num_inputs)))
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    _gemv_kernel[(cdiv(num_outputs, block_n),)](
        x_MI,
        weight.values,
        weight.scales,
        bias_O,
        out_MO,
        num_rows,
        num_inputs,
        num_outputs,
        x_MI.stride(0),
        num_outputs,
        *weight.scales.stride(),
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        IS_EVEN=num_inputs % block_k == 0 and num_outputs % block_n == 0,
        SCALE_ROWS=weight.rows_per_scale,
        NUM_K=cdiv(num_inputs, block_k),
        BLOCK_M=next_power_of_2(num_rows),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        num_warps=gemv.warps,
        **overlap_options(x_MI),
    )
    return out_MO


def launch_gemm(
    x_TI: Tensor,
    scale_XT: Tensor,
    weight: ScaledWeight,
    bias_O: Tensor | None,
    tile: Tile,
    spans: int,
    out: tuple[int, torch.dtype],
) -> Tensor:
    """Return the product of quantised rows.

    Args:
        out: how many of the rows are multiplied, and the dtype of the result.
    """
    (num_outputs, num_inputs), (num_rows, dtype) = weight.values.shape, out
    num_groups = cdiv(num_inputs, GROUP)
    span = cdiv(num_groups, spans)
    spans = cdiv(num_groups, span)
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    part_STO = out_TO
    if spans > 1:
        part_STO = torch.empty((spans, num_rows, num_outputs), dtype=torch.float32, device=x_TI.device)
    _gemm_kernel[(cdiv(num_rows, tile.block_m) * cdiv(num_outputs, tile.block_n), spans)](
        x_TI,
        scale_XT,
        weight.values,
        weight.scales,
        bias_O,
        part_STO,
        num_rows,
        num_outputs,
        num_inputs,
        scale_XT.stride(0),
        num_outputs,
        *weight.scales.stride(),
        span,
        HAS_BIAS=bias_O is not None and spans == 1,
        IS_EVEN=num_inputs % GROUP == 0 and num_outputs % tile.block_n == 0,
        IS_SPLIT=spans > 1,
        IS_SWAPPED=tile.block_m < MIN_ROWS_HOPPER,
        SCALE_ROWS=weight.rows_per_scale,
        GROUP_M=GROUP_ROWS,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(x_TI),
    )
    if spans > 1:
        add_spans(part_STO, bias_O, out_TO)
    return out_TO
