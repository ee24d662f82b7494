"""The Triton router equals the torch version: the same experts in the same order, and their weights.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.experts.router import Routing, route
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import router_triton
from tests.nth_expert import experts_by_warp, experts_one_by_one

ROUTINGS = [
    Routing(1, True),
    Routing(3, True),
    Routing(4, False),
    Routing(3, True, "sigmoid", 1e-20, 2.5),
    Routing(4, False, "sigmoid", 1e-6, 0.5),
    Routing(6, True, "sigmoid", 1e-20, 2.5, num_groups=5, top_groups=2),
    Routing(2, True, "sigmoid", num_groups=10, top_groups=10),
    Routing(3, True, num_groups=4, top_groups=1),
]


MAX_SWAPPED = 0.005
"""Share of tokens two of whose experts are so close that the last bit of a sigmoid decides: at most one in 200."""


def logits_of(num_tokens: int, num_experts: int, device: str) -> Tensor:
    """Return random logits, a part of the rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((num_tokens, num_experts + 5), torch.nan, device=device)
    return wide[:, 2 : 2 + num_experts].normal_()


def check_router(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> None:
    with poisoned_memory():
        weights_TK, experts_TK = router_triton.route(logits_TE, bias_E, routing)
        assert torch.equal(experts_one_by_one(logits_TE, bias_E, routing), experts_TK)
    expected_TK, expected_experts_TK = route.reference(logits_TE, bias_E, routing)
    assert (weights_TK.dtype, experts_TK.dtype) == (torch.float32, torch.int64)
    is_same_T = (experts_TK == expected_experts_TK).all(1)
    assert float((~is_same_T).float().mean()) < MAX_SWAPPED
    scores = logits_TE.float().sigmoid() if routing.scores == "sigmoid" else logits_TE.float().softmax(-1)
    rank_TE = scores if bias_E is None else scores + bias_E
    ranks, expected_ranks = (rank_TE.gather(1, chosen) for chosen in (experts_TK, expected_experts_TK))
    torch.testing.assert_close(ranks, expected_ranks, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(weights_TK[is_same_T], expected_TK[is_same_T], rtol=1e-5, atol=1e-7)


def check_choices_by_warp(logits_TE: Tensor, routing: Routing, num_warps: int) -> None:
    assert router_triton.can_choose_by_warp(logits_TE, None, routing)
    expected_TK = experts_one_by_one(logits_TE, None, routing)
    with poisoned_memory():
        assert torch.equal(experts_by_warp(logits_TE, routing, num_warps), expected_TK)


def narrow_logits(num_tokens: int, num_experts: int, device: str) -> Tensor:
    """Return logits with many equal ones, zeros of both signs among them, and a row of NaN at the end."""
    logits_TE = torch.randn(num_tokens, -(-num_experts // 8) * 8, device=device).mul_(8).round_().div_(4).bfloat16()
    logits_TE[0] = 0
    logits_TE[0, 1::2] = -0.0
    logits_TE[-1] = torch.nan
    return logits_TE[:, :num_experts]


def check_padding_rows(routing: Routing, device: str) -> None:
    """Check that rows of NaN take experts that exist, and change no other row."""
    logits_TE, bias_E = logits_of(5, 20, device), torch.randn(20, device=device)
    expected = router_triton.route(logits_TE[1:3], bias_E, routing)
    logits_TE[0], logits_TE[3:] = torch.nan, -torch.nan
    logits_TE[4] = torch.full((20,), -1, dtype=torch.int32).view(torch.float32).to(device)
    weights_TK, experts_TK = router_triton.route(logits_TE, bias_E, routing)
    assert torch.equal(weights_TK[1:3], expected[0])
    assert torch.equal(experts_TK[1:3], expected[1])
    assert all(len(set(row)) == routing.top_k and set(row) <= set(range(20)) for row in experts_TK.tolist())


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 20), (5, 40)])
def test_router_equals_the_torch_version(num_tokens: int, num_experts: int, routing: Routing, has_bias: bool) -> None:
    logits_TE, bias_E = logits_of(num_tokens, num_experts, "cpu"), torch.randn(num_experts) if has_bias else None
    check_router(logits_TE, bias_E, routing)
    # Far apart, so that no two softmax probabilities differ by rounding alone.
    check_router(torch.arange(num_experts).roll(7).expand(num_tokens, -1).bfloat16() / 4, bias_E, routing)


def test_router_takes_any_number_of_experts_and_strided_logits() -> None:
    check_router(torch.zeros(2, 1), None, Routing(1, True, "sigmoid"))
    check_router(logits_of(3, 256, "cpu"), None, Routing(8, True))
    check_router(torch.randn(30, 4).t(), None, Routing(30, True, "sigmoid"))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_of_equal_ranks_the_lower_number_comes_first(routing: Routing) -> None:
    logits_TE = torch.tensor([[0.0, -0.0, 1.0, 1.0, 0.0, -torch.inf, 20.0, 30.0, 20.0, 0.0], [0.5] * 10]).repeat(1, 2)
    check_router(logits_TE, None, routing)
    check_router(logits_TE, torch.zeros(20).index_fill(0, torch.tensor([3, 4, 17]), 0.25), routing)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_rows_of_nan_take_experts_that_exist(routing: Routing) -> None:
    check_padding_rows(routing, "cpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, about NaN
@pytest.mark.parametrize(("num_experts", "num_warps"), [(256, 4), (200, 4), (60, 2), (24, 1)])
def test_every_warp_chooses_what_one_warp_does(num_experts: int, num_warps: int) -> None:
    check_choices_by_warp(narrow_logits(4, num_experts, "cpu"), Routing(8, True), num_warps)


def test_only_narrow_aligned_logits_are_chosen_by_warp() -> None:
    logits_TE, routing = torch.zeros(2, 24, dtype=torch.bfloat16), Routing(2, True)
    assert router_triton.can_choose_by_warp(logits_TE[:, 8:], None, routing)
    for others in (
        (logits_TE.float(), None, routing),
        (logits_TE[:, 1:], None, routing),
        (logits_TE.flatten()[:30].view(2, 15), None, routing),
        (logits_TE, torch.zeros(24), routing),
        (logits_TE, None, Routing(2, True, "sigmoid")),
        (logits_TE, None, Routing(2, True, num_groups=4, top_groups=1)),
    ):
        assert not router_triton.can_choose_by_warp(*others)
