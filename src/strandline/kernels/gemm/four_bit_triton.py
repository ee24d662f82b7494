"""Matrix products with weights in 4 bits and FP4 in Triton: few rows through registers, more on tensor cores.

One row, and few with a small weight: as ``rows_triton.py`` says. Up to
64 rows, or 256 of a wide weight: tiles of outputs and rows, of weights that are unpacked in registers; with few rows
narrow weights are split among programs along the inputs, too, and the parts are added up in order. More rows: the
weight is dequantised, a part that fits the second-level cache at a time, and multiplied by torch. Dequantising moves
2.5 bytes for a weight; at 4.3 TB/s and 700 TFLOP/s that takes as long as its products with 200 rows. Tiles unpack the
weight once for every 64 rows instead.

A launch of few rows may multiply them with an ordinary weight, too: programs of its own do that.

Invariant: ``_invariant`` versions multiply in one way of tiling, whatever the number of rows.

Shape suffixes: T rows, I inputs, O outputs.
"""
# mypy: ignore-errors

from torch import Tensor

from strandline.kernels.gemm.dequantizing_triton import multiply_dequantized
from strandline.kernels.gemm.four_bit_launches import (
    choose_gemv,
    choose_spans,
    choose_tile,
    choose_tile_invariant,
    uses_gemv,
    uses_tiles,
)
from strandline.kernels.gemm.rows_triton import Second, launch_gemv
from strandline.kernels.gemm.tiles_triton import SecondTile, launch_tiles
from strandline.kernels.gemm.weights import BLOCK_INPUTS, CodedWeight, DenseWeight
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import flat_rows, new_output, shaped
from strandline.kernels.sizes import cdiv


def four_bit_linear(x: Tensor, weight: CodedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    rows = flat_rows(x)
    out_TO = new_output(rows, weight.shape[0])
    multiply_into(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def four_bit_linear_invariant(x: Tensor, weight: CodedWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`four_bit_linear`, with the same order of sums for any number of rows."""
    rows = flat_rows(x)
    out_TO = new_output(rows, weight.shape[0])
    multiply_into_invariant(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def four_bit_gated_linear(x: Tensor, gate_up: CodedWeight) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    rows = flat_rows(x)
    if not uses_gemv(len(rows), _num_codes(gate_up)):
        return swiglu(four_bit_linear(x, gate_up))
    out_TO = new_output(rows, gate_up.shape[0] // 2)
    launch_gemv(out_TO, rows, gate_up, None, choose_gemv(len(rows), out_TO.shape[1]), is_gated=True)
    return shaped(out_TO, x)


def _num_codes(weight: CodedWeight) -> int:
    return weight.shape[0] * weight.num_inputs


def multiply_into(out_TO: Tensor, x_TI: Tensor, weight: CodedWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a product."""
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight.shape
    if not num_rows:
        return
    if uses_gemv(num_rows, _num_codes(weight)):
        launch_gemv(out_TO, x_TI, weight, bias_O, choose_gemv(num_rows, num_outputs))
    elif uses_tiles(num_rows, num_outputs):
        tile = choose_tile(num_rows, num_outputs, x_TI.dtype)
        spans = choose_spans(num_rows, num_outputs, cdiv(num_inputs, BLOCK_INPUTS), tile)
        launch_tiles(out_TO, x_TI, weight, bias_O, tile._replace(splits=spans))
    else:
        multiply_dequantized(out_TO, x_TI, weight, bias_O)


def multiply_into_invariant(out_TO: Tensor, x_TI: Tensor, weight: CodedWeight, bias_O: Tensor | None) -> None:
    """As :func:`multiply_into`, with the same order of sums for any number of rows."""
    if len(x_TI):
        launch_tiles(out_TO, x_TI, weight, bias_O, choose_tile_invariant(x_TI.dtype))


def multiply_beside(out_TO: Tensor, x_TI: Tensor, weight: CodedWeight, dense_OI: Tensor) -> None:
    """Fill ``out_TO`` with the products of a few rows with a weight and the ordinary one behind."""
    num_rows, (num_outputs, num_inputs) = len(x_TI), weight.shape
    if uses_gemv(num_rows, _num_codes(weight)):
        second = Second(DenseWeight(dense_OI), out_TO[:, num_outputs:])
        launch_gemv(out_TO, x_TI, weight, None, choose_gemv(num_rows, num_outputs), second=second)
        return
    tile = choose_tile(num_rows, num_outputs, x_TI.dtype)
    spans = choose_spans(num_rows, num_outputs + len(dense_OI), cdiv(num_inputs, BLOCK_INPUTS), tile)
    launch_tiles(out_TO, x_TI, weight, None, tile._replace(splits=spans), SecondTile(x_TI, dense_OI))
