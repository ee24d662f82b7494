"""The experts in FP8 on a GPU (``block_scaled_moe.py``), organised as ``moe_triton.py``.

Few tokens: as ``few_triton.py`` says; more: as ``many_triton.py``. A shared expert of the same size is
one more expert of up to ``MAX_TOKENS_JOINED`` tokens.

Invariants: as in ``moe_triton.py``.

Shape suffixes: as in ``moe.py``.
"""
# mypy: ignore-errors

from collections.abc import Callable

from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.experts.few_launches import MAX_TOKENS_FEW, choose_few
from strandline.kernels.experts.few_triton import mixture_few
from strandline.kernels.experts.many_launches import choose_launches
from strandline.kernels.experts.many_triton import compute_choices
from strandline.kernels.experts.moe import ExpertWeights, SharedExpert, SharedOutput
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import route
from strandline.kernels.gemm.block_scaled_triton import block_scaled_linear, block_scaled_linear_invariant
from strandline.kernels.gemm.formats.operand_triton import can_extend
from strandline.kernels.gemm.linear_triton import linear
from strandline.kernels.gemm.matmul_triton import linear_invariant
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.rowwise.quantizing_triton import swiglu_quantized

MAX_TOKENS_JOINED = 256
"""With more tokens, a product of its own for the shared expert is faster than the programs of one expert."""


def block_scaled_mixture(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """Return the weighted sum of each token's experts, and of the shared one behind its gate, in x's dtype."""
    experts, shared = (
        ExpertWeights(gate_up, down, held=held),
        SharedExpert(shared_gate_up_TS, shared_down, shared_gate_T1),
    )
    if len(x_TD) <= MAX_TOKENS_FEW:
        few = choose_few(experts, shared, len(x_TD), routing.top_k)
        return mixture_few(x_TD, experts, shared, logits_TE, None, routing, few)
    chosen = route(logits_TE, None, routing)
    if len(x_TD) > MAX_TOKENS_JOINED or shared_gate_up_TS.stride(1) != 1 or not can_extend(down, shared_down):
        shared = _output(shared, block_scaled_linear, linear)
    tiles = choose_launches(ScaledWeight, x_TD.dtype, chosen[1].numel() // logits_TE.shape[1])
    return compute_choices(x_TD, experts, chosen, shared, tiles)


def _output(shared: SharedExpert, multiply_fp8: Callable[..., Tensor], multiply: Callable[..., Tensor]) -> SharedOutput:
    """Compute a shared expert by itself."""
    if isinstance(shared.down, ScaledWeight):
        return SharedOutput(multiply_fp8(swiglu_quantized(shared.projected_TS), shared.down), shared.gate_T1)
    return SharedOutput(multiply(swiglu(shared.projected_TS), shared.down.values_OI), shared.gate_T1)


def block_scaled_mixture_invariant(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: DenseWeight | ScaledWeight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As :func:`block_scaled_mixture`, expert by expert however few tokens there are."""
    chosen = route(logits_TE, None, routing)
    shared = SharedExpert(shared_gate_up_TS, shared_down, shared_gate_T1)
    shared = _output(shared, block_scaled_linear_invariant, linear_invariant)
    tiles = choose_launches(ScaledWeight, x_TD.dtype, chosen[1].numel() // len(down.values), Launches.FIXED)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), chosen, shared, tiles)


def block_scaled_experts_glu(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """Compute each token's choices, ``down(silu(gate x) * up x)``."""
    tiles = choose_launches(ScaledWeight, x_TD.dtype, experts_TK.numel() // len(down.values))
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), (weights_TK, experts_TK), shared, tiles)


def block_scaled_experts_glu_invariant(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> ExpertChoices:
    """As :func:`block_scaled_experts_glu`, with tiles that all add in one order."""
    tiles = choose_launches(ScaledWeight, x_TD.dtype, experts_TK.numel() // len(down.values), Launches.FIXED)
    shared = None if shared_TD is None else SharedOutput(shared_TD, shared_gate_T1)
    return compute_choices(x_TD, ExpertWeights(gate_up, down, held=held), (weights_TK, experts_TK), shared, tiles)
