"""Operations whose results products in FP8 take: each equals the plain operation, then quantising.

Shape suffixes: D channels; T tokens, O features, I inputs of a product.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.operation import Operation, operation, triton
from strandline.kernels.rowwise.activation import sigmoid_gate, swiglu
from strandline.kernels.rowwise.norm import (
    add_rms_norm,
    add_rms_norm_zero_centered,
    rms_norm,
    rms_norm_gated,
    rms_norm_zero_centered,
)
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, quantize


@operation(triton("rowwise.norm_triton"))
def rms_norm_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As ``rms_norm`` of rows; the plain result is kept."""
    return _with_plain(rms_norm.reference(x, weight_D, eps))


@operation(triton("rowwise.norm_triton"))
def add_rms_norm_quantized(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """As ``add_rms_norm`` of rows; the plain result is kept."""
    normed, total = add_rms_norm.reference(x, residual, weight_D, eps)
    return _with_plain(normed), total


@operation(triton("rowwise.norm_triton"))
def rms_norm_zero_centered_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As ``rms_norm_zero_centered`` of rows; the plain result is kept."""
    return _with_plain(rms_norm_zero_centered.reference(x, weight_D, eps))


@operation(triton("rowwise.norm_triton"))
def add_rms_norm_zero_centered_quantized(
    x: Summand, residual: Tensor, weight_D: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """As ``add_rms_norm_zero_centered`` of rows; the plain result is kept."""
    normed, total = add_rms_norm_zero_centered.reference(x, residual, weight_D, eps)
    return _with_plain(normed), total


@operation(triton("rowwise.norm_triton"))
def rms_norm_gated_quantized(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As ``rms_norm_gated`` of ``[T, H, D]``, heads and their channels then taken as one row."""
    return quantize(rms_norm_gated.reference(x, gate, weight_D, eps).flatten(1))


@operation(triton("rowwise.quantizing_triton"))
def swiglu_quantized(gate_up: Tensor, limit: float | None = None, gate_factor: float = 1.0) -> QuantizedRows:
    """As ``swiglu`` of rows."""
    return quantize(swiglu.reference(gate_up, limit, gate_factor))


@operation(triton("rowwise.quantizing_triton"))
def sigmoid_gate_quantized(x_TO: Tensor, gate_TO: Tensor) -> QuantizedRows:
    """As ``sigmoid_gate``."""
    return quantize(sigmoid_gate.reference(x_TO, gate_TO))


QUANTIZED: Final[Mapping[Operation[..., Any], Operation[..., Any]]] = {
    rms_norm: rms_norm_quantized,
    add_rms_norm: add_rms_norm_quantized,
    rms_norm_zero_centered: rms_norm_zero_centered_quantized,
    add_rms_norm_zero_centered: add_rms_norm_zero_centered_quantized,
    rms_norm_gated: rms_norm_gated_quantized,
    swiglu: swiglu_quantized,
    sigmoid_gate: sigmoid_gate_quantized,
}
"""The version of an operation that quantises what it returns."""


def with_quantized(*operations: Operation[..., Any]) -> tuple[Operation[..., Any], ...]:
    """Return operations, and the versions of them that quantise."""
    return (*operations, *(QUANTIZED[operation] for operation in operations))


def _with_plain(x_TI: Tensor) -> QuantizedRows:
    return quantize(x_TI, plain_TI=x_TI)
