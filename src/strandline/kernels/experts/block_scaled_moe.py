"""Mixture of experts in FP8: as ``moe.py``, with products as in ``block_scaled.py``. The reference implementation.

An expert's hidden features are rounded to the dtype of activations, and then quantised like any input.

Shape suffixes: as in ``moe.py``.
"""

from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import sum_of_experts, with_shared
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.block_scaled import block_scaled_gated_linear, block_scaled_linear
from strandline.kernels.gemm.linear import reference_linear
from strandline.kernels.gemm.weights import ScaledWeight, Weight
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, plain_rows


@operation(triton("experts.block_scaled_moe_triton", invariant="experts.block_scaled_moe_triton"))
def block_scaled_mixture(
    x_TD: Rows,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    shared_down: Weight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As ``mixture``, with experts in FP8: ``gate_up`` of ``[E, 2 F, D]``, ``down`` of ``[E, D, F]``.

    Quantised tokens are taken if the plain ones are kept beside them.
    """
    chosen = route.reference(logits_TE, None, routing)
    shared_TD = reference_linear(shared_down)(swiglu.reference(shared_gate_up_TS))
    return block_scaled_experts_glu.reference(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, held)


@operation(triton("experts.block_scaled_moe_triton", invariant="experts.block_scaled_moe_triton"))
def block_scaled_experts_glu(
    x_TD: Rows,
    gate_up: ScaledWeight,
    down: ScaledWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> Summand:
    """As ``experts_glu``, with experts in FP8."""

    # An expert quantises its tokens' rows once more: that gives the same numbers.
    def apply(expert: int, x_AD: Tensor) -> Tensor:
        hidden_AF = block_scaled_gated_linear.reference(x_AD, gate_up[expert])
        return block_scaled_linear.reference(hidden_AF, down[expert])

    out_TD = sum_of_experts(apply, len(down.values), plain_rows(x_TD), weights_TK, experts_TK, held)
    return with_shared(out_TD, shared_TD, shared_gate_T1)
