"""Matrix products of few rows in FP8, with one scale per block of weights, in Triton (``block_scaled.py``).

A program has a tile of rows and of outputs, which lies within one block of the weight, so that a step over a group of
inputs takes one scale of the weight. Rows are quantised in registers: with few of them that is cheaper than a launch
before, and every program reads all of them anyway. The weight is read once, in half the bytes of bfloat16.

Any number of rows is right; many are slow, since each tile of rows reads the whole weight.

Shape suffixes: as in ``block_scaled.py``; in kernels M rows of x, N outputs, K the inputs of a group.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels import block_scaled
from strandline.kernels.sizes import cdiv


class Tile(NamedTuple):
    """How a product is launched; ``outputs`` divides a block of the weight."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


TILE = Tile(rows=16, outputs=32, num_warps=4, num_stages=4)
"""Not tuned on a GPU yet."""

MAX_E4M3 = tl.constexpr(block_scaled.MAX_E4M3)
MIN_SCALE = tl.constexpr(block_scaled.MIN_SCALE)


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_x,
    num_groups,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_M = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, GROUP)
    scale_ptr += tl.program_id(0) * BLOCK_N // GROUP * num_groups
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for group in range(num_groups):
        is_input_K = group * GROUP + col_K < K
        weight_ptr_NK = weight_ptr + row_N[:, None] * K + (group * GROUP + col_K)[None, :]
        weight_NK = tl.load(weight_ptr_NK, mask=(row_N < N)[:, None] & is_input_K[None, :], other=0.0)
        x_ptr_MK = x_ptr + row_M[:, None] * stride_x + (group * GROUP + col_K)[None, :]
        x_MK = tl.load(x_ptr_MK, mask=(row_M < M)[:, None] & is_input_K[None, :], other=0.0).to(tl.float32)
        scale_M = tl.maximum(tl.max(tl.abs(x_MK), axis=1) / MAX_E4M3, MIN_SCALE)
        quantized_MK = (x_MK / scale_M[:, None]).to(tl.float8e4nv)
        product_MN = tl.dot(quantized_MK, tl.trans(weight_NK), out_dtype=tl.float32)
        acc_MN += product_MN * (scale_M * tl.load(scale_ptr + group))[:, None]
    if HAS_BIAS:
        acc_MN += tl.load(bias_ptr + row_N, mask=row_N < N, other=0.0).to(tl.float32)[None, :]
    out_ptr_MN = out_ptr + row_M[:, None] * N + row_N[None, :]
    is_out_MN = (row_M < M)[:, None] & (row_N < N)[None, :]
    tl.store(out_ptr_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=is_out_MN)


def block_scaled_linear(x: Tensor, weight_OI: Tensor, scale_YX: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Triton version of :func:`strandline.kernels.block_scaled.block_scaled_linear`.

    Needs a contiguous weight, contiguous scales, and inputs that lie together; rows of x may lie apart.

    Raises:
        ValueError: scales are laid out differently, or do not belong to a weight of this shape.
    """
    num_outputs, num_inputs = weight_OI.shape
    num_groups = cdiv(num_inputs, block_scaled.GROUP)
    if scale_YX.shape != (cdiv(num_outputs, block_scaled.GROUP), num_groups) or not scale_YX.is_contiguous():
        raise ValueError(f"scales {tuple(scale_YX.shape)} of a weight {tuple(weight_OI.shape)}, or not contiguous")
    x_TI = x.reshape(-1, num_inputs)
    out_TO = torch.empty((len(x_TI), num_outputs), dtype=x.dtype, device=x.device)
    if not len(x_TI):
        return out_TO.view(*x.shape[:-1], num_outputs)
    _kernel[(cdiv(num_outputs, TILE.outputs), cdiv(len(x_TI), TILE.rows))](
        x_TI,
        weight_OI,
        scale_YX,
        out_TO if bias_O is None else bias_O,
        out_TO,
        len(x_TI),
        num_outputs,
        num_inputs,
        x_TI.stride(0),
        num_groups,
        HAS_BIAS=bias_O is not None,
        BLOCK_M=TILE.rows,
        BLOCK_N=TILE.outputs,
        GROUP=block_scaled.GROUP,
        num_warps=TILE.num_warps,
        num_stages=TILE.num_stages,
    )
    return out_TO.view(*x.shape[:-1], num_outputs)
