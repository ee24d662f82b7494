"""GEMMs of a few rows with a large weight in FP8, whose numbers are on their way before the launch waits for the rows.

A program loads the inputs of a span of some outputs at once, into registers, and then waits. One product on tensor
cores gives the sums of all groups of inputs: a column is a pair of a group and a row, and zero for inputs of other
groups. Sums are multiplied by the groups' scales and added up; those of spans are added in their order by one more
launch. A launch may multiply the same rows with a second weight, which is dense: programs of its own do that, and start
first.

Shape suffixes: as in ``linear.py``; S spans; in kernels M rows of x, N outputs, K inputs of a span, R groups, C pairs
of a group and a row.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.formats.operand_triton import operand
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.launch import Launch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise import quantized_rows
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import quantized
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.tile_triton import add_spans

GROUP = tl.constexpr(quantized_rows.GROUP)

MIN_ROWS_DOT = tl.constexpr(16)
"""Fewest rows and columns of a product on tensor cores."""

SECOND_OUTPUTS = 16
"""Outputs of a program of the second weight: as many bytes as 32 outputs of a weight in FP8."""


@triton.jit
def _after_wait(x, OVERLAPS: tl.constexpr):
    """Return numbers that were loaded before the wait.

    They are held in registers until here: otherwise the compiler moves each to shared memory as soon as it is loaded,
    and only a few are under way at once.
    """
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if OVERLAPS:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


@triton.jit
def _multiply(
    x,
    weight,
    out_ptr,
    program,
    span,
    M,
    N,
    K,
    stride_out,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write some outputs' products with one span of the inputs."""
    x_ptr, x_scale_ptr, stride_xs = x
    weight_ptr, scale_ptr, _, stride_sy, stride_sx, _, _, _ = weight
    SCALE_ROWS: tl.constexpr = LAYOUT.scale_rows
    row_N = program * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs after the last read its row again.
    read_N = tl.minimum(row_N, N - 1)
    offset_K = tl.arange(0, GROUPS * GROUP)
    col_K = span * (GROUPS * GROUP) + offset_K
    weight_NK_ptr = weight_ptr + read_N.to(tl.int64)[:, None] * K + col_K[None, :]
    weight_NK = tl.load(weight_NK_ptr, eviction_policy="evict_first")
    group_R = span * GROUPS + tl.arange(0, GROUPS)
    if SCALE_ROWS % BLOCK_N == 0:
        scale_1R = tl.load(scale_ptr + program * BLOCK_N // SCALE_ROWS * stride_sy + group_R * stride_sx)[None, :]
    else:
        scale_1R = tl.load(scale_ptr + (read_N // SCALE_ROWS * stride_sy)[:, None] + (group_R * stride_sx)[None, :])
    weight_NK = _after_wait(weight_NK, OVERLAPS)
    pair_C = tl.arange(0, GROUPS * ROWS)
    is_own_KC = (offset_K // GROUP)[:, None] == (pair_C // ROWS)[None, :]
    is_row_C = pair_C % ROWS < M
    x_KC_ptr = x_ptr + (pair_C % ROWS)[None, :] * K + col_K[:, None]
    x_KC = tl.load(x_KC_ptr, mask=is_own_KC & is_row_C[None, :], other=0.0)
    row_M = tl.arange(0, ROWS)
    x_scale_RM = tl.load(x_scale_ptr + group_R[:, None] * stride_xs + tl.minimum(row_M, M - 1)[None, :])
    sum_NC = tl.dot(weight_NK, x_KC, out_dtype=tl.float32)
    sum_NRM = tl.reshape(sum_NC, [BLOCK_N, GROUPS, ROWS])
    out_NM = tl.sum(sum_NRM * (scale_1R[:, :, None] * x_scale_RM[None, :, :]), axis=1)
    _store(out_ptr, out_NM, span, row_M, row_N, M, N, stride_out)


@triton.jit
def _multiply_dense(
    second,
    out_ptr,
    program,
    span,
    M,
    K,
    stride_out,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write some outputs' products of plain rows and a dense weight with one span of the inputs."""
    x_ptr, stride_x, weight_ptr, N = second
    row_N = program * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = span * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    weight_NK = tl.load(weight_ptr + tl.minimum(row_N, N - 1).to(tl.int64)[:, None] * K + col_K[None, :])
    weight_NK = _after_wait(weight_NK, OVERLAPS)
    row_M = tl.arange(0, MIN_ROWS_DOT if ROWS < MIN_ROWS_DOT else ROWS)
    x_KM = tl.load(x_ptr + tl.minimum(row_M, M - 1).to(tl.int64)[None, :] * stride_x + col_K[:, None])
    out_NM = tl.dot(weight_NK, x_KM, input_precision="ieee", out_dtype=tl.float32)
    _store(out_ptr, out_NM, span, row_M, row_N, M, N, stride_out)


@triton.jit
def _store(out_ptr, out_NM, span, row_M, row_N, M, N, stride_out):
    out_NM_ptr = out_ptr + (span * M + row_M).to(tl.int64)[None, :] * stride_out + row_N[:, None]
    tl.store(out_NM_ptr, out_NM.to(out_ptr.dtype.element_ty), mask=(row_N < N)[:, None] & (row_M < M)[None, :])


@triton.jit
def _preloaded_kernel(
    x,
    weight,
    out_ptr,
    second,
    M,
    N,
    K,
    stride_out,
    LAYOUT: tl.constexpr,
    SECOND_PROGRAMS: tl.constexpr,
    SECOND_OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    program = tl.program_id(0)
    span = tl.program_id(1)
    if SECOND_PROGRAMS > 0 and program < SECOND_PROGRAMS:
        _multiply_dense(second, out_ptr + N, program, span, M, K, stride_out, ROWS, GROUPS, SECOND_OUTPUTS, OVERLAPS)
    else:
        program -= SECOND_PROGRAMS
        _multiply(x, weight, out_ptr, program, span, M, N, K, stride_out, LAYOUT, ROWS, GROUPS, BLOCK_N, OVERLAPS)


def launch_preloaded(
    out_TO: Tensor,
    rows: Rows,
    weight: ScaledWeight,
    bias_O: Tensor | None,
    launch: Launch,
    second: DenseWeight | None = None,
) -> None:
    """Fill ``out_TO``, a matrix with dense rows, with a product.

    Args:
        bias_O: None if there is a second product.
        launch: the inputs of its blocks divide the weight's.
        second: contiguous; multiplied with plain rows. Its outputs come after the first weight's.
    """
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape
    spans = num_inputs // launch.block_k
    part_STO = torch.empty((spans, *out_TO.shape), dtype=torch.float32, device=out_TO.device)
    argument, num_second = None, 0
    if second is not None:
        x_TI, num_second = plain_rows(rows), second.shape[0]
        argument = (x_TI, x_TI.stride(0), second.values_OI, num_second)
    second_programs = cdiv(num_second, SECOND_OUTPUTS)
    x, taken = quantized(rows), operand(weight)
    _preloaded_kernel[(second_programs + cdiv(num_outputs, launch.block_n), spans)](
        (x.values_TI, x.scale_XT, x.scale_XT.stride(0)),
        taken.data,
        part_STO,
        argument,
        num_rows,
        num_outputs,
        num_inputs,
        part_STO.stride(-2),
        LAYOUT=taken.layout,
        SECOND_PROGRAMS=second_programs,
        SECOND_OUTPUTS=SECOND_OUTPUTS,
        ROWS=max(next_power_of_2(num_rows), launch.block_m),
        GROUPS=launch.block_k // quantized_rows.GROUP,
        BLOCK_N=launch.block_n,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **overlap_options(out_TO),
    )
    add_spans(part_STO, bias_O, out_TO)
