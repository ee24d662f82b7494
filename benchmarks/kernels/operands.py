"""Weights of every format with random numbers, and products with them, taken as layers of models take them.

All that cases of matrix products and of experts know about formats is here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from case import bound, kernels_of, random
from torch import Tensor

from strandline.kernels.binding import Kernels, reference_kernels
from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts.moe import RELU_SQUARED, SWIGLU, ExpertWeights, Router, SharedExpert, mixture
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.formats.coded import CodedFormat
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_gated_linear, bind_linear
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, ScaledWeight, Weight
from strandline.kernels.rowwise.norm import rms_norm_zero_centered
from strandline.kernels.rowwise.quantized_rows import GROUP, Rows
from strandline.kernels.rowwise.quantizing import rms_norm_zero_centered_quantized
from strandline.models.storage.coded_storage import StoredCodes
from strandline.models.storage.layouts import MXFP4_COMPRESSED, MXFP8_LAYOUT, NVFP4_COMPRESSED
from strandline.models.storage.microscaled import MicroscaledFormat

LAYOUTS = {"nvfp4": NVFP4_COMPRESSED, "mxfp4": MXFP4_COMPRESSED, "mxfp8": MXFP8_LAYOUT}
FORMATS: dict[str, Format] = {
    "dense": DENSE,
    "fp8": FP8,
    "int4": FOUR_BIT,
    **{name: layout.format for name, layout in LAYOUTS.items()},
}
GROUPS = (128, 32)
"""Inputs that share a scale in 4 bits."""


def random_weight(weight_format: str, *shape: int, group: int = 128) -> Any:
    """Return a random weight, or several of one shape, ``[..., O, I]``, whose products have the size of their inputs.

    Args:
        group: inputs that share a scale in 4 bits; codes are symmetric.
    """
    num_inputs = shape[-1]
    if weight_format == "dense":
        return DenseWeight(random(*shape, scale=num_inputs**-0.5))
    if weight_format == "fp8":
        values = random_e4m3(*shape)
        scales = torch.rand(*shape[:-2], -(-shape[-2] // GROUP), -(-num_inputs // GROUP)).add_(0.5)
        return ScaledWeight(values, scales.mul_(num_inputs**-0.5 / 100))
    rows = stored(weight_format, group).allocate(math.prod(shape[:-1]), num_inputs, torch.get_default_device())
    rows.fill_randomly(None, num_inputs**-0.5, shape[-2])
    return rows.weight(slice(None), shape[:-1], 0)


def bytes_per_weight(weight_format: str) -> float:
    """Return the bytes of a weight's numbers, without scales."""
    known = FORMATS[weight_format]
    return known.bits / 8 if isinstance(known, CodedFormat) else {"dense": 2.0, "fp8": 1.0}[weight_format]


def stored(weight_format: str, group: int) -> StoredCodes:
    """Return how weights in codes are stored; arguments as of ``random_weight``."""
    if weight_format == "int4":
        return StoredCodes(FOUR_BIT, group, torch.bfloat16)
    return MicroscaledFormat(LAYOUTS[weight_format]).stored({})


def random_e4m3(*shape: int) -> Tensor:
    """Return random numbers of a standard deviation of 100."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn)
    for rows in values.view(-1, shape[-1]).split(2**14):
        rows.copy_(random(*rows.shape, scale=100).clamp_(-448, 448))
    return values


def num_bytes(weight: Any) -> int:
    """Return the bytes of a weight and its scales."""
    match weight:
        case DenseWeight(values):
            return values.nbytes
        case ScaledWeight():
            return weight.values.nbytes + weight.scales.nbytes
        case CodedWeight():
            return weight.words.nbytes + weight.scales.nbytes
    raise TypeError(type(weight))


Product = Callable[[Any, Any], Any]
"""Takes rows and a weight."""


def product(*, is_gated: bool = False, is_deterministic: bool = False) -> Product:
    """Return the product with weights of any format, or its gated linear unit."""
    return partial(_multiply, kernels_of(LINEAR_OPERATIONS, is_deterministic=is_deterministic), is_gated)


def reference_product(*, is_gated: bool = False) -> Product:
    """Return the same by reference implementations."""
    return partial(_multiply, reference_kernels(LINEAR_OPERATIONS), is_gated)


def _multiply(kernels: Kernels, is_gated: bool, x: Rows, weight: Weight) -> Any:
    bind = bind_gated_linear if is_gated else bind_linear
    return bind(kernels, weight)(x)


def bind_norm(weight_format: str, weight_I: Tensor) -> Callable[[Tensor], Rows]:
    """Return the norm before a product: it quantises for one in FP8, and keeps the plain rows."""
    norm = bound(rms_norm_zero_centered_quantized if weight_format == "fp8" else rms_norm_zero_centered)
    return lambda x_TI: cast(Rows, norm(x_TI, weight_I, 1e-6))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts of one layer."""

    up: Any
    """With the gate's rows first, if it has a gate."""
    down: Any
    shared_down: Weight
    routing: Routing
    bias_E: Tensor | None
    is_gated: bool
    held: range | None = None
    """As of ``ExpertWeights``."""


Projected = tuple[Tensor, Tensor, Tensor | None]
"""Products of tokens with the shared expert's first weight and with the router's, and the shared expert's gate."""


Mixture = Callable[[Any, Projected, Experts], Tensor]
"""Takes tokens, products of them, and a layer's experts."""


def mixture_of_experts(*, is_deterministic: bool = False) -> Mixture:
    """Return the mixture of experts of any format."""
    return partial(_mix, kernels_of((mixture,), is_deterministic=is_deterministic))


def reference_mixture() -> Mixture:
    """Return the same by the reference implementation."""
    return partial(_mix, reference_kernels((mixture,)))


def _mix(kernels: Kernels, x: Rows, projected: Projected, experts: Experts) -> Tensor:
    shared_TS, logits_TE, gate_T1 = projected
    activation = SWIGLU if experts.is_gated else RELU_SQUARED
    weights = ExpertWeights(experts.up, experts.down, activation, experts.held)
    router = Router(logits_TE, experts.bias_E, experts.routing)
    return added_up(kernels[mixture](x, weights, router, SharedExpert(shared_TS, experts.shared_down, gate_T1)))
