"""GEMMs of many rows by torch. Weights of codes are dequantised for it, part by part.

Shape suffixes: as in ``linear.py``; T rows; in kernels N rows and K inputs of a weight.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm import fp8
from strandline.kernels.gemm.formats import coded
from strandline.kernels.gemm.formats.operand_triton import operand
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, QuantizedWeight, ScaledWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import quantized
from strandline.kernels.sizes import cdiv

BLOCK_INPUTS = tl.constexpr(coded.BLOCK_INPUTS)

SCRATCH_CODES = 1 << 24
"""Weights that are dequantised at a time: 32 MiB in bfloat16 stay in the second-level cache."""

DEQUANTIZED_ROWS = 32
"""Rows of a weight that a program dequantises one block of."""


@triton.jit
def _dequantize_kernel(
    weight,
    out_ptr,
    N,
    K,
    DEQUANTIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write one block of inputs of some rows."""
    row_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    value_NK = DEQUANTIZE(weight, tl.minimum(row_N, N - 1), block, LAYOUT)
    # The product before may still read what was dequantised for it.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    col_K = block * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
    out_NK_ptr = out_ptr + (row_N * K)[:, None] + col_K[None, :]
    tl.store(out_NK_ptr, value_NK.to(out_ptr.dtype.element_ty), mask=(row_N < N)[:, None] & (col_K < K)[None, :])


def multiply_in_library(
    out_TO: Tensor, rows: Rows, weight: DenseWeight | QuantizedWeight, bias_O: Tensor | None
) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a product."""
    if isinstance(weight, DenseWeight):
        _multiply_dense(out_TO, plain_rows(rows), weight.values_OI, bias_O)
    elif isinstance(weight, ScaledWeight):
        fp8.multiply_in_torch(out_TO, quantized(rows), weight, bias_O)
    else:
        multiply_dequantized(out_TO, plain_rows(rows), weight, bias_O)


def _multiply_dense(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    if bias_O is None:
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
    else:
        torch.addmm(bias_O, x_TI, weight_OI.t(), out=out_TO)


def multiply_dequantized(out_TO: Tensor, x_TI: Tensor, weight: CodedWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO`` with torch's products of rows with the dequantised weight, part by part."""
    num_outputs, num_inputs = weight.shape
    step = min(num_outputs, max(1, SCRATCH_CODES // num_inputs))
    scratch_OI = torch.empty((step, num_inputs), dtype=x_TI.dtype, device=x_TI.device)
    for start in range(0, num_outputs, step):
        rows = slice(start, min(num_outputs, start + step))
        part_OI = scratch_OI[: rows.stop - start]
        dequantize_into(part_OI, weight[rows])
        bias = None if bias_O is None else bias_O[rows]
        _multiply_dense(out_TO[:, rows], x_TI, part_OI, bias)


def dequantize_into(out_OI: Tensor, weight: CodedWeight) -> None:
    """Fill ``out_OI`` with the numbers that a weight stands for."""
    taken, num_blocks = operand(weight), cdiv(weight.num_inputs, BLOCK_INPUTS.value)
    _dequantize_kernel[(cdiv(len(out_OI), DEQUANTIZED_ROWS), num_blocks)](
        taken.data,
        out_OI,
        len(out_OI),
        weight.num_inputs,
        DEQUANTIZE=taken.functions.dequantize,
        LAYOUT=taken.layout,
        BLOCK_N=DEQUANTIZED_ROWS,
        num_warps=4,
        **overlap_options(out_OI),
    )
