"""The experts in 4 bits on a GPU (``four_bit_moe.py``), organised as ``moe_triton.py``.

Few tokens: as ``few_triton.py`` says; more: as ``many_triton.py``.

Invariants: as in ``moe_triton.py``; ``_invariant`` versions multiply in one way of tiling.

Shape suffixes: as in ``moe.py``.
"""
# mypy: ignore-errors

from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_few
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import ExpertWeights, SharedExpert, SharedOutput
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.four_bit_triton import four_bit_linear, four_bit_linear_invariant
from strandline.kernels.gemm.linear_triton import linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import flat_rows


def four_bit_mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype."""
    experts = ExpertWeights(gate_up, down, held=held)
    if len(x_TD) <= MAX_TOKENS_FEW:
        shared = SharedExpert(flat_rows(shared_gate_up_TS), shared_down, shared_gate_T1)
        few = choose_few(experts, shared, len(x_TD), routing.top_k)
        return mixture_few(flat_rows(x_TD), experts, shared, logits_TE, None, routing, few)
    chosen = route(logits_TE, None, routing)
    if isinstance(shared_down, FourBitWeight):
        shared_TD = four_bit_linear(swiglu(shared_gate_up_TS), shared_down)
    else:
        shared_TD = linear(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = choose_launches(FourBitWeight, x_TD.dtype, chosen[1].numel() // down.shape[0])
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), chosen, shared, tiles)


def four_bit_mixture_invariant(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: DenseWeight | FourBitWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As :func:`four_bit_mixture`, expert by expert however few tokens there are."""
    chosen = route(logits_TE, None, routing)
    if isinstance(shared_down, FourBitWeight):
        shared_TD = four_bit_linear_invariant(swiglu(shared_gate_up_TS), shared_down)
    else:
        shared_TD = linear_invariant(swiglu(shared_gate_up_TS), shared_down.values_OI)
    tiles = choose_launches(FourBitWeight, x_TD.dtype, chosen[1].numel() // down.shape[0], Launches.FIXED)
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), chosen, shared, tiles)


def four_bit_experts_glu(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices, ``down(silu(gate x) * up x)``."""
    tiles = choose_launches(FourBitWeight, x_TD.dtype, experts_TK.numel() // down.shape[0])
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), (weights_TK, experts_TK), shared, tiles)


def four_bit_experts_glu_invariant(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """As :func:`four_bit_experts_glu`, in one way of tiling."""
    chosen = (weights_TK, experts_TK)
    tiles = choose_launches(FourBitWeight, x_TD.dtype, experts_TK.numel() // down.shape[0], Launches.FIXED)
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), chosen, shared, tiles)
