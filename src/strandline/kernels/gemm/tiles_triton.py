"""GEMMs of many rows with a weight in any format, on tensor cores: a program multiplies a tile of rows and outputs.

Where there are few tiles, the inputs are divided into spans, and each span has programs of its own; adding up the parts
in order takes one more launch. A launch may multiply the same rows with a second weight, which is dense:
programs of its own do that, and start first, since they read the most bytes.

Shape suffixes: as in ``linear.py``; S spans; in kernels M rows of x, N outputs, K inputs.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.expansion_triton import Expansion, expand_tile
from strandline.kernels.gemm.formats.operand_triton import Operand, operand, rows_operand
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight
from strandline.kernels.launch import Launch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import quantized
from strandline.kernels.sizes import cdiv
from strandline.kernels.stages_triton import staged
from strandline.kernels.tile_triton import add_spans, gemm_dense, locate_tile, store_tile


@triton.jit
def _multiply(
    x,
    weight,
    bias_ptr,
    out_ptr,
    expansion,
    program,
    M,
    N,
    K,
    stride_out,
    span,
    stride_head,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPANSION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a tile of the product; split, that of one span of the inputs, in float32."""
    row_M, col_N = locate_tile(program, M, N, BLOCK_M, BLOCK_N)
    if EXPANSION is not None:
        # The first span adds what adapters do.
        slot_M = tl.load(expansion.slots_T + row_M, mask=(row_M < M) & (tl.program_id(1) == 0), other=-1)
        part_N = tl.load(expansion.part_O + col_N, mask=col_N < N, other=-1)
    x_ptr, scale_ptr, stride_x, stride_scale = x
    matrix = 0
    if stride_head is not None:
        matrix = tl.program_id(2).to(tl.int64)
        x_ptr += matrix * stride_head
        out_ptr += matrix * N
    first = 0
    end = tl.cdiv(K, BLOCK_K)
    if IS_SPLIT:
        first = tl.program_id(1) * span
        end = tl.minimum(first + span, end)
    acc_MN, _ = TILE(
        (x_ptr, scale_ptr, stride_x, stride_scale),
        weight,
        matrix,
        # Rows after the last one read the first ones, and are not stored. To read the same one again takes longer.
        row_M % M,
        row_M < M,
        col_N,
        first,
        end,
        N,
        K,
        LAYOUT,
        False,
        IS_EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if bias_ptr is not None:
        acc_MN += tl.load(bias_ptr + col_N, mask=col_N < N, other=0.0).to(tl.float32)[None, :]
    if EXPANSION is not None:
        wait_for_previous(OVERLAPS)
        acc_MN = expand_tile(acc_MN, expansion, slot_M, part_N, row_M, col_N, EXPANSION)
    store_tile(out_ptr, acc_MN, row_M, col_N, M, N, stride_out, IS_SPLIT, False)


@staged
@triton.jit(do_not_specialize=["M", "span"])
def _tiles_kernel(
    x,
    weight,
    bias_ptr,
    out_ptr,
    second,
    expansion,
    M,
    N,
    K,
    stride_out,
    span,
    stride_head,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXPANSION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SWAPS_SECOND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    if EXPANSION is None:
        wait_for_previous(OVERLAPS)
    # Else the launch of first factors has waited for the rows before it released, and only its results are waited for.
    release_next(OVERLAPS)
    second_programs = 0
    if second is not None:
        second_programs = tl.cdiv(M, BLOCK_M) * tl.cdiv(second[3], BLOCK_N)
    if second is not None and program < second_programs:
        gemm_dense(
            second[0],
            second[2],
            out_ptr + N,
            program,
            M,
            second[3],
            K,
            span,
            second[1],
            stride_out,
            IS_SPLIT,
            SWAPS_SECOND,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        _multiply(
            x,
            weight,
            bias_ptr,
            out_ptr,
            expansion,
            program - second_programs,
            M,
            N,
            K,
            stride_out,
            span,
            stride_head,
            TILE,
            LAYOUT,
            EXPANSION,
            IS_EVEN,
            IS_SPLIT,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            OVERLAPS,
        )


def launch_tiles(
    out_TO: Tensor,
    rows: Rows,
    weight: DenseWeight | QuantizedWeight,
    bias_O: Tensor | None,
    launch: Launch,
    second: DenseWeight | None = None,
    expansion: Expansion | None = None,
) -> None:
    """Fill ``out_TO``, a matrix with dense rows, with a product. Tiles in FP8 take quantised rows.

    Args:
        bias_O: None if there is a second product.
        second: contiguous; multiplied with plain rows. Its outputs come after the first weight's.
        expansion: is added to the outputs; only without a second product, and with no launch since that of the first
            factors but products of the same rows.
    """
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape
    num_blocks = cdiv(num_inputs, launch.block_k)
    span = cdiv(num_blocks, launch.splits)
    spans = cdiv(num_blocks, span)
    part_STO = out_TO
    if spans > 1:
        part_STO = torch.empty((spans, *out_TO.shape), dtype=torch.float32, device=rows.device)
    num_tiles = cdiv(num_outputs, launch.block_n)
    argument = None
    if second is not None:
        x_TI, num_second = plain_rows(rows), second.shape[0]
        argument = (x_TI, x_TI.stride(0), second.values_OI, num_second)
        num_tiles += cdiv(num_second, launch.block_n)
    taken: Operand = operand(weight)
    rows = quantized(rows) if weight.format.multiplies_fp8 else plain_rows(rows)
    _tiles_kernel[(cdiv(num_rows, launch.block_m) * num_tiles, spans)](
        rows_operand(rows),
        taken.data,
        bias_O if spans == 1 else None,
        part_STO,
        argument,
        expansion,
        num_rows,
        num_outputs,
        num_inputs,
        part_STO.stride(-2),
        span,
        None,
        TILE=taken.functions.tile,
        LAYOUT=taken.layout,
        EXPANSION=None if expansion is None else expansion.constants,
        IS_EVEN=num_inputs % launch.block_k == 0 and num_outputs % launch.block_n == 0,
        IS_SPLIT=spans > 1,
        SWAPS_SECOND=launch.block_m < taken.functions.min_rows,
        **launch.options(),
        **overlap_options(out_TO),
    )
    if spans > 1:
        add_spans(part_STO, bias_O, out_TO)


def launch_heads(out_THO: Tensor, x_HTI: Tensor, weight: DenseWeight, launch: Launch) -> None:
    """Fill ``out_THO`` with the product of each head's rows and matrix; the channels of x are dense."""
    (num_heads, num_rows, num_inputs), num_outputs = x_HTI.shape, weight.shape[1]
    taken = operand(weight)
    _tiles_kernel[(cdiv(num_rows, launch.block_m) * cdiv(num_outputs, launch.block_n), 1, num_heads)](
        (x_HTI, None, x_HTI.stride(1), 0),
        taken.data,
        None,
        out_THO,
        None,
        None,
        num_rows,
        num_outputs,
        num_inputs,
        out_THO.stride(0),
        0,
        x_HTI.stride(0),
        TILE=taken.functions.tile,
        LAYOUT=taken.layout,
        EXPANSION=None,
        IS_EVEN=num_inputs % launch.block_k == 0 and num_outputs % launch.block_n == 0,
        IS_SPLIT=False,
        SWAPS_SECOND=False,
        **launch.options(),
        **overlap_options(out_THO),
    )
