"""Mixtures of experts on a GPU, without sorting and without waiting for the device.

Few tokens (at most ``MAX_TOKENS_FEW``): as ``few_triton.py`` says. More: one launch lists every expert's choices (a
choice is one token's k-th expert), then ``many_triton.py`` multiplies expert by expert. The choices of a token are
left to the next operation, a norm or a sum over ranks, to be added up (``expert_choices.py``). A shared expert of the
others' size and format is one more expert of up to ``MAX_TOKENS_JOINED`` tokens. Grids depend on shapes alone: programs
without work leave at once.

Invariants: a token's result depends on that token alone, though its last bits may differ between the two ways; no
more than ``T K`` choices are listed, and experts that no token chose are not read. Fixed launches multiply expert by
expert however few tokens there are, and add in one order.

Shape suffixes: as in ``moe.py``.
"""
# mypy: ignore-errors

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_few
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import (
    Activation,
    ExpertWeights,
    Router,
    SharedExpert,
    SharedOutput,
    with_shared,
)
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.formats.operand_triton import FORMATS, can_extend
from strandline.kernels.gemm.gemms_triton import linear
from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import relu_squared, swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, flat_rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import swiglu_quantized

MAX_TOKENS_JOINED = 256
"""With more tokens, a product of its own for the shared expert is faster than the programs of one expert."""


def mixture(
    x_TD: Rows,
    experts: ExpertWeights,
    router: Router,
    shared: SharedExpert | SharedOutput | None = None,
    *,
    launches: Launches = Launches.MEASURED,
) -> Summand:
    """Triton version of :func:`strandline.kernels.experts.moe.mixture`.

    Weights are dense; the other inputs may be views with dense rows. Of many tokens, choices are returned instead of
    their sum.
    """
    x_TD = flat_rows(x_TD if FORMATS[type(experts.up)].multiplies_fp8 else plain_rows(x_TD))
    if launches is Launches.MEASURED and len(x_TD) <= MAX_TOKENS_FEW:
        hidden = shared if isinstance(shared, SharedExpert) else None
        pair = choose_few(experts, hidden, len(x_TD), router.routing.top_k)
        if pair is not None:
            out_TD = mixture_few(x_TD, experts, hidden, *router, pair)
            return with_shared(out_TD, shared) if isinstance(shared, SharedOutput) else out_TD
    chosen = route(*router)
    if isinstance(shared, SharedExpert) and (launches is Launches.FIXED or not can_join(experts, shared)):
        shared = _output(shared, experts.activation, launches)
    choices_per_expert = chosen[1].numel() // router.logits_TE.shape[1]
    is_gated = experts.activation.is_gated
    tiles = choose_launches(type(experts.up), x_TD.dtype, choices_per_expert, launches, is_gated=is_gated)
    return compute_choices(x_TD, experts, chosen, shared, tiles)


def can_join(experts: ExpertWeights, shared: SharedExpert) -> bool:
    """Return whether a shared expert is best computed as one more expert."""
    projected_TS = shared.projected_TS
    return (
        len(projected_TS) <= MAX_TOKENS_JOINED
        and projected_TS.stride(1) == 1
        and shared.term is None
        and can_extend(experts.down, shared.down)
    )


def _output(shared: SharedExpert, activation: Activation, launches: Launches) -> SharedOutput:
    """Compute a shared expert by itself."""
    if not activation.is_gated:
        hidden = relu_squared(shared.projected_TS.contiguous())
    elif isinstance(shared.down, ScaledWeight) and shared.term is None:
        hidden = swiglu_quantized(shared.projected_TS, activation.limit)
    else:
        hidden = swiglu(shared.projected_TS, activation.limit)
    return SharedOutput(linear(hidden, shared.down, None, shared.term, launches=launches), shared.gate_T1)
