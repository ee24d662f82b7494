"""Mixtures of experts, with weights of any format, with gated linear units or without, in plain torch.

The reference implementation, which also runs on CPUs. Experts that no token chose cost nothing.

Shape suffixes: T tokens, D hidden size, E experts, F intermediate size of one expert, K experts per token, S
intermediate size of the shared expert, O outputs of projections, A = T K assignments of a token to an expert,
sorted by expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.linear import linear
from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, StackedWeight, Weight
from strandline.kernels.operation import Operation, operation, triton
from strandline.kernels.rowwise.activation import relu_squared, swiglu
from strandline.kernels.rowwise.normed_rows import NormedRows, settled
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows

ExpertsWeight = DenseWeight | QuantizedWeight
"""One matrix of every expert, ``[E, O, I]``."""


class Activation(NamedTuple):
    """What experts compute between their two products."""

    operation: Operation[..., Tensor]
    is_gated: bool
    """Whether experts have a gate, whose outputs come before those of the up projection."""
    limit: float | None = None
    """What a gated operation clamps to; None: nothing is clamped."""
    slope: float | None = None
    """Factor in a gated operation's sigmoid, where it takes one."""
    up_limit: float | None = None
    """What a gated operation clamps the up projection to, where it takes another limit for it."""

    @property
    def reference(self) -> Callable[[Tensor], Tensor]:
        """The reference implementation."""
        options = {"limit": self.limit, "slope": self.slope, "up_limit": self.up_limit}
        given = {name: value for name, value in options.items() if value is not None}
        return partial(self.operation.reference, **given) if given else self.operation.reference


SWIGLU: Final = Activation(swiglu, is_gated=True)
RELU_SQUARED: Final = Activation(relu_squared, is_gated=False)


class ExpertBiases(NamedTuple):
    """What is added to both products of every expert."""

    up_EF: Tensor
    """``[E, 2 F]``, as rows of the weight; dense."""
    down_ED: Tensor


class ExpertWeights(NamedTuple):
    """Experts, both weights in one format."""

    up: ExpertsWeight
    """``[E, 2 F, D]``, the gate's rows before the up projection's; without a gate ``[E, F, D]``."""
    down: ExpertsWeight
    """``[E, D, F]``."""
    activation: Activation = SWIGLU
    held: range | None = None
    """Numbers of these experts among all that tokens may choose; others add nothing. None: these are all."""
    biases: ExpertBiases | None = None
    """None: there are none. Experts with biases have no shared one before its activation."""

    def part(self, span: slice) -> "ExpertWeights":
        """Return some of these experts, in the order of these."""
        biases = None if self.biases is None else ExpertBiases(*(bias[span] for bias in self.biases))
        return ExpertWeights(self.up[span], self.down[span], self.activation, biases=biases)


class SharedExpert(NamedTuple):
    """A shared expert before its activation, or before its first product."""

    projected_TS: Tensor | None
    """Outputs of its first projections, ``[T, 2 S]``, or without a gate ``[T, S]``; may be overwritten. None: they are
    computed with ``up``, a weight of the size and format of the other experts'."""
    down: Weight
    """``[D, S]``."""
    gate_T1: Tensor | None = None
    """A sigmoid of it multiplies the shared expert's output; None: that is added as it is."""
    term: LowRankTerm | None = None
    """What adapters add to its second product."""
    up: ExpertsWeight | None = None
    """Its first projections, without adapters; None: these are computed."""

    @property
    def num_projected(self) -> int:
        """Outputs of its first projections."""
        if self.up is not None:
            return self.up.shape[0]
        assert self.projected_TS is not None
        return self.projected_TS.shape[1]


class SharedOutput(NamedTuple):
    """Outputs of a shared expert."""

    out_TD: Tensor
    gate_T1: Tensor | None = None
    """See ``SharedExpert``."""


