"""GEMMs with weights of every format on a GPU (``linear.py``): each format's module multiplies.

Of few rows, a format's module may compute a gated linear unit in one launch. Launches that are fixed never do.
"""
# mypy: ignore-errors

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from strandline.kernels.gemm import (
    block_scaled_triton,
    four_bit_triton,
    linear_triton,
    matmul_triton,
    stacked_linear_triton,
)
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight, Fp4Weight, ScaledWeight, StackedWeight, Weight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, flat_rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import swiglu_quantized

LINEAR: Final[Mapping[tuple[Launches, type], Callable[..., Tensor]]] = {
    (Launches.MEASURED, DenseWeight): lambda x, weight, bias_O: linear_triton.linear(
        plain_rows(x), weight.values_OI, bias_O
    ),
    (Launches.MEASURED, ScaledWeight): block_scaled_triton.block_scaled_linear,
    (Launches.MEASURED, FourBitWeight): four_bit_triton.four_bit_linear,
    (Launches.MEASURED, Fp4Weight): four_bit_triton.four_bit_linear,
    (Launches.MEASURED, StackedWeight): stacked_linear_triton.stacked_linear,
    (Launches.FIXED, DenseWeight): lambda x, weight, bias_O: matmul_triton.linear_invariant(
        plain_rows(x), weight.values_OI, bias_O
    ),
    (Launches.FIXED, ScaledWeight): block_scaled_triton.block_scaled_linear_invariant,
    (Launches.FIXED, FourBitWeight): four_bit_triton.four_bit_linear_invariant,
    (Launches.FIXED, Fp4Weight): four_bit_triton.four_bit_linear_invariant,
    (Launches.FIXED, StackedWeight): stacked_linear_triton.stacked_linear_invariant,
}

GATED: Final[Mapping[tuple[Launches, type], Callable[..., Any]]] = {
    (Launches.MEASURED, DenseWeight): lambda x, weight: linear_triton.gated_linear(plain_rows(x), weight.values_OI),
    (Launches.MEASURED, ScaledWeight): block_scaled_triton.block_scaled_gated_linear,
    (Launches.MEASURED, FourBitWeight): four_bit_triton.four_bit_gated_linear,
    (Launches.MEASURED, Fp4Weight): four_bit_triton.four_bit_gated_linear,
}
"""Where there is none, a launch of its own applies the activation."""


def linear(x: Rows, weight: Weight, bias_O: Tensor | None = None, *, launches: Launches = Launches.MEASURED) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.linear`."""
    return LINEAR[launches, type(weight)](x, weight, bias_O)


def gated_linear(x: Rows, weight: Weight, *, launches: Launches = Launches.MEASURED) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.gated_linear`."""
    gated = GATED.get((launches, type(weight)))
    return swiglu(linear(x, weight, launches=launches)) if gated is None else gated(x, weight)


def gated_linear_quantized(x: Rows, weight: Weight, *, launches: Launches = Launches.MEASURED) -> Rows:
    """Triton version of :func:`strandline.kernels.gemm.linear.gated_linear_quantized`.

    The product that takes few rows of a weight in FP8 quantises them itself.
    """
    rows = flat_rows(x)
    if launches is Launches.MEASURED and isinstance(weight, ScaledWeight):
        return block_scaled_triton.block_scaled_gated_linear_quantized(rows, weight)
    return swiglu_quantized(linear(rows, weight, launches=launches))
