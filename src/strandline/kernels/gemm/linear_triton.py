"""GEMMs of few rows with a weight, which is streamed through registers or through tensor cores.

One row, and up to ``MAX_ROWS_GEMV`` with a small weight: as ``rows_triton.py`` says. Up to ``MAX_ROWS_SKINNY`` with
many outputs: tiles of 16 rows, on tensor cores. Otherwise torch's GEMM. The way depends on shapes alone, and a row's
result on no other row.

Shape suffixes: as in ``linear.py``; T rows; in kernels M rows of x, N outputs, K the dimension that a matrix product
sums over, S spans of the inputs.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.rows_triton import Gemv, launch_gemv
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.activation_triton import silu_times, swiglu
from strandline.kernels.rowwise.quantized_rows import new_output
from strandline.kernels.sizes import cdiv
from strandline.kernels.tile_triton import add_spans, store_tile

MAX_ROWS_GEMV = 4
MAX_ROWS_SKINNY = 16

MAX_OUTPUTS = 65536
"""Beyond (the head), two rows and more take torch's GEMM; one row takes 0.92 of its time on an H200."""


class Skinny(NamedTuple):
    """How a GEMM with up to 16 rows is tiled."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    spans: int = 1
    """Spans of the inputs, each a GEMM of its own; adding them up takes one more launch."""


GEMV_TINY = Gemv(1, 2048, 4)
GEMV_SMALL = Gemv(1, 1024, 2)
GEMV_NARROW = Gemv(2, 512, 2)
GEMV_LONG = Gemv(2, 1024, 2)
GEMV_WIDE = Gemv(4, 512, 2)
"""Programs of 2 to 4 KiB at a time, a thousand of them and more: most of a small weight is under way at once."""

TINY_ELEMENTS = 3 << 20
"""Up to this size there are too few programs of two outputs."""

LONG_INPUTS = 4096

SMALL_ELEMENTS = 12 << 20
"""Up to this size a weight is streamed faster by ever more programs, and for one to four rows; a larger one takes
torch's GEMM from three rows on: the arithmetic outweighs the stream there."""

WIDE_INPUTS = 2560
"""From here on a program has four outputs."""

SKINNY = Skinny(64, 128, 4, 4)
SKINNY_GATED = Skinny(16, 256, 2, 4)
"""Some 200 to 600 programs, each with 48 to 64 KiB under way."""

MIN_OUTPUTS_SKINNY = 8192
"""Below, there are too few tiles to fill the GPU: torch splits the inputs there."""


@triton.jit
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    stride_x,
    K,
    N,
    span_k,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a tile of the product; split, that of one span of the inputs, in float32."""
    col_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset_K = tl.arange(0, BLOCK_K)
    row_M = tl.arange(0, BLOCK_M)
    is_row_M = row_M < M
    is_col_N = col_N < N
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_MK_ptr = x_ptr + row_M.to(tl.int64)[:, None] * stride_x + offset_K[None, :]
    weight_KN_ptr = weight_ptr + (col_N * K)[None, :] + offset_K[:, None]
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1) * span_k
    for start in range(first, tl.minimum(first + span_k, K), BLOCK_K):
        if IS_EVEN:
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start, eviction_policy="evict_first")
        else:
            is_K = start + offset_K < K
            mask_KN = is_K[:, None] & is_col_N[None, :]
            x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start, mask=mask_KN, other=0.0, eviction_policy="evict_first")
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
        if IS_GATED:
            up_KN_ptr = weight_KN_ptr + tl.cast(N, tl.int64) * K + start
            if IS_EVEN:
                up_KN = tl.load(up_KN_ptr, eviction_policy="evict_first")
            else:
                is_K = start + offset_K < K
                mask_KN = is_K[:, None] & is_col_N[None, :]
                up_KN = tl.load(up_KN_ptr, mask=mask_KN, other=0.0, eviction_policy="evict_first")
            acc_up_MN = tl.dot(x_MK, up_KN, acc_up_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + col_N, mask=is_col_N, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        acc_MN = silu_times(acc_MN, acc_up_MN, out_ptr.dtype.element_ty)
    store_tile(out_ptr, acc_MN, row_M, col_N, M, N, N, IS_SPLIT, False)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    plan = plan_product(x, weight_OI, is_gated=False)
    if plan is None:
        return F.linear(x, weight_OI, bias_O)
    return _launch(x, weight_OI, bias_O, plan, is_gated=False)


def multiply_into(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a matrix product by torch."""
    if bias_O is None:
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
    else:
        torch.addmm(bias_O, x_TI, weight_OI.t(), out=out_TO)


