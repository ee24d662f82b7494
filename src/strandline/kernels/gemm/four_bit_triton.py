"""Matrix products with weights in 4 bits in Triton (``four_bit.py``): few rows through registers, more on tensor cores.

One row, and few with a small weight: as ``rows_triton.py`` says. Up to
64 rows, or 256 of a wide weight: tiles of outputs and rows, of weights that are unpacked in registers; with few rows
narrow weights are split among programs along the inputs, too, and the parts are added up in order. More rows: the
weight is dequantised, a part that fits the second-level cache at a time, and multiplied by torch. Dequantising moves
2.5 bytes for a weight; at 4.3 TB/s and 700 TFLOP/s that takes as long as its products with 200 rows. Tiles unpack the
weight once for every 64 rows instead.

A launch of few rows may multiply them with an ordinary weight, too: programs of its own do that.

Invariant: ``_invariant`` versions multiply in one way of tiling, whatever the number of rows.

Shape suffixes: T rows, I inputs, O outputs, S spans of the inputs; in kernels N rows and W numbers of a weight.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm import linear_triton
from strandline.kernels.gemm.formats.four_bit_triton import BLOCK_INPUTS, BLOCK_WORDS, load_zeros, unpack_plane
from strandline.kernels.gemm.four_bit_launches import (
    SCRATCH_CODES,
    choose_gemv,
    choose_spans,
    choose_tile,
    choose_tile_invariant,
    uses_gemv,
    uses_tiles,
)
from strandline.kernels.gemm.rows_triton import Second, launch_gemv
from strandline.kernels.gemm.tiles_triton import SecondTile, launch_tiles
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import flat_rows, new_output, shaped
from strandline.kernels.sizes import cdiv

DEQUANTIZED_ROWS = 32
"""Rows of a weight that a program dequantises one block of."""


@triton.jit
def _dequantize_kernel(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    num_words,
    stride_sn,
    stride_sx,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write one block of inputs of some rows."""
    row_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    word_W = tl.arange(0, BLOCK_WORDS)
    read_N = tl.minimum(row_N, N - 1)
    words_NW = tl.load(weight_ptr + (read_N * num_words)[:, None] + (block * BLOCK_WORDS + word_W)[None, :])
    PLANES: tl.constexpr = GROUP // BLOCK_WORDS
    # The product before may still read what was dequantised for it.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    for group in tl.static_range(BLOCK_INPUTS // GROUP):
        offset_N = read_N * stride_sn + (block * (BLOCK_INPUTS // GROUP) + group) * stride_sx
        scale_N = tl.load(scale_ptr + offset_N).to(tl.float32)
        zero_N = load_zeros(zero_ptr, offset_N)
        for plane in tl.static_range(group * PLANES, (group + 1) * PLANES):
            col_W = block * BLOCK_INPUTS + plane * BLOCK_WORDS + word_W
            value_NW = unpack_plane(words_NW, zero_N, plane, tl.float32) * scale_N[:, None]
            mask_NW = (row_N < N)[:, None] & (col_W < K)[None, :]
            tl.store(out_ptr + (row_N * K)[:, None] + col_W[None, :], value_NW.to(out_ptr.dtype.element_ty), mask_NW)


def four_bit_linear(x: Tensor, weight: FourBitWeight, bias_O: Tensor | None = None) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.four_bit.four_bit_linear`."""
    rows = flat_rows(x)
    out_TO = new_output(rows, weight.shape[0])
    multiply_into(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def four_bit_linear_invariant(x: Tensor, weight: FourBitWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`four_bit_linear`, with the same order of sums for any number of rows."""
    rows = flat_rows(x)
    out_TO = new_output(rows, weight.shape[0])
    multiply_into_invariant(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def four_bit_gated_linear(x: Tensor, gate_up: FourBitWeight) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    rows = flat_rows(x)
    if not uses_gemv(len(rows), _num_codes(gate_up)):
        return swiglu(four_bit_linear(x, gate_up))
    out_TO = new_output(rows, gate_up.shape[0] // 2)
    launch_gemv(out_TO, rows, gate_up, None, choose_gemv(len(rows), out_TO.shape[1]), is_gated=True)
    return shaped(out_TO, x)


def _num_codes(weight: FourBitWeight) -> int:
    return weight.shape[0] * weight.num_inputs


def multiply_into(out_TO: Tensor, x_TI: Tensor, weight: FourBitWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a product."""
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight.shape
    if not num_rows:
        return
    if uses_gemv(num_rows, _num_codes(weight)):
        launch_gemv(out_TO, x_TI, weight, bias_O, choose_gemv(num_rows, num_outputs))
    elif uses_tiles(num_rows, num_outputs):
        tile = choose_tile(num_rows, num_outputs, x_TI.dtype)
        spans = choose_spans(num_rows, num_outputs, cdiv(num_inputs, BLOCK_INPUTS.value), tile)
        launch_tiles(out_TO, x_TI, weight, bias_O, tile._replace(splits=spans))
    else:
        multiply_dequantized(out_TO, x_TI, weight, bias_O)


def multiply_into_invariant(out_TO: Tensor, x_TI: Tensor, weight: FourBitWeight, bias_O: Tensor | None) -> None:
    """As :func:`multiply_into`, with the same order of sums for any number of rows."""
    if len(x_TI):
        launch_tiles(out_TO, x_TI, weight, bias_O, choose_tile_invariant(x_TI.dtype))


def multiply_beside(out_TO: Tensor, x_TI: Tensor, weight: FourBitWeight, dense_OI: Tensor) -> None:
    """Fill ``out_TO`` with the products of a few rows with a weight and the ordinary one behind."""
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight.shape
    if uses_gemv(num_rows, _num_codes(weight)):
        second = Second(DenseWeight(dense_OI), out_TO[:, num_outputs:])
        launch_gemv(out_TO, x_TI, weight, None, choose_gemv(num_rows, num_outputs), second=second)
        return
    tile = choose_tile(num_rows, num_outputs, x_TI.dtype)
    spans = choose_spans(num_rows, num_outputs + len(dense_OI), cdiv(num_inputs, BLOCK_INPUTS.value), tile)
    launch_tiles(out_TO, x_TI, weight, None, tile._replace(splits=spans), SecondTile(x_TI, dense_OI))


def multiply_dequantized(out_TO: Tensor, x_TI: Tensor, weight: FourBitWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO`` with torch's products of rows with the dequantised weight, part by part."""
    num_outputs, num_inputs = weight.shape
    step = min(num_outputs, max(1, SCRATCH_CODES // num_inputs))
    scratch_OI = torch.empty((step, num_inputs), dtype=x_TI.dtype, device=x_TI.device)
    for start in range(0, num_outputs, step):
        rows = slice(start, min(num_outputs, start + step))
        part_OI = scratch_OI[: rows.stop - start]
        dequantize_into(part_OI, weight, start)
        bias = None if bias_O is None else bias_O[rows]
        linear_triton.multiply_into(out_TO[:, rows], x_TI, part_OI, bias)


def dequantize_into(out_OI: Tensor, weight: FourBitWeight, start: int = 0) -> None:
    """Fill ``out_OI`` with the numbers that rows of a weight stand for, from ``start`` on."""
    end, num_blocks = start + len(out_OI), cdiv(weight.num_inputs, BLOCK_INPUTS.value)
    zeros = None if weight.zeros is None else weight.zeros[start:end]
    _dequantize_kernel[(cdiv(len(out_OI), DEQUANTIZED_ROWS), num_blocks)](
        weight.words[start:end],
        weight.scales[start:end],
        zeros,
        out_OI,
        len(out_OI),
        weight.num_inputs,
        weight.words.stride(-2),
        *weight.scales.stride(),
        BLOCK_N=DEQUANTIZED_ROWS,
        GROUP=weight.group,
        num_warps=4,
        **overlap_options(out_OI),
    )
