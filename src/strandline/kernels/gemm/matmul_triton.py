"""Matrix products whose every row's bits depend on that row alone: ``linear`` and ``head_linear``, deterministic.

A library picks another kernel, and with it another order of the sum, for another number of rows. Here each output is
one chain of additions over the inputs in order, 16 at a time, in the tensor core's float32 accumulator (float32 inputs:
one at a time). Tiles differ in how many rows and columns they have, never in that order, so that the tile may still be
chosen by the number of rows: ``tests/gpu/engine/test_deterministic.py`` holds that all tiles give the same bits. None
has fewer than 64 rows: below, the compiler uses another instruction, whose order of additions is not documented.

Shape suffixes: as in ``linear.py``; T rows; in kernels M rows of x, N outputs, K the dimension that a matrix product
sums over, H products of the same sizes.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.rowwise.quantized_rows import flat_rows, new_output, shaped
from strandline.kernels.sizes import NUM_SMS, cdiv
from strandline.kernels.tile_triton import place_tile, store_tile


class Tile(NamedTuple):
    """How a matrix product is tiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = 64
MIDDLE_ROWS = 512
"""Up to this many rows reading the weight takes nearly all the time: narrow tiles keep every multiprocessor reading."""

TILE_NARROW = Tile(64, 32, 64, 4, 6)
TILE_FEW = Tile(64, 64, 64, 4, 5)
TILE_MIDDLE = Tile(128, 64, 64, 4, 4)
TILE_MANY = Tile(128, 256, 64, 8, 3)
TILE_FLOAT32 = Tile(64, 64, 16, 4, 2)
"""GEMMs in plain float32 do not use tensor cores: for tests and small models."""

NARROW_OUTPUTS = 64 * NUM_SMS
"""Below this many outputs, tiles of 64 columns would leave multiprocessors idle."""


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x_head,
    stride_x,
    stride_weight_head,
    stride_weight,
    stride_weight_input,
    stride_out,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_M, col_N = place_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    x_ptr += head * stride_x_head
    weight_ptr += head * stride_weight_head
    out_ptr += head * N
    offset_K = tl.arange(0, BLOCK_K)
    is_row_M = row_M < M
    is_col_N = col_N < N
    x_MK_ptr = x_ptr + row_M[:, None].to(tl.int64) * stride_x + offset_K[None, :]
    weight_KN_ptr = weight_ptr + offset_K[:, None] * stride_weight_input + col_N[None, :].to(tl.int64) * stride_weight
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if IS_EVEN:
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start * stride_weight_input)
        else:
            is_K = start + offset_K < K
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
            is_KN = is_K[:, None] & is_col_N[None, :]
            weight_KN = tl.load(weight_KN_ptr + start * stride_weight_input, mask=is_KN, other=0.0)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + col_N, mask=is_col_N, other=0.0).to(tl.float32)[None, :]
    store_tile(out_ptr, acc_MN, row_M, col_N, M, N, stride_out, False, False)


def linear_invariant(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``. Rows of x and of the weight may lie apart, their elements lie together."""
    rows = flat_rows(x)
    out_TO = new_output(rows, len(weight_OI))
    multiply_into(out_TO, rows, weight_OI, bias_O)
    return shaped(out_TO, x)


def multiply_into(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a matrix product."""
    launch(out_TO, x_TI, weight_OI, bias_O, choose_tile(len(x_TI), len(weight_OI), x_TI.dtype))


def head_linear_invariant(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """As :func:`strandline.kernels.gemm.linear.head_linear`. Rows, heads and the weight's elements may lie apart."""
    (num_rows, num_heads, _), num_outputs = x_THI.shape, weight_HOI.shape[1]
    out_THO = torch.empty((num_rows, num_heads, num_outputs), dtype=x_THI.dtype, device=x_THI.device)
    _launch(out_THO, x_THI.transpose(0, 1), weight_HOI, None, choose_tile(num_rows, num_outputs, x_THI.dtype))
    return out_THO


def choose_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return TILE_FLOAT32
    if num_rows <= FEW_ROWS:
        return TILE_NARROW if num_outputs < NARROW_OUTPUTS else TILE_FEW
    return TILE_MIDDLE if num_rows <= MIDDLE_ROWS else TILE_MANY


def launch(out_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tile: Tile) -> None:
    """Multiply with this tile."""
    _launch(out_MN.unsqueeze(1), x_MK.unsqueeze(0), weight_NK.unsqueeze(0), bias_N, tile)


def _launch(out_MHN: Tensor, x_HMK: Tensor, weight_HNK: Tensor, bias_N: Tensor | None, tile: Tile) -> None:
    """Fill ``out_MHN``, whose rows may lie apart; the channels of x lie together."""
    (num_heads, num_rows, num_inputs), num_outputs = x_HMK.shape, weight_HNK.shape[1]
    if num_rows == 0:
        return
    grid = (cdiv(num_rows, tile.block_m) * cdiv(num_outputs, tile.block_n), num_heads)
    _linear_kernel[grid](
        x_HMK,
        weight_HNK,
        weight_HNK if bias_N is None else bias_N,
        out_MHN,
        num_rows,
        num_outputs,
        num_inputs,
        x_HMK.stride(0),
        x_HMK.stride(1),
        *weight_HNK.stride(),
        out_MHN.stride(0),
        HAS_BIAS=bias_N is not None,
        IS_EVEN=num_inputs % tile.block_k == 0 and num_outputs % tile.block_n == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
