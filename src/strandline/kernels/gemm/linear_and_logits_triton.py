"""Two products of the same rows on a GPU, the second with a router's weight, in its dtype (``linear_and_logits``).

Up to ``MAX_ROWS_GEMV`` rows: one launch, whose first programs multiply with the router's weight (they are the longest),
and the others with the other weight. Up to ``MAX_ROWS_LOGITS``: the router's product takes a launch that converts x as
it reads it, where torch takes three. The way depends on shapes alone, and a row's result on no other row.

Shape suffixes: as in ``linear.py``; in kernels as in ``linear_triton.py``.
"""
# mypy: ignore-errors

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.linear_triton import MAX_ROWS_GEMV, Gemv, launch_gemv, linear, multiply_rows
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.overlap_triton import overlap_options
from strandline.kernels.sizes import cdiv, next_power_of_2

PAIR = Gemv(1, 1024, 2)
"""Programs of 2 KiB of a bfloat16 weight at a time, or 4 KiB of a float32 one."""

LOGITS = Gemv(1, 1024, 4)
"""A chunk has 8 inputs for each thread: its rows and the weight's lie in the same threads."""

MAX_ROWS_LOGITS = 64


@triton.jit
def _pair_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    router_ptr,
    logits_ptr,
    M,
    stride_x,
    K,
    N,
    E,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0)
    num_router_tiles = tl.cdiv(E, BLOCK_N)
    if tile < num_router_tiles:
        multiply_rows(
            tile,
            0,
            x_ptr,
            router_ptr,
            None,
            logits_ptr,
            M,
            stride_x,
            K,
            E,
            E,
            False,
            False,
            IS_EVEN,
            NUM_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            OVERLAPS,
        )
    else:
        multiply_rows(
            tile - num_router_tiles,
            0,
            x_ptr,
            weight_ptr,
            bias_ptr,
            out_ptr,
            M,
            stride_x,
            K,
            N,
            N,
            HAS_BIAS,
            False,
            IS_EVEN,
            NUM_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            OVERLAPS,
        )


def linear_and_logits(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``x weight^T + bias``, and ``x router^T`` computed in the router's dtype; weights are contiguous."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    if 0 < len(x_TI) <= MAX_ROWS_GEMV:
        return _launch_pair(x_TI, weight_OI, bias_O, router_EI)
    return linear(x_TI, weight_OI, bias_O), _logits(x_TI, router_EI)


def linear_and_logits_invariant(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`linear_and_logits`, with the same order of sums for any number of rows."""
    return linear_invariant(x_TI, weight_OI, bias_O), linear_invariant(x_TI.to(router_EI.dtype), router_EI)


def _logits(x_TI: Tensor, router_EI: Tensor) -> Tensor:
    if 0 < len(x_TI) <= MAX_ROWS_LOGITS:
        return launch_gemv(x_TI, router_EI, None, LOGITS, is_gated=False, out_dtype=router_EI.dtype)
    return F.linear(x_TI.to(router_EI.dtype), router_EI)


def _launch_pair(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor) -> tuple[Tensor, Tensor]:
    (num_rows, num_inputs), (num_outputs, num_experts) = x_MI.shape, (len(weight_OI), len(router_EI))
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    logits_ME = torch.empty((num_rows, num_experts), dtype=router_EI.dtype, device=x_MI.device)
    block_k = min(PAIR.block_k, next_power_of_2(num_inputs))
    _pair_kernel[(cdiv(num_outputs, PAIR.block_n) + cdiv(num_experts, PAIR.block_n),)](
        x_MI,
        weight_OI,
        bias_O,
        out_MO,
        router_EI,
        logits_ME,
        num_rows,
        x_MI.stride(0),
        num_inputs,
        num_outputs,
        num_experts,
        HAS_BIAS=bias_O is not None,
        IS_EVEN=num_inputs % block_k == 0 and num_outputs % PAIR.block_n == 0 and num_experts % PAIR.block_n == 0,
        NUM_K=cdiv(num_inputs, block_k),
        BLOCK_M=next_power_of_2(num_rows),
        BLOCK_N=PAIR.block_n,
        BLOCK_K=block_k,
        num_warps=PAIR.warps,
        **overlap_options(x_MI),
    )
    return out_MO, logits_ME
