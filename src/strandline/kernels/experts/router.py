"""Routers of mixtures of experts, in plain torch: which experts a token takes, and with which weights.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.1.2 (scores by a sigmoid, a bias that takes part in the
choice alone, and groups of experts).

Shape suffixes: T tokens, E experts, K experts per token, G groups of experts, X experts or groups.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from strandline.kernels.operation import operation, triton


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted. Experts come in groups of one size, numbered one group after the other."""

    top_k: int
    is_normalised: bool
    """Whether the weights of a token add up to ``scale``; else they are scaled scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the logits, in float32: over all experts, or of each by itself."""
    eps: float = 0.0
    """Added to the sum that normalised weights are divided by."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    top_groups: int = 1
    """How many of them a token's experts are taken from: those whose two best experts add up to most."""

    @property
    def is_limited(self) -> bool:
        """Whether a token's experts are taken from some groups alone."""
        return self.top_groups < self.num_groups


@operation(triton("experts.router_triton"))
def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts as ``(weights_TK, experts_TK)``, in float32 and int64.

    The best expert comes first, and of equal ones (as of equal groups) the one with the lower number.

    Args:
        bias_E: float32; added to the scores by which groups and experts are chosen, not to the weights.
    """
    score_TE = logits_TE.float().sigmoid() if routing.scores == "sigmoid" else logits_TE.float().softmax(-1)
    rank_TE = score_TE if bias_E is None else score_TE + bias_E
    if routing.is_limited:
        rank_TE = _within_best_groups(rank_TE, routing)
    experts_TK = _best(rank_TE, routing.top_k)
    weights_TK = score_TE.gather(1, experts_TK)
    if routing.is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + routing.eps)
    return weights_TK * routing.scale, experts_TK


def _within_best_groups(rank_TE: Tensor, routing: Routing) -> Tensor:
    """Return the ranks with those outside of each token's best groups at minus infinity."""
    rank_TGE = rank_TE.unflatten(-1, (routing.num_groups, -1))
    best_TG = _best(rank_TGE.topk(2, dim=-1).values.sum(-1), routing.top_groups)
    is_left_out_TG1 = torch.ones_like(rank_TGE[..., 0], dtype=torch.bool).scatter_(1, best_TG, False).unsqueeze(-1)
    kept_TGE: Tensor = rank_TGE.masked_fill(is_left_out_TG1, -inf)
    return kept_TGE.flatten(1)


def _best(rank_TX: Tensor, count: int) -> Tensor:
    """Return where the largest are; ``torch.topk`` says nothing about the order of equal ones."""
    return rank_TX.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()