class MixtureProjection(NamedTuple):
    """The first projections of a shared expert and a router, as one weight."""

    weight: Weight
    sizes: tuple[int, int, int, int]
    """Rows of the shared expert, of the router, of the shared expert's gate (0 or 1), and to spare."""

    def split(self, projected_TO: Tensor, down: Weight) -> tuple[Tensor, SharedExpert]:
        """Return logits and a shared expert, given outputs."""
        shared_TS, logits_TE, gate_T1, _ = projected_TO.split(self.sizes, dim=-1)
        return logits_TE, SharedExpert(shared_TS, down, gate_T1 if self.sizes[2] else None)

    @property
    def parts(self) -> tuple[ExpertsWeight, DenseWeight] | None:
        """The shared expert's rows and all others; None: they are not separate, or the others are quantised."""
        num_shared = self.sizes[0]
        match self.weight:
            case DenseWeight(values_OI):
                return DenseWeight(values_OI[:num_shared]), DenseWeight(values_OI[num_shared:])
            case StackedWeight((shared, DenseWeight() as others)) if shared.shape[0] == num_shared:
                return shared, others
        return None


class Router(NamedTuple):
    """A router's scores of tokens, and how experts are chosen by them: arguments of ``route``."""

    logits_TE: Tensor
    """May be columns of a larger tensor."""
    bias_E: Tensor | None
    routing: Routing


@operation(triton("experts.moe_triton", takes_launches=True))
def mixture(
    x_TD: Rows, experts: ExpertWeights, router: Router, shared: SharedExpert | SharedOutput | None = None
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one after its gate, in x's dtype.

    Experts without a gate have a shared one without one. Experts in FP8 round their hidden features to the dtype of
    activations, and then quantise them like any input.

    Args:
        x_TD: quantised rows are taken if they are stored with the plain ones.

    Returns:
        A tensor, or the choices of each token, for the next operation to add up.
    """
    if isinstance(shared, SharedExpert):
        assert shared.projected_TS is not None
        hidden_TS = experts.activation.reference(shared.projected_TS)
        shared = SharedOutput(linear.reference(hidden_TS, shared.down, None, shared.term), shared.gate_T1)
    return sum_of_chosen(plain_rows(x_TD), experts, route.reference(*router), shared)


@operation(triton("experts.moe_triton", takes_launches=True))
def projected_mixture(
    x_TD: Rows | NormedRows, experts: ExpertWeights, projection: MixtureProjection, routing: Routing, down: Weight
) -> Summand:
    """Return what ``mixture`` does, given the weight of the router and of the shared expert, and its second one."""
    rows = settled(x_TD)
    logits_TE, shared = projection.split(linear.reference(rows, projection.weight), down)
    return mixture.reference(rows, experts, Router(logits_TE, None, routing), shared)


def sum_of_chosen(
    x_TD: Tensor, experts: ExpertWeights, chosen: tuple[Tensor, Tensor], shared: SharedOutput | None = None
) -> Tensor:
    """Return what ``mixture`` does, given the weights and numbers of each token's experts."""
    activate = experts.activation.reference

    def apply(expert: int, x_AD: Tensor) -> Tensor:
        up, down = (None, None) if experts.biases is None else (bias[expert] for bias in experts.biases)
        hidden_AF = activate(linear.reference(x_AD, experts.up[expert], up))
        return linear.reference(hidden_AF, experts.down[expert], down)

    out_TD = sum_of_experts(apply, experts.down.shape[0], x_TD, *chosen, experts.held)
    return out_TD if shared is None else with_shared(out_TD, shared)


def with_shared(out_TD: Tensor, shared: SharedOutput) -> Tensor:
    """Add a shared expert's output, times its gate if it has one; ``out_TD`` is overwritten."""
    gate_T1 = shared.gate_T1
    return out_TD.add_(shared.out_TD if gate_T1 is None else shared.out_TD * gate_T1.sigmoid())


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
