"""Activations of experts in kernels: a device function for each operation.

Shape suffixes: none; tensors are of any shape.
"""
# mypy: ignore-errors

from collections.abc import Mapping
from typing import Final, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from strandline.kernels.experts.moe import Activation
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.activation import biased_swiglu, capped_swiglu, relu_squared, swiglu
from strandline.kernels.rowwise.activation_triton import silu_times, squared_relu


@triton.jit
def _biased_silu_times(gate, up, dtype: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """Round as the reference: both products, and the result; NaN stays NaN."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (gate * tl.sigmoid(SLOPE * gate) * (up + 1.0)).to(dtype)


@triton.jit
def _capped(x, LIMIT: tl.constexpr):
    """Return ``LIMIT * tanh(x / LIMIT)``, since ``tanh(y)`` is ``2 * sigmoid(2 * y) - 1``."""
    return LIMIT * (2.0 * tl.sigmoid(x * (2.0 / LIMIT)) - 1.0)


@triton.jit
def _capped_silu_times(gate, up, dtype: tl.constexpr, LIMIT: tl.constexpr, UP_LIMIT: tl.constexpr):
    """Round as the reference: both products, and the result."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (_capped(gate, LIMIT) * tl.sigmoid(gate) * _capped(up, UP_LIMIT)).to(dtype)


FUNCTIONS: Final[Mapping[Operation, JITFunction]] = {
    swiglu: silu_times,
    biased_swiglu: _biased_silu_times,
    capped_swiglu: _capped_silu_times,
    relu_squared: squared_relu,
}


class Activate(NamedTuple):
    """An activation as a ``tl.constexpr`` argument of kernels."""

    function: JITFunction
    is_gated: bool
    limit: float | None
    second: float | None
    """The other constant of operations that take two: a slope, or another limit."""

    @property
    def cache_key(self) -> str:
        """See ``RowFunctions``."""
        return f"{self.function.cache_key}-{self.is_gated}-{self.limit}-{self.second}"


def activation_argument(activation: Activation) -> Activate:
    """Return an activation as an argument of kernels."""
    second = activation.slope if activation.up_limit is None else activation.up_limit
    return Activate(FUNCTIONS[activation.operation], activation.is_gated, activation.limit, second)


@triton.jit
def activate(x, up, ACTIVATE: tl.constexpr, DTYPE: tl.constexpr):
    """Return hidden features of float32 outputs of the first product, rounded as the reference; ``up``: with a gate."""
    # Of statements, those after a return would be compiled, too.
    return (
        ACTIVATE.function(x, up, DTYPE, ACTIVATE.limit, ACTIVATE.second)
        if ACTIVATE.second is not None
        else ACTIVATE.function(x, up, DTYPE, ACTIVATE.limit)
        if ACTIVATE.is_gated
        else ACTIVATE.function(x, DTYPE)
    )
