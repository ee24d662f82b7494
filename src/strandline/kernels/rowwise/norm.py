"""RMS and l2 normalisation over the last dimension, with the rounding of the published models.

Statistics are taken in float32 whatever the input. Where the result is rounded to the input's dtype differs
between families and is part of each function's contract: a model must use the one that it was trained with.

Source: ``transformers`` for the rounding.

Shape suffixes: D channels; the dimensions before it are free, or T tokens, then G groups of channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.operation import numba, operation, triton

ELEMENTS_PER_PASS_CPU = 2**17
"""Elements of a large input that a CPU normalises in one pass, so that intermediate results stay in its cache."""


@operation(triton("rowwise.norm_triton"), numba("rowwise.norm_numba"))
def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round to x's dtype, then multiply by the weight (Llama and most others)."""
    return rms_norm_heads(x, weight_D, eps)


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise as above, with one weight, ``[D]``, or one for each head, ``[H, D]``."""
    return _in_passes(lambda x: (_normalised(x, eps).to(x.dtype) * weight).to(x.dtype), x)


@operation(triton("rowwise.norm_triton"), numba("rowwise.norm_numba"))
def add_rms_norm(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, round the sum; return it normalised as above, and itself. A tensor is overwritten."""
    total = added_up(x).add_(residual)
    return rms_norm.reference(total, weight_D, eps), total


@operation(triton("rowwise.norm_triton"), numba("rowwise.norm_numba"))
def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise and multiply by ``1 + weight`` in float32, then round to x's dtype (Gemma and others)."""
    return rms_norm_heads_zero_centered(x, weight_D, eps)


def rms_norm_heads_zero_centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise as above, with one weight, ``[D]``, or one for each head, ``[H, D]``."""

    def norm(x: Tensor) -> Tensor:
        normed = _normalised(x, eps)
        return normed.addcmul_(normed, weight).to(x.dtype)

    return _in_passes(norm, x)


@operation(triton("rowwise.norm_triton"), numba("rowwise.norm_numba"))
def add_rms_norm_zero_centered(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`, with the zero-centred norm."""
    total = added_up(x).add_(residual)
    return rms_norm_zero_centered.reference(total, weight_D, eps), total


@operation(triton("rowwise.norm_triton"), numba("rowwise.norm_numba"))
def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round, multiply by the weight, then by ``silu(gate)`` in float32; return x's dtype."""

    def norm(x: Tensor, gate: Tensor) -> Tensor:
        normed = _normalised(x, eps).to(x.dtype) * weight_D
        return F.silu(gate.float()).mul_(normed).to(x.dtype)

    return _in_passes(norm, x, gate)


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Return x in float32, divided by the root of its mean square."""
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale: Tensor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale


def _in_passes(norm: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Apply a norm to rows of x, and of what has as many rows: to all at once, or on a CPU to some at a time."""
    if x.numel() <= ELEMENTS_PER_PASS_CPU or not x.is_cpu:
        return norm(x, *others)
    num_rows = max(1, ELEMENTS_PER_PASS_CPU * len(x) // x.numel())
    parts = zip(*(tensor.split(num_rows) for tensor in (x, *others)), strict=True)
    return torch.cat([norm(*part) for part in parts])


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by ``sqrt(sum(x ** 2) + eps)`` in float32; return float32."""
    x = x.float()
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) + eps)


@operation(triton("rowwise.norm_triton"))
def rms_norm_sigmoid_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, multiply by the weight and by ``sigmoid(gate)``, all in float32; return x's dtype."""

    def norm(x: Tensor, gate: Tensor) -> Tensor:
        return _normalised(x, eps).mul_(weight_D.float()).mul_(gate.float().sigmoid_()).to(x.dtype)

    return _in_passes(norm, x, gate)


@operation(triton("rowwise.norm_triton"))
def rms_norm_of_gated(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, num_groups: int, gate_factor: float = 1.0
) -> Tensor:
    """Multiply by ``silu(gate_factor gate)``, normalise each group of channels, round, multiply by the weight.

    In float32 up to the rounding.
    """

    def norm(x_TD: Tensor, gate_TD: Tensor) -> Tensor:
        gated_TGD = F.silu(gate_TD.float() * gate_factor).mul_(x_TD).unflatten(-1, (num_groups, -1))
        return _normalised(gated_TGD, eps).flatten(1).to(x_TD.dtype) * weight_D

    return _in_passes(norm, x_TD, gate_TD)