def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Return ``out_THO``, the product of each head: torch's, whose weights are small."""
    return torch.matmul(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)


def gated_linear(x: Tensor, gate_up_OI: Tensor) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    plan = plan_product(x, gate_up_OI, is_gated=True)
    if plan is None:
        return swiglu(linear(x, gate_up_OI))
    return _launch(x, gate_up_OI, None, plan, is_gated=True)


def plan_product(x: Tensor, weight_OI: Tensor, *, is_gated: bool) -> Gemv | Skinny | None:
    """Return the tiling of a GEMM with few rows, or None where torch's is as fast. Shapes alone decide."""
    if x.dim() != 2 or not 0 < len(x) <= MAX_ROWS_SKINNY or x.stride(1) != 1 or not weight_OI.is_contiguous():
        return None
    num_rows, (num_outputs, num_inputs) = len(x), weight_OI.shape
    if x.dtype == torch.float32 and num_rows > MAX_ROWS_GEMV:
        return None
    if num_outputs > MAX_OUTPUTS:
        return GEMV_NARROW if num_rows == 1 else None
    if num_outputs * num_inputs <= SMALL_ELEMENTS:
        if num_rows > MAX_ROWS_GEMV:
            return None
        return _gemv_of_a_row(num_inputs, num_outputs) if num_rows == 1 else GEMV_NARROW
    if num_rows == 1:
        return GEMV_WIDE if num_inputs >= WIDE_INPUTS else GEMV_NARROW
    if num_outputs < MIN_OUTPUTS_SKINNY:
        return None
    return SKINNY_GATED if is_gated else SKINNY


def _gemv_of_a_row(num_inputs: int, num_outputs: int) -> Gemv:
    """Return the tiling for one row and a small weight: whole blocks, if the inputs can be divided so."""
    is_tiny, is_long = num_outputs * num_inputs <= TINY_ELEMENTS, num_inputs >= LONG_INPUTS
    wanted = [GEMV_TINY] * is_tiny + [GEMV_LONG] * is_long + [GEMV_NARROW]
    return next((gemv for gemv in wanted if num_inputs % gemv.block_k == 0), GEMV_SMALL)


def _launch(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, plan: Gemv | Skinny, *, is_gated: bool) -> Tensor:
    if isinstance(plan, Skinny):
        return launch_skinny(x, weight_OI, bias_O, plan, is_gated=is_gated)
    out_MO = new_output(x, len(weight_OI) // (1 + is_gated))
    launch_gemv(out_MO, x, DenseWeight(weight_OI), bias_O, plan, is_gated=is_gated)
    return out_MO


def launch_skinny(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile: Skinny, *, is_gated: bool) -> Tensor:
    """Return the matrix product of up to 16 rows; gated, of ``silu(gate x) * up x``, which cannot be split."""
    num_rows, num_inputs = x_MI.shape
    num_outputs = len(weight_OI) // 2 if is_gated else len(weight_OI)
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    options = overlap_options(x_MI)
    span = cdiv(num_inputs, tile.spans * tile.block_k) * tile.block_k
    spans = cdiv(num_inputs, span)
    part_SMO = out_MO
    if spans > 1:
        part_SMO = torch.empty((spans, num_rows, num_outputs), dtype=torch.float32, device=x_MI.device)
    _skinny_kernel[(cdiv(num_outputs, tile.block_n), spans)](
        x_MI,
        weight_OI,
        bias_O,
        part_SMO,
        num_rows,
        x_MI.stride(0),
        num_inputs,
        num_outputs,
        span,
        HAS_BIAS=bias_O is not None and spans == 1,
        IS_GATED=is_gated,
        IS_EVEN=num_inputs % tile.block_k == 0 and num_outputs % tile.block_n == 0,
        IS_SPLIT=spans > 1,
        BLOCK_M=16,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    if spans > 1:
        add_spans(part_SMO, bias_O, out_MO)
    return out_MO
