"""Matrix products with weights of every form (``weights.py``). The form chooses the function once, when it is bound.

Shape suffixes: I inputs, O outputs, E experts; the dimensions before the inputs are free, or T rows and H heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.binding import Kernels, reference_kernels
from strandline.kernels.gemm.block_scaled import (
    block_scaled_gated_linear,
    block_scaled_gated_linear_quantized,
    block_scaled_linear,
)
from strandline.kernels.gemm.four_bit import four_bit_gated_linear, four_bit_linear
from strandline.kernels.gemm.weights import (
    DenseWeight,
    FourBitWeight,
    Fp4Weight,
    HalfWeight,
    PackedWeight,
    ScaledWeight,
    StackedWeight,
    Weight,
)
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows
from strandline.kernels.rowwise.quantizing import swiglu_quantized

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


@operation(triton("gemm.linear_triton", invariant="gemm.matmul_triton"))
def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    return F.linear(x, weight_OI, bias_O)


@operation(triton("gemm.linear_triton", invariant="gemm.matmul_triton"))
def head_linear(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """Return ``out_THO``: each head's part of x times the head's weight, transposed."""
    return torch.matmul(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)


@operation(triton("gemm.linear_triton", invariant="gemm.linear_triton"))
def gated_linear(x: Tensor, gate_up_OI: Tensor) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    return swiglu.reference(linear.reference(x, gate_up_OI))


@operation(triton("gemm.stacked_linear_triton", invariant="gemm.stacked_linear_triton"))
def stacked_linear(x: Rows, weight: StackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias`` with a weight of parts, whose outputs lie side by side."""
    out = torch.cat([multiply_reference(x, part) for part in weight.parts], dim=-1)
    return out if bias_O is None else out.add_(bias_O)


def multiply_reference(x: Rows, weight: DenseWeight | ScaledWeight | FourBitWeight | Fp4Weight) -> Tensor:
    """Return ``x weight^T``, by reference implementations."""
    match weight:
        case DenseWeight(values_OI):
            return linear.reference(plain_rows(x), values_OI)
        case FourBitWeight():
            return four_bit_linear.reference(plain_rows(x), weight)
        case Fp4Weight():
            x_TI = plain_rows(x)
            return F.linear(x_TI.float(), weight.dequantize()).to(x_TI.dtype)
        case ScaledWeight():
            return block_scaled_linear.reference(x, weight)
    assert_never(weight)


@operation(triton("gemm.linear_and_logits_triton", invariant="gemm.linear_and_logits_triton"))
def linear_and_logits(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, router_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``x weight^T + bias``, and ``x router^T`` computed in the router's dtype."""
    return linear.reference(x_TI, weight_OI, bias_O), F.linear(x_TI.to(router_EI.dtype), router_EI)


LINEAR_OPERATIONS: Final = (
    linear,
    gated_linear,
    swiglu,
    block_scaled_linear,
    block_scaled_gated_linear,
    block_scaled_gated_linear_quantized,
    four_bit_linear,
    four_bit_gated_linear,
    stacked_linear,
    swiglu_quantized,
)
"""What ``bind_linear`` and ``bind_gated_linear`` look up."""


def bind_linear(kernels: Kernels, weight: Weight, bias_O: Tensor | None = None) -> Linear:
    """Return the product with a weight, and the sum with a bias."""
    match weight:
        case DenseWeight(values_OI):
            dense = kernels[linear]
            return lambda x: dense(x, values_OI, bias_O)
        case PackedWeight(packed_OI):
            return partial(_packed_linear, packed_OI, bias_O)
        case HalfWeight(packed):
            return partial(_half_linear, packed, bias_O)
        case ScaledWeight():
            scaled = kernels[block_scaled_linear]
            return lambda x: scaled(x, weight, bias_O)
        case FourBitWeight():
            four_bit = kernels[four_bit_linear]
            return lambda x: four_bit(x, weight, bias_O)
        case StackedWeight():
            stacked = kernels[stacked_linear]
            return lambda x: stacked(x, weight, bias_O)
    assert_never(weight)


def bind_linear_and_logits(
    kernels: Kernels, weight: Weight, bias_O: Tensor | None, router: Weight, router_dtype: torch.dtype
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the products with a weight and with a router's, which takes inputs in a dtype of its own."""
    if isinstance(weight, DenseWeight) and isinstance(router, DenseWeight):
        both, values_OI, router_EI = kernels[linear_and_logits], weight.values_OI, router.values_OI
        return lambda x_TI: both(x_TI, values_OI, bias_O, router_EI)
    multiply, score = bind_linear(kernels, weight, bias_O), bind_linear(kernels, router)
    return lambda x_TI: (multiply(x_TI), score(x_TI.to(router_dtype)))


def reference_linear(weight: Weight) -> Linear:
    """Return the product with a weight, by reference implementations where it is in no library's layout."""
    return bind_linear(reference_kernels(LINEAR_OPERATIONS), weight)


def bind_gated_linear(kernels: Kernels, weight: Weight) -> Gated:
    """Return the product with the rows of a gate and an up projection, and the gated linear unit of it."""
    if isinstance(weight, DenseWeight):
        gated, values_OI = kernels[gated_linear], weight.values_OI
        return lambda x: gated(x, values_OI)
    if isinstance(weight, ScaledWeight):
        scaled = kernels[block_scaled_gated_linear]
        return lambda x: scaled(x, weight)
    if isinstance(weight, FourBitWeight):
        four_bit = kernels[four_bit_gated_linear]
        return lambda x: four_bit(x, weight)
    multiply, activate = bind_linear(kernels, weight), kernels[swiglu]
    return lambda x: activate(multiply(x))


def bind_gated_linear_quantized(kernels: Kernels, weight: Weight) -> Gated:
    """As ``bind_gated_linear``, for a product in FP8."""
    if isinstance(weight, ScaledWeight):
        scaled = kernels[block_scaled_gated_linear_quantized]
        return lambda x: scaled(x, weight)
    multiply, activate = bind_linear(kernels, weight), kernels[swiglu_quantized]
    return lambda x: activate(multiply(x))


def _packed_linear(packed_OI: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_OI, bias_O, "none", [], "")
    return out


def _half_linear(packed: object, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return out if bias_O is None else out.add_(bias_O)
