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
from strandline.kernels.rowwise.activation import relu_squared, swiglu
from strandline.kernels.rowwise.activation_triton import silu_times, squared_relu

FUNCTIONS: Final[Mapping[Operation, JITFunction]] = {swiglu: silu_times, relu_squared: squared_relu}


class Activate(NamedTuple):
    """An activation as a ``tl.constexpr`` argument of kernels."""

    function: JITFunction
    is_gated: bool
    limit: float | None

    @property
    def cache_key(self) -> str:
        """As of ``RowFunctions``."""
        return f"{self.function.cache_key}-{self.is_gated}-{self.limit}"


def activation_argument(activation: Activation) -> Activate:
    """Return an activation as an argument of kernels."""
    return Activate(FUNCTIONS[activation.operation], activation.is_gated, activation.limit)


@triton.jit
def activate(x, up, ACTIVATE: tl.constexpr, DTYPE: tl.constexpr):
    """Return hidden features of float32 outputs of the first product, rounded as the reference; ``up``: with a gate."""
    return ACTIVATE.function(x, up, DTYPE, ACTIVATE.limit) if ACTIVATE.is_gated else ACTIVATE.function(x, DTYPE)
