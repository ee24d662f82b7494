"""The experts equal a loop over tokens and their experts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.experts import moe
from strandline.kernels.experts.moe import (
    RELU_SQUARED,
    ExpertWeights,
    Router,
    SharedExpert,
    SharedOutput,
    sum_of_chosen,
)
from strandline.kernels.experts.router import Routing, route
from strandline.kernels.gemm.weights import DenseWeight
from tests.bound import bound

mixture = bound(moe.mixture)

SOFTMAX = Routing(3, is_normalised=True)


def experts_glu(
    x_TD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    shared: SharedOutput | None = None,
    held: range | None = None,
) -> Tensor:
    experts = ExpertWeights(DenseWeight(gate_up), DenseWeight(down), held=held)
    return sum_of_chosen(x_TD, experts, (weights_TK, experts_TK), shared)


def experts_relu_squared(
    x_TD: Tensor, up: Tensor, down: Tensor, weights_TK: Tensor, experts_TK: Tensor, held: range | None = None
) -> Tensor:
    experts = ExpertWeights(DenseWeight(up), DenseWeight(down), RELU_SQUARED, held)
    return sum_of_chosen(x_TD, experts, (weights_TK, experts_TK))


def run(x_TD: Tensor, gate_up: Tensor, down: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """Run the experts with a shared one that has nothing to add."""
    nothing = SharedOutput(torch.zeros_like(x_TD), torch.zeros_like(x_TD[:, :1]))
    return experts_glu(x_TD, gate_up, down, weights_TK, experts_TK, nothing)


def oracle(x_TD: Tensor, gate_up: Tensor, down: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for row, (x, weights, experts) in enumerate(zip(x_TD.float(), weights_TK, experts_TK.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (gate_up[expert].float() @ x).chunk(2)
            out_TD[row] += weight * (down[expert].float() @ (F.silu(gate) * up))
    return out_TD


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 3), (1, 1, 1), (5, 16, 2), (70, 4, 4)])
def test_experts_equal_a_loop_over_tokens(num_tokens: int, num_experts: int, top_k: int) -> None:
    x_TD = torch.randn(num_tokens, 12)
    gate_up, down = torch.randn(num_experts, 2 * 7, 12), torch.randn(num_experts, 12, 7)
    weights, experts = route.reference(torch.randn(num_tokens, num_experts), None, Routing(top_k, is_normalised=True))
    expected = oracle(x_TD, gate_up, down, weights, experts)
    torch.testing.assert_close(run(x_TD, gate_up, down, weights, experts), expected, rtol=1e-5, atol=1e-4)


def test_the_shared_expert_is_added_behind_its_gate() -> None:
    x_TD, shared_TD, gate_T1 = torch.randn(5, 12), torch.randn(5, 12), torch.randn(5, 1)
    gate_up, down = torch.randn(4, 14, 12), torch.randn(4, 12, 7)
    weights, experts = route.reference(torch.randn(5, 4), None, SOFTMAX)
    out_TD = experts_glu(x_TD, gate_up, down, weights, experts, SharedOutput(shared_TD, gate_T1))
    expected = oracle(x_TD, gate_up, down, weights, experts) + shared_TD * gate_T1.sigmoid()
    torch.testing.assert_close(out_TD, expected, rtol=1e-5, atol=1e-4)


def test_experts_without_a_gate_equal_a_loop_over_tokens() -> None:
    x_TD, up, down = torch.randn(9, 12), torch.randn(5, 7, 12), torch.randn(5, 12, 7)
    weights, experts = route.reference(torch.randn(9, 5), None, SOFTMAX)
    expected = torch.zeros(9, 12)
    for row, (x, weights_K, experts_K) in enumerate(zip(x_TD, weights, experts.tolist(), strict=True)):
        for weight, expert in zip(weights_K, experts_K, strict=True):
            expected[row] += weight * (down[expert] @ F.relu(up[expert] @ x) ** 2)
    out_TD = experts_relu_squared(x_TD, up, down, weights, experts)
    torch.testing.assert_close(out_TD, expected, rtol=1e-5, atol=1e-4)


def test_the_experts_of_two_ranks_add_up_to_all() -> None:
    x_TD, nothing = torch.randn(9, 12), SharedOutput(torch.zeros(9, 12), torch.zeros(9, 1))
    weights, experts = route.reference(torch.randn(9, 5), None, SOFTMAX)
    gate_up, down = torch.randn(5, 14, 12), torch.randn(5, 12, 7)
    ranks = [range(2), range(2, 5)]
    parts = [(gate_up[held.start : held.stop], down[held.start : held.stop], held) for held in ranks]
    expected = experts_glu(x_TD, gate_up, down, weights, experts, nothing)
    found = sum(experts_glu(x_TD, *part, weights, experts, nothing, held) for *part, held in parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    up = gate_up[:, 7:]
    expected = experts_relu_squared(x_TD, up, down, weights, experts)
    found = sum(experts_relu_squared(x_TD, x[:, 7:], y, weights, experts, held=held) for x, y, held in parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    gate_up, down = torch.full((6, 14, 12), torch.nan), torch.full((6, 12, 7), torch.nan)
    gate_up[4], down[4] = 1.0, 1.0
    out = run(torch.randn(3, 12), gate_up, down, torch.ones(3, 1), torch.full((3, 1), 4))
    assert not bool(out.isnan().any())


def test_result_does_not_depend_on_order_of_other_tokens() -> None:
    x_TD = torch.randn(9, 12)
    gate_up, down = torch.randn(5, 14, 12), torch.randn(5, 12, 7)
    weights, experts = route.reference(torch.randn(9, 5), None, SOFTMAX)
    order = torch.randperm(9)
    out = run(x_TD, gate_up, down, weights, experts)
    shuffled = run(x_TD[order], gate_up, down, weights[order], experts[order])
    torch.testing.assert_close(shuffled, out[order], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("has_gate", [True, False])
def test_a_mixture_adds_the_shared_expert_behind_its_gate(has_gate: bool) -> None:
    x_TD, logits_TE, bias_E = torch.randn(5, 12), torch.randn(5, 4), torch.randn(4)
    gate_up, down, shared_down = torch.randn(4, 14, 12), torch.randn(4, 12, 7), torch.randn(12, 6)
    shared_gate_up, gate_T1 = torch.randn(5, 12), torch.randn(5, 1) if has_gate else None
    routing = Routing(2, True, "sigmoid", 1e-6, 2.5)
    chosen = route.reference(logits_TE, bias_E, routing)
    weights, router = ExpertWeights(DenseWeight(gate_up), DenseWeight(down)), Router(logits_TE, bias_E, routing)
    out_TD = mixture(x_TD, weights, router, SharedExpert(shared_gate_up, DenseWeight(shared_down), gate_T1))
    gate, up = shared_gate_up.chunk(2, dim=-1)
    shared_TD = (F.silu(gate) * up) @ shared_down.t() * (1.0 if gate_T1 is None else gate_T1.sigmoid())
    expected = experts_glu(x_TD, gate_up, down, *chosen) + shared_TD
    torch.testing.assert_close(out_TD, expected, rtol=1e-5, atol=1e-4)
    alone_TD = mixture(x_TD, weights, router)
    torch.testing.assert_close(alone_TD + shared_TD, expected, rtol=1e-5, atol=1e-4)


def test_a_mixture_without_gates_adds_a_shared_expert_without_one() -> None:
    x_TD, logits_TE, bias_E = torch.randn(5, 12), torch.randn(5, 4), torch.randn(4)
    up, down, shared_down, shared_up = (torch.randn(*s) for s in ((4, 7, 12), (4, 12, 7), (12, 6), (5, 6)))
    routing = Routing(2, True, "sigmoid", 1e-6, 2.5)
    chosen = route.reference(logits_TE, bias_E, routing)
    shared_TD = F.relu(shared_up) ** 2 @ shared_down.t()
    expected = experts_relu_squared(x_TD, up, down, *chosen) + shared_TD
    weights = ExpertWeights(DenseWeight(up), DenseWeight(down), RELU_SQUARED)
    router = Router(logits_TE, bias_E, routing)
    out_TD = mixture(x_TD, weights, router, SharedExpert(shared_up.clone(), DenseWeight(shared_down)))
    torch.testing.assert_close(out_TD, expected, rtol=1e-5, atol=1e-4)
    alone_TD = mixture(x_TD, weights, router)
    torch.testing.assert_close(alone_TD + shared_TD, expected, rtol=1e-5, atol=1e-4)
