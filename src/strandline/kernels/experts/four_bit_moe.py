"""Mixture of experts in 4 bits: as ``moe.py``, with products as in ``four_bit.py``. The reference implementation.

Shape suffixes: as in ``moe.py``.
"""

from torch import Tensor

from strandline.kernels.expert_choices import Summand
from strandline.kernels.experts.moe import sum_of_experts, with_shared
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.four_bit import four_bit_gated_linear, four_bit_linear
from strandline.kernels.gemm.linear import reference_linear
from strandline.kernels.gemm.weights import FourBitWeight, Weight
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.activation import swiglu


@operation(triton("experts.four_bit_moe_triton", invariant="experts.four_bit_moe_triton"))
def four_bit_mixture(
    x_TD: Tensor,
    shared_gate_up_TS: Tensor,
    logits_TE: Tensor,
    shared_gate_T1: Tensor | None,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    shared_down: Weight,
    routing: Routing,
    held: range | None = None,
) -> Summand:
    """As ``mixture``, with experts in 4 bits: ``gate_up`` of ``[E, 2 F, D]``, ``down`` of ``[E, D, F]``."""
    chosen = route.reference(logits_TE, None, routing)
    shared_TD = reference_linear(shared_down)(swiglu.reference(shared_gate_up_TS))
    return four_bit_experts_glu.reference(x_TD, gate_up, down, *chosen, shared_TD, shared_gate_T1, held)


@operation(triton("experts.four_bit_moe_triton", invariant="experts.four_bit_moe_triton"))
def four_bit_experts_glu(
    x_TD: Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared_TD: Tensor | None,
    shared_gate_T1: Tensor | None,
    held: range | None = None,
) -> Summand:
    """As ``experts_glu``, with experts in 4 bits."""

    def apply(expert: int, x_AD: Tensor) -> Tensor:
        return four_bit_linear.reference(four_bit_gated_linear.reference(x_AD, gate_up[expert]), down[expert])

    out_TD = sum_of_experts(apply, down.shape[0], x_TD, weights_TK, experts_TK, held)
    return with_shared(out_TD, shared_TD, shared_gate_T1)
