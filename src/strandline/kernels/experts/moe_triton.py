"""Mixtures of experts on a GPU, without sorting and without waiting for the device.

Few tokens (at most ``MAX_TOKENS_FEW``): as ``few_triton.py`` says. More: one launch lists every expert's choices
(a choice is one token's k-th expert), then ``many_triton.py`` multiplies expert by expert. The choices of a token
are left to the next operation, a norm or a sum over ranks, to be added up (``expert_choices.py``). Grids depend on
shapes alone: programs without work leave at once.

Invariants: a token's result depends on that token alone, though its last bits may differ between the two ways; no
more than ``T K`` choices are listed, and experts that no token chose are not read.

Shape suffixes: as in ``moe.py``.
"""
# mypy: ignore-errors

from collections.abc import Callable

from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand, added_up
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_few
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import Activation, ExpertWeights, SharedExpert, SharedOutput
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.linear_triton import linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import relu_squared, swiglu


def mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor | None,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype.

    The weights are dense; the other inputs may be views with dense rows. Of many tokens, choices are returned instead
    of their sum.
    """
    shared = _shared(shared_gate_up_TS, shared_gate_T1, shared_down)
    router = (logits_TE, bias_E, routing)
    return _mixture(x_TD, gate_up_EFD, down_EDF, shared, swiglu, router, held)


def mixture_invariant(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor | None,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Summand:
    """As :func:`mixture`, expert by expert however few tokens there are."""
    shared = _shared(shared_gate_up_TS, shared_gate_T1, shared_down)
    router = (logits_TE, bias_E, routing)
    return _mixture_invariant(x_TD, gate_up_EFD, down_EDF, shared, swiglu, router, held)


def mixture_relu_squared(
    x_TD: Tensor,
    shared_up_TS: Tensor | None,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`mixture`, of experts without a gate; ``shared_up_TS``, which is dense, may be overwritten."""
    shared = _shared(shared_up_TS, None, shared_down)
    router = (logits_TE, bias_E, routing)
    return added_up(_mixture(x_TD, up_EFD, down_EDF, shared, relu_squared, router, held))


def mixture_relu_squared_invariant(
    x_TD: Tensor,
    shared_up_TS: Tensor | None,
    logits_TE: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared_down: DenseWeight | None,
    routing: Routing,
    bias_E: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`mixture_relu_squared`, expert by expert however few tokens there are."""
    shared = _shared(shared_up_TS, None, shared_down)
    router = (logits_TE, bias_E, routing)
    return added_up(_mixture_invariant(x_TD, up_EFD, down_EDF, shared, relu_squared, router, held))


def _shared(projected_TS: Tensor | None, gate_T1: Tensor | None, down: DenseWeight | None) -> SharedExpert | None:
    return None if projected_TS is None or down is None else SharedExpert(projected_TS, down, gate_T1)


def _mixture(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared: SharedExpert | None,
    activate: Callable[[Tensor], Tensor],
    router: tuple[Tensor, Tensor | None, Routing],
    held: range | None,
) -> Summand:
    """Compute a mixture, choice by choice or expert by expert.

    Args:
        activate: what the shared expert does to its projections.
        router: arguments of ``route``.
    """
    (_, _, routing), weights = router, _experts(up_EFD, down_EDF, held)
    if len(x_TD) <= MAX_TOKENS_FEW:
        few = choose_few(weights, shared, len(x_TD), routing.top_k)
        if few is not None:
            return mixture_few(x_TD, weights, shared, *router, few)
    chosen = route(*router)
    added = None
    if shared is not None:
        added = SharedOutput(linear(activate(shared.projected_TS), shared.down.values_OI), shared.gate_T1)
    return _many(x_TD, up_EFD, down_EDF, chosen, added, held, Launches.MEASURED)


def _mixture_invariant(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    shared: SharedExpert | None,
    activate: Callable[[Tensor], Tensor],
    router: tuple[Tensor, Tensor | None, Routing],
    held: range | None,
) -> Summand:
    """Compute a mixture expert by expert; arguments as above."""
    chosen = route(*router)
    added = None
    if shared is not None:
        added = SharedOutput(linear_invariant(activate(shared.projected_TS), shared.down.values_OI), shared.gate_T1)
    return _many(x_TD, up_EFD, down_EDF, chosen, added, held, Launches.FIXED)


def _many(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    chosen: tuple[Tensor, Tensor],
    shared: SharedOutput | None,
    held: range | None,
    launches: Launches,
) -> ExpertChoices:
    """Compute a mixture expert by expert."""
    tiles = choose_launches(DenseWeight, x_TD.dtype, chosen[1].numel() // len(up_EFD), launches)
    return compute_choices(x_TD, _experts(up_EFD, down_EDF, held), chosen, shared, tiles)


def _experts(up_EFD: Tensor, down_EDF: Tensor, held: range | None) -> ExpertWeights:
    activation = Activation.SWIGLU if up_EFD.shape[1] == 2 * down_EDF.shape[2] else Activation.RELU_SQUARED
    return ExpertWeights(DenseWeight(up_EFD), DenseWeight(down_EDF), activation, held)


def experts(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    shared_gate_T1: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """Return what ``moe.experts_glu`` does, or ``moe.experts_relu_squared`` if there are no rows of gates.

    Weights, choices and both experts' tensors are dense; the rest may be views with dense rows.
    """
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return add_choices(_many(x_TD, up_EFD, down_EDF, (weights_TK, experts_TK), shared, held, Launches.MEASURED))


def experts_invariant(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None = None,
    shared_gate_T1: Tensor | None = None,
    held: range | None = None,
) -> Tensor:
    """As :func:`experts`, with tiles that all add in one order."""
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return add_choices(_many(x_TD, up_EFD, down_EDF, (weights_TK, experts_TK), shared, held, Launches.FIXED))
