"""Two products of the same rows on a GPU, the second with a router's weight, in its dtype (``linear_and_logits``).

Up to ``MAX_ROWS_GEMV`` rows: one launch, whose first programs multiply with the router's weight (they are the longest),
and the others with the other weight. Up to ``MAX_ROWS_LOGITS``: the router's product takes a launch that converts x as
it reads it, where torch takes three. The way depends on shapes alone, and a row's result on no other row.

Shape suffixes: as in ``linear.py``.
"""
# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.linear_triton import MAX_ROWS_GEMV, linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.rows_triton import Gemv, Second, launch_gemv
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.rowwise.quantized_rows import new_output

PAIR = Gemv(1, 1024, 2)
"""Programs of 2 KiB of a bfloat16 weight at a time, or 4 KiB of a float32 one."""

LOGITS = Gemv(1, 1024, 4)
"""A chunk has 8 inputs for each thread: its rows and the weight's lie in the same threads."""

MAX_ROWS_LOGITS = 64


def linear_and_logits(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``x weight^T + bias``, and ``x router^T`` computed in the router's dtype; weights are contiguous."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    if 0 < len(x_TI) <= MAX_ROWS_GEMV:
        return _multiply_pair(x_TI, weight_OI, bias_O, router_EI)
    return linear(x_TI, weight_OI, bias_O), _logits(x_TI, router_EI)


def linear_and_logits_invariant(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`linear_and_logits`, with the same order of sums for any number of rows."""
    return linear_invariant(x_TI, weight_OI, bias_O), linear_invariant(x_TI.to(router_EI.dtype), router_EI)


def _logits(x_TI: Tensor, router_EI: Tensor) -> Tensor:
    if not 0 < len(x_TI) <= MAX_ROWS_LOGITS:
        return F.linear(x_TI.to(router_EI.dtype), router_EI)
    logits_TE = _unfilled(x_TI, router_EI)
    launch_gemv(logits_TE, x_TI, DenseWeight(router_EI), None, LOGITS)
    return logits_TE


def _multiply_pair(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor) -> tuple[Tensor, Tensor]:
    out_TO, logits_TE = new_output(x_TI, len(weight_OI)), _unfilled(x_TI, router_EI)
    second = Second(DenseWeight(router_EI), logits_TE)
    launch_gemv(out_TO, x_TI, DenseWeight(weight_OI), bias_O, PAIR, second=second)
    return out_TO, logits_TE


def _unfilled(x_TI: Tensor, router_EI: Tensor) -> Tensor:
    return torch.empty((len(x_TI), len(router_EI)), dtype=router_EI.dtype, device=x_TI.device)
