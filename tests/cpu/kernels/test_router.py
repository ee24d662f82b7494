"""Sigmoid routers against their definition. Shape suffixes as in ``kernels/router.py``."""

import pytest
import torch

from strandline.kernels.router import route_by_sigmoid

EPS = 1e-6


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_router_takes_the_highest_biased_scores(is_normalised: bool, has_bias: bool) -> None:
    logits_TE, bias_E = torch.randn(50, 7), torch.randn(7) if has_bias else None
    weights_TK, experts_TK = route_by_sigmoid.reference(logits_TE, bias_E, 3, EPS, 2.5, is_normalised=is_normalised)
    for logits_E, weights_K, experts_K in zip(logits_TE, weights_TK, experts_TK, strict=True):
        scores = [1 / (1 + float((-logit).exp())) for logit in logits_E]
        ranks = [score + (0.0 if bias_E is None else float(bias_E[i])) for i, score in enumerate(scores)]
        chosen = sorted(range(7), key=lambda i: -ranks[i])[:3]
        total = sum(scores[i] for i in chosen) + EPS if is_normalised else 1.0
        assert experts_K.tolist() == chosen
        torch.testing.assert_close(weights_K, torch.tensor([2.5 * scores[i] / total for i in chosen]))


def test_router_computes_in_float32() -> None:
    weights_TK, experts_TK = route_by_sigmoid.reference(
        torch.randn(4, 5).bfloat16(), None, 2, EPS, 1.0, is_normalised=True
    )
    assert (weights_TK.dtype, experts_TK.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(weights_TK.sum(-1), torch.ones(4))


def test_router_takes_experts_of_the_best_groups_alone() -> None:
    logits_TE, bias_E = torch.randn(50, 12), torch.randn(12) * 0.3
    groups = {"num_groups": 4, "top_groups": 2}
    weights_TK, experts_TK = route_by_sigmoid.reference(logits_TE, bias_E, 5, 0.0, 1.0, is_normalised=False, **groups)
    for logits_E, weights_K, experts_K in zip(logits_TE, weights_TK, experts_TK, strict=True):
        ranks = (logits_E.sigmoid() + bias_E).tolist()
        best = sorted(range(4), key=lambda group: -sum(sorted(ranks[3 * group : 3 * group + 3])[1:]))[:2]
        allowed = [expert for expert in range(12) if expert // 3 in best]
        assert experts_K.tolist() == sorted(allowed, key=lambda expert: -ranks[expert])[:5]
        torch.testing.assert_close(weights_K, logits_E.sigmoid()[experts_K])
