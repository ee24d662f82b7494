"""GEMMs with weights of every format (``weights.py``): three operations, which choose by the weight's type.

Shape suffixes: I inputs, O outputs, E experts; the dimensions before the inputs are free, or T rows and H heads.
"""

from collections.abc import Callable
from typing import Any, Final, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.fp8 import fp8_linear
from strandline.kernels.gemm.low_rank import Adapters, LowRankTerm, add_low_rank
from strandline.kernels.gemm.weights import (
    CodedWeight,
    DenseWeight,
    HalfWeight,
    PackedWeight,
    ScaledWeight,
    StackedWeight,
    Weight,
)
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows, quantize

Linear = Callable[[Any], Tensor]
"""A product of ``Rows`` with a bound weight and bias; quantised ones are taken by weights in FP8 alone, and by those of
parts if the plain rows are kept."""

Gated = Callable[[Any], Any]
"""A gated linear unit with a bound weight, of and to such rows."""


def has_fast_gemms(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of a dtype at least as fast as in float32.

    Torch hands 16-bit GEMMs to oneDNN where oneDNN supports the dtype (on ARM: where the CPU has instructions for
    it), else to loops of its own, many times slower. On AVX512 without bfloat16 instructions oneDNN supports bfloat16
    by emulation, slower than float32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    is_emulated = torch.cpu._is_avx512_supported() and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not is_emulated


@operation(triton("gemm.gemms_triton", takes_launches=True))
def linear(x: Rows, weight: Weight, bias_O: Tensor | None = None, term: LowRankTerm | None = None) -> Tensor:
    """Return ``x weight^T + bias`` in x's dtype; outputs of a weight of parts are side by side.

    Args:
        term: what adapters add; only with rows that are plain, or stored so with the quantised ones.
    """
    out = _product(x, weight, bias_O)
    return out if term is None else add_low_rank(out, plain_rows(x), *term)


def _product(x: Rows, weight: Weight, bias_O: Tensor | None) -> Tensor:
    if isinstance(weight, CodedWeight):
        return _coded_linear(weight, bias_O, plain_rows(x))
    match weight:
        case DenseWeight(values_OI):
            return F.linear(plain_rows(x), values_OI, bias_O)
        case PackedWeight(packed_OI):
            return _packed_linear(packed_OI, bias_O, plain_rows(x))
        case HalfWeight(packed):
            return _half_linear(packed, bias_O, plain_rows(x))
        case ScaledWeight():
            return fp8_linear(x, weight, bias_O)
        case StackedWeight(parts):
            out = torch.cat([_product(x, part, None) for part in parts], dim=-1)
            return out if bias_O is None else out.add_(bias_O)
    assert_never(weight)


@operation(triton("gemm.gemms_triton", takes_launches=True))
def gated_linear(x: Rows, weight: Weight, term: LowRankTerm | None = None) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's; ``term`` as of ``linear``."""
    return swiglu.reference(linear.reference(x, weight, None, term))


@operation(triton("gemm.gemms_triton", takes_launches=True))
def gated_linear_quantized(x: Rows, weight: Weight, term: LowRankTerm | None = None) -> Rows:
    """As ``gated_linear``, for a product in FP8; quantised, but for a few rows on a GPU."""
    return quantize(gated_linear.reference(x, weight, term))


@operation(triton("gemm.gemms_triton", takes_launches=True))
def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Return ``out_THO``: each head's part of x times the head's weight, transposed."""
    return torch.matmul(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)


@operation(triton("gemm.gemms_triton", takes_launches=True))
def logits(x: Rows, router: Weight, dtype: torch.dtype) -> Tensor:
    """Return ``x router^T`` in the router's dtype, of rows before they were quantised."""
    return _product(plain_rows(x).to(dtype), router, None)


@operation(triton("gemm.gemms_triton", takes_launches=True))
def linear_and_logits(
    x: Rows, weight: Weight, bias_O: Tensor | None, router: Weight, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``x weight^T + bias`` as ``linear`` does, and the logits of a router in a dtype of its own."""
    return _product(x, weight, bias_O), logits.reference(x, router, dtype)


LINEAR_OPERATIONS: Final = (linear, gated_linear, gated_linear_quantized)
"""What ``bind_linear`` and ``bind_gated_linear`` look up."""


def bind_linear(
    kernels: Kernels, weight: Weight, bias_O: Tensor | None = None, adapters: Adapters | None = None
) -> Linear:
    """Return the product with a weight, and the sum with a bias and what adapters add."""
    multiply = kernels[linear]
    if adapters is None:
        return lambda x: multiply(x, weight, bias_O)
    return lambda x: multiply(x, weight, bias_O, adapters.term)


def bind_logits(kernels: Kernels, router: Weight, dtype: torch.dtype) -> Linear:
    """Return the logits of a router, which takes inputs in a dtype of its own."""
    score = kernels[logits]
    return lambda x: score(x, router, dtype)


def bind_linear_and_logits(
    kernels: Kernels, weight: Weight, bias_O: Tensor | None, router: Weight, dtype: torch.dtype
) -> Callable[[Rows], tuple[Tensor, Tensor]]:
    """Return the products with a weight and with a router's."""
    both = kernels[linear_and_logits]
    return lambda x: both(x, weight, bias_O, router, dtype)


def bind_gated_linear(kernels: Kernels, weight: Weight, adapters: Adapters | None = None) -> Gated:
    """Return the product with the rows of a gate and an up projection, and the gated linear unit of it."""
    return _bind_gated(kernels[gated_linear], weight, adapters)


def bind_gated_linear_quantized(kernels: Kernels, weight: Weight, adapters: Adapters | None = None) -> Gated:
    """As ``bind_gated_linear``, for a product in FP8."""
    return _bind_gated(kernels[gated_linear_quantized], weight, adapters)


def _bind_gated(multiply: Callable[..., Any], weight: Weight, adapters: Adapters | None) -> Gated:
    if adapters is None:
        return lambda x: multiply(x, weight)
    return lambda x: multiply(x, weight, adapters.term)


def _coded_linear(weight: CodedWeight, bias_O: Tensor | None, x: Tensor) -> Tensor:
    """Multiply with the numbers that a weight stands for in float32, as kernels add them up."""
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x.float(), weight.dequantize(), bias).to(x.dtype)


def _packed_linear(packed_OI: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_OI, bias_O, "none", [], "")
    return out


def _half_linear(packed: object, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return out if bias_O is None else out.add_(bias_O)
