"""Routers against their definition, token by token. Shape suffixes as in ``kernels/experts/router.py``."""

from math import exp
from typing import Any

import pytest
import torch

from strandline.kernels.experts import router
from strandline.kernels.experts.router import Routing
from tests.bound import bound

route = bound(router.route)

EPS = 1e-6


def scores_of(logits: list[float], kind: str) -> list[float]:
    if kind == "sigmoid":
        return [1 / (1 + exp(-logit)) for logit in logits]
    total = sum(exp(logit) for logit in logits)
    return [exp(logit) / total for logit in logits]


def best(ranks: dict[int, float], count: int) -> list[int]:
    """Return the keys of the largest; Python's sort keeps the order of equal ones."""
    return sorted(ranks, key=lambda key: -ranks[key])[:count]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, is_normalised=True),
        Routing(3, is_normalised=False),
        Routing(3, True, "sigmoid", EPS, 2.5),
        Routing(1, False, "sigmoid", EPS, 2.5),
        Routing(5, True, "sigmoid", EPS, 2.5, num_groups=4, top_groups=2),
        Routing(2, True, num_groups=3, top_groups=1),
        Routing(2, True, "sigmoid", num_groups=3, top_groups=3),
    ],
    ids=str,
)
def test_router_takes_the_highest_biased_scores_of_the_best_groups(routing: Routing, has_bias: bool) -> None:
    num_groups, size = routing.num_groups, 12 // routing.num_groups
    logits_TE, bias_E = torch.randn(50, 12), torch.randn(12) * 0.3 if has_bias else None
    weights_TK, experts_TK = route(logits_TE, bias_E, routing)
    for logits, weights_K, experts_K in zip(logits_TE.tolist(), weights_TK, experts_TK.tolist(), strict=True):
        scores = scores_of(logits, routing.scores)
        ranks = {i: score + (0.0 if bias_E is None else float(bias_E[i])) for i, score in enumerate(scores)}
        group_ranks = {
            group: sum(sorted(ranks[i] for i in range(group * size, (group + 1) * size))[-2:])
            for group in range(num_groups)
        }
        groups = best(group_ranks, routing.top_groups)
        chosen = best({i: rank for i, rank in ranks.items() if i // size in groups}, routing.top_k)
        total = sum(scores[i] for i in chosen) + routing.eps if routing.is_normalised else 1.0
        assert experts_K == chosen
        torch.testing.assert_close(weights_K, torch.tensor([routing.scale * scores[i] / total for i in chosen]))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_router_computes_in_float32(kind: Any) -> None:
    weights_TK, experts_TK = route(torch.randn(4, 5).bfloat16(), None, Routing(2, True, kind))
    assert (weights_TK.dtype, experts_TK.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(weights_TK.sum(-1), torch.ones(4))


def test_of_equal_experts_and_groups_the_lower_number_is_taken() -> None:
    logits_TE = torch.zeros(1, 300)
    logits_TE[0, 201:203] = 1.0
    assert route(logits_TE, None, Routing(4, True, "sigmoid"))[1].tolist() == [[201, 202, 0, 1]]
    limited = Routing(4, True, "sigmoid", num_groups=100, top_groups=2)
    assert route(logits_TE, None, limited)[1].tolist() == [[201, 202, 0, 1]]
