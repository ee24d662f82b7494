"""Mixture of experts: experts with gated linear units or without, in plain torch.

The reference implementation, which also runs on CPUs. Experts that no token chose cost nothing.

Shape suffixes: T tokens, D hidden size, E experts, F intermediate size of one expert, K experts per token, S
intermediate size of the shared expert, A = T K assignments of a token to an expert,
sorted by expert.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.linear import reference_linear
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight, ScaledWeight, Weight
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import clamped_swiglu, relu_squared, swiglu

ExpertsWeight = DenseWeight | ScaledWeight | FourBitWeight
"""One matrix of every expert, ``[E, O, I]``."""


class Activation(Enum):
    """What experts compute between their two products."""

    SWIGLU = "swiglu"
    """``silu(gate) * up``."""
    RELU_SQUARED = "relu_squared"
    """``relu(up) ** 2``, without a gate."""

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate."""
        return self is Activation.SWIGLU


class ExpertWeights(NamedTuple):
    """Experts, both weights in one format."""

    up: ExpertsWeight
    """``[E, 2 F, D]``, the gate's rows before the up projection's; without a gate ``[E, F, D]``."""
    down: ExpertsWeight
    """``[E, D, F]``."""
    activation: Activation = Activation.SWIGLU
    held: range | None = None
    """Numbers of these experts among all that tokens may choose; others add nothing. None: these are all."""


class SharedExpert(NamedTuple):
    """A shared expert before its activation."""

    projected_TS: Tensor
    """Outputs of its first projections, ``[T, 2 S]``, or without a gate ``[T, S]``; may be overwritten."""
    down: Weight
    """``[D, S]``."""
    gate_T1: Tensor | None = None
    """A sigmoid of it multiplies the shared expert's output; None: that is added as it is."""


class SharedOutput(NamedTuple):
    """Outputs of a shared expert."""

    out_TD: Tensor
    gate_T1: Tensor | None = None
    """As of ``SharedExpert``."""


@operation(triton("experts.moe_triton", invariant="experts.moe_triton"))
def mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor | None,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: Weight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype.

    Args:
        shared_gate_up_TS: products of x with the shared expert's gate and then its up projection, ``[T, 2 S]``; None:
            there is no shared expert.
        logits_TE: the router's.
        shared_gate_T1: the shared expert's gate before its sigmoid; None: it is added as it is. All three may be
            columns of one tensor.
        gate_up_EFD: ``[E, 2 F, D]``, the gate's rows before the up projection's.
        shared_down: ``[D, S]``.
        bias_E: as in ``route``.
        held: as in ``experts_glu``.

    Returns:
        A tensor, or the choices of each token, for the next operation to add up.
    """
    weights_TK, experts_TK = route.reference(logits_TE, bias_E, routing)
    shared_TD = None
    if shared_gate_up_TS is not None and shared_down is not None:
        shared_TD = reference_linear(shared_down)(swiglu.reference(shared_gate_up_TS))
    return experts_glu(x_TD, gate_up_EFD, down_EDF, weights_TK, experts_TK, shared_TD, shared_gate_T1, held)


@operation(triton("experts.moe_triton", invariant="experts.moe_triton"))
def mixture_relu_squared(
    x_TD: Tensor,
    shared_up_TS: Tensor | None,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: Weight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As ``mixture``, of experts without a gate, the shared one too: ``down(relu(up x) ** 2)``.

    Args:
        shared_up_TS: products of x with the shared expert's up projection, ``[T, S]``; may be overwritten.
    """
    weights_TK, experts_TK = route.reference(logits_TE, bias_E, routing)
    shared_TD = None
    if shared_up_TS is not None and shared_down is not None:
        shared_TD = reference_linear(shared_down)(relu_squared.reference(shared_up_TS))
    return experts_relu_squared(x_TD, up_EFD, down_EDF, weights_TK, experts_TK, shared_TD, held)


def experts_glu(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    shared_gate_T1: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, ``down(silu(gate x) * up x)``, in x's dtype.

    Args:
        gate_up_EFD: ``[E, 2 F, D]``, the gate's rows before the up projection's.
        shared_TD: what the shared expert made of each token; added after multiplying by ``sigmoid(shared_gate_T1)``.
        held: numbers that ``experts_TK`` has for the experts whose weights these are; others add nothing. None: all.
    """

    def apply(expert: int, x_AD: Tensor) -> Tensor:
        return F.linear(swiglu.reference(F.linear(x_AD, gate_up_EFD[expert])), down_EDF[expert])

    out_TD = sum_of_experts(apply, len(down_EDF), x_TD, weights_TK, experts_TK, held)
    return with_shared(out_TD, shared_TD, shared_gate_T1)


@operation(reads_host=True)
def clamped_experts_glu(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    limit: float,
    held: range | None = None,
) -> Tensor:
    """As ``experts_glu``, with gates and up projections clamped to a limit, as ``clamped_swiglu``."""

    def apply(expert: int, x_AD: Tensor) -> Tensor:
        return F.linear(clamped_swiglu.reference(F.linear(x_AD, gate_up_EFD[expert]), limit), down_EDF[expert])

    return sum_of_experts(apply, len(down_EDF), x_TD, weights_TK, experts_TK, held)


def experts_relu_squared(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, ``down(relu(up x) ** 2)``, in x's dtype.

    Args:
        shared_TD, held: as in ``experts_glu``.
    """

    def apply(expert: int, x_AD: Tensor) -> Tensor:
        return F.linear(relu_squared.reference(F.linear(x_AD, up_EFD[expert])), down_EDF[expert])

    return with_shared(sum_of_experts(apply, len(down_EDF), x_TD, weights_TK, experts_TK, held), shared_TD, None)


def with_shared(out_TD: Tensor, shared_TD: Tensor | None, shared_gate_T1: Tensor | None) -> Tensor:
    """Add what the shared expert made, if there is one, behind its gate, if it has one; ``out_TD`` is overwritten."""
    if shared_TD is None:
        return out_TD
    return out_TD.add_(shared_TD if shared_gate_T1 is None else shared_TD * shared_gate_T1.sigmoid())


def sum_of_experts(
    apply: Callable[[int, Tensor], Tensor],
    num_experts: int,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    held: range | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, in x's dtype, given what an expert makes of some rows of x."""
    num_tokens, top_k = experts_TK.shape
    if held is not None:
        # Choices of other experts come last in the order below.
        is_held_TK = (experts_TK >= held.start) & (experts_TK < held.stop)
        experts_TK = torch.where(is_held_TK, experts_TK - held.start, len(held))
    expert_A, order_A = experts_TK.flatten().sort(stable=True)
    counts_E = torch.bincount(expert_A, minlength=num_experts)[:num_experts]
    x_AD = x_TD[order_A.div(top_k, rounding_mode="floor")]
    out_AD = torch.empty_like(x_AD)
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            rows = slice(start, start + count)
            out_AD[rows] = apply(expert, x_AD[rows])
            start += count
    out_AD[start:] = 0.0
    # Back into the order of the tokens: the sum over a token's experts does not depend on its neighbours.
    weighted_AD = torch.empty(out_AD.shape, dtype=torch.float32, device=out_AD.device)
    weighted_AD[order_A] = out_AD.float()
    weighted_TKD = weighted_AD.view(num_tokens, top_k, -1)
    return torch.matmul(weights_TK.unsqueeze(1), weighted_TKD).squeeze(1).to(x_TD.dtype)
