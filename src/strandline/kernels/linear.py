"""GEMMs with weights that may be packed: laid out once as the CPU multiplies them fastest.

In bfloat16 oneDNN lays an ordinary weight out anew in every call, which costs up to half the time of a small batch. In
float32 MKL multiplies a few rows up to 2.8 times as fast with a weight whose inputs, not outputs, lie apart
(benchmarks/results). A packed weight can only be multiplied with: it may have no rows to slice, copy or index.

A float32 weight that comes from bfloat16 can also be *halved*: kept in float16, and multiplied with float32 inputs and
sums by FBGEMM, in a third of MKL's time for a few rows. Float16 holds every bfloat16 number from 2**-17 up to 65,504,
and smaller ones within 2**-25, less than the rounding of a sum of products with ordinary weights.

Shape suffixes: I inputs, O outputs; the dimensions before the inputs are free.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strandline.kernels.activation import swiglu
from strandline.kernels.operation import operation, triton

MAX_HALF_ERROR: Final = 2.0**-25
"""Most that a halved weight may differ: half the distance of the smallest float16 numbers."""


def has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of a dtype at least as fast as in float32.

    Torch hands 16-bit products to oneDNN where oneDNN supports the dtype (on ARM: where the CPU has instructions for
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


def can_pack(weight_OI: Tensor) -> bool:
    """Return whether packing exists for a weight of this dtype on this device."""
    if weight_OI.device.type != "cpu":
        return False
    if weight_OI.dtype == torch.float32:
        return bool(torch.backends.mkl.is_available())
    if weight_OI.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight_OI: Tensor) -> Tensor:
    """Return a packed copy; ``can_pack`` must hold."""
    if weight_OI.dtype == torch.float32:
        return weight_OI.t().contiguous().t()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
    return packed


def can_halve(weight_OI: Tensor) -> bool:
    """Return whether a weight can be kept in float16, within ``MAX_HALF_ERROR``, and this CPU multiplies with that."""
    if not weight_OI.is_cpu or weight_OI.dtype != torch.float32:
        return False
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    return bool((weight_OI.half().float() - weight_OI).abs().max() <= MAX_HALF_ERROR)


def halve(weight_OI: Tensor) -> nn.Parameter:
    """Return a stand-in for a halved copy, of the same shape and dtype; ``can_halve`` must hold.

    The stand-in reads as NaN, so that a product not computed by :func:`linear` shows.
    """
    stand_in = nn.Parameter(torch.full((), torch.nan).expand(weight_OI.shape), requires_grad=False)
    stand_in.halved = torch.ops.quantized.linear_prepack_fp16(weight_OI.contiguous(), None)  # type: ignore[attr-defined]
    return stand_in


@operation(triton("linear_triton", invariant="matmul_triton"))
def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``; the weight may be packed or halved."""
    halved = getattr(weight_OI, "halved", None)
    if halved is not None:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, halved)
        return product if bias_O is None else product.add_(bias_O)
    if weight_OI.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
        return out
    return F.linear(x, weight_OI, bias_O)


@operation(triton("linear_triton", invariant="linear_triton"))
def gated_linear(x: Tensor, gate_up_OI: Tensor) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's; the weight as in ``linear``."""
    return swiglu.reference(linear.reference(x, gate_up_OI))
