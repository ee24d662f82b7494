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

import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_few
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches, pays_to_dequantize
from strandline.kernels.experts.many_triton import compute_choices, compute_dequantized
from strandline.kernels.experts.moe import (
    Activation,
    ExpertWeights,
    MixtureProjection,
    Router,
    SharedExpert,
    SharedOutput,
    with_shared,
)
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.operand_triton import can_extend, can_extend_rows
from strandline.kernels.gemm.gemms_triton import linear
from strandline.kernels.gemm.launches import ROUTER
from strandline.kernels.gemm.rows_triton import launch_rows
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, Weight
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import relu_squared, swiglu
from strandline.kernels.rowwise.normed_rows import NormedRows, settled
from strandline.kernels.rowwise.quantized_rows import Rows, flat_rows, plain_rows
from strandline.kernels.rowwise.quantizing_triton import swiglu_quantized

MAX_TOKENS_JOINED = 256
"""With more tokens, a product of its own for the shared expert is faster than the programs of one expert."""

MAX_TILES_JOINED = 16
"""With more tiles of tokens it is faster, too: a program of the shared expert computes them one after the other."""


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
    x_TD = flat_rows(x_TD if experts.up.format.multiplies_fp8 else plain_rows(x_TD))
    if launches is Launches.MEASURED and len(x_TD) <= MAX_TOKENS_FEW:
        hidden = shared if isinstance(shared, SharedExpert) else None
        pair = choose_few(experts, hidden, len(x_TD), router.routing.top_k)
        if pair is not None:
            out_TD = mixture_few(x_TD, experts, hidden, *router, pair)
            return with_shared(out_TD, shared) if isinstance(shared, SharedOutput) else out_TD
    chosen = route(*router)
    choices_per_expert = chosen[1].numel() // router.logits_TE.shape[1]
    is_dequantized = pays_to_dequantize(experts.up.format, choices_per_expert, launches)
    multiplied, is_gated = DENSE if is_dequantized else experts.up.format, experts.activation.is_gated
    tiles = choose_launches(multiplied, x_TD.dtype, choices_per_expert, launches, is_gated=is_gated)
    is_apart = launches is Launches.FIXED or is_dequantized
    if isinstance(shared, SharedExpert) and (is_apart or not can_join(experts, shared, tiles[1])):
        shared = _output(shared, experts.activation, launches)
    compute = compute_dequantized if is_dequantized else compute_choices
    return compute(x_TD, experts, chosen, shared, tiles)


def projected_mixture(
    x_TD: Rows | NormedRows,
    experts: ExpertWeights,
    projection: MixtureProjection,
    routing: Routing,
    down: Weight,
    *,
    launches: Launches = Launches.MEASURED,
) -> Summand:
    """Triton version of :func:`strandline.kernels.experts.moe.projected_mixture`.

    Of a few tokens, the router's product normalises them, and a shared expert of the others' size and format is
    projected with those: its weights do not wait for the router.
    """
    parts = projection.parts
    if launches is Launches.MEASURED and 0 < len(x_TD) <= MAX_TOKENS_FEW and parts is not None:
        shared = SharedExpert(None, down, None, None, parts[0])
        pair = choose_few(experts, shared, len(x_TD), routing.top_k)
        if pair is not None and can_extend_rows(experts.up, parts[0]):
            rows, router_TO = score_few(x_TD, parts[1])
            rows = flat_rows(rows if experts.up.format.multiplies_fp8 else plain_rows(rows))
            logits_TE, gate_T1, _ = router_TO.split(projection.sizes[1:], dim=-1)
            shared = shared._replace(gate_T1=gate_T1 if projection.sizes[2] else None)
            return mixture_few(rows, experts, shared, logits_TE, None, routing, pair)
    rows = settled(x_TD)
    logits_TE, shared = projection.split(linear(rows, projection.weight, launches=launches), down)
    return mixture(rows, experts, Router(logits_TE, None, routing), shared, launches=launches)


def score_few(x_TD: Rows | NormedRows, weight: DenseWeight) -> tuple[Rows, Tensor]:
    """Return a few rows after their norm, and their products with a router's weight."""
    rows = x_TD.rows if isinstance(x_TD, NormedRows) else x_TD
    out_TO = torch.empty((len(rows), weight.shape[0]), dtype=rows.dtype, device=rows.device)
    launch_rows(out_TO, x_TD if isinstance(x_TD, NormedRows) else plain_rows(x_TD), weight, None, ROUTER)
    return rows, out_TO


def can_join(experts: ExpertWeights, shared: SharedExpert, down: Launch) -> bool:
    """Return whether a shared expert is best computed as one more expert, whose second product has this launch."""
    projected_TS = shared.projected_TS
    return (
        len(projected_TS) <= min(MAX_TOKENS_JOINED, MAX_TILES_JOINED * down.block_m)
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
