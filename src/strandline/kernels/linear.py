"""Matrix products with weights of every form (``weights.py``). The form chooses the function once, when it is bound.

Shape suffixes: I inputs, O outputs; the dimensions before the inputs are free.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.activation import swiglu
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import operation, triton
from strandline.kernels.weights import DenseWeight, HalfWeight, PackedWeight, Weight

Linear = Callable[[Tensor], Tensor]
"""A product with a bound weight and bias."""


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


@operation(triton("linear_triton", invariant="matmul_triton"))
def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    return F.linear(x, weight_OI, bias_O)


@operation(triton("linear_triton", invariant="linear_triton"))
def gated_linear(x: Tensor, gate_up_OI: Tensor) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    return swiglu.reference(linear.reference(x, gate_up_OI))


LINEAR_OPERATIONS: Final = (linear, gated_linear, swiglu)
"""What ``bind_linear`` and ``bind_gated_linear`` look up."""


def bind_linear(kernels: Kernels, weight: Weight, bias_O: Tensor | None = None) -> Linear:
    """Return the product with a weight, and the sum with a bias."""
    return linear_of(weight, kernels[linear], bias_O)


def linear_of(
    weight: Weight, dense: Callable[[Tensor, Tensor, Tensor | None], Tensor], bias_O: Tensor | None
) -> Linear:
    """Return the product with a weight of any form.

    Args:
        dense: multiplies with an ordinary one, and adds the bias.
    """
    match weight:
        case DenseWeight(values_OI):
            return lambda x: dense(x, values_OI, bias_O)
        case PackedWeight(packed_OI):
            return partial(_packed_linear, packed_OI, bias_O)
        case HalfWeight(packed):
            return partial(_half_linear, packed, bias_O)
    assert_never(weight)


def bind_gated_linear(kernels: Kernels, weight: Weight) -> Linear:
    """Return the product with the rows of a gate and an up projection, and the gated linear unit of it."""
    if isinstance(weight, DenseWeight):
        gated, values_OI = kernels[gated_linear], weight.values_OI
        return lambda x: gated(x, values_OI)
    multiply, activate = bind_linear(kernels, weight), kernels[swiglu]
    return lambda x: activate(multiply(x))


def _packed_linear(packed_OI: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_OI, bias_O, "none", [], "")
    return out


def _half_linear(packed: object, bias_O: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return out if bias_O is None else out.add_(bias_O)
