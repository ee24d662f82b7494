"""Routers that score every expert by itself, with a sigmoid, in plain torch.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.1.2 (a bias that takes part in the choice alone, and
groups of experts).

Shape suffixes: T tokens, E experts, K experts per token, G groups of experts.
"""

from math import inf

import torch
from torch import Tensor

from strandline.kernels.operation import operation


@operation()
def route_by_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    eps: float,
    scale: float,
    *,
    is_normalised: bool,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return each token's ``top_k`` experts as ``(weights_TK, experts_TK)``, in float32 and int64.

    Args:
        bias_E: float32; added to the scores by which experts are chosen, not to their weights.
        eps: added to the sum that normalised weights are divided by.
        scale: of the weights.
        is_normalised: whether the weights of a token add up to ``scale``; else they are scaled scores.
        num_groups: of experts, all of one size.
        top_groups: how many of them a token's experts are taken from: those whose two best experts add up to most.
    """
    score_TE = logits_TE.float().sigmoid()
    rank_TE = score_TE if bias_E is None else score_TE + bias_E
    if top_groups < num_groups:
        rank_TE = _within_best_groups(rank_TE, num_groups, top_groups)
    experts_TK = torch.topk(rank_TE, top_k, dim=-1).indices
    weights_TK = score_TE.gather(1, experts_TK)
    if is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + eps)
    return weights_TK * scale, experts_TK


def _within_best_groups(rank_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Return the ranks with those outside of each token's best groups at minus infinity."""
    rank_TGE = rank_TE.unflatten(-1, (num_groups, -1))
    best_TG = rank_TGE.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    is_left_out_TG1 = torch.ones_like(rank_TGE[..., 0], dtype=torch.bool).scatter_(1, best_TG, False).unsqueeze(-1)
    kept_TGE: Tensor = rank_TGE.masked_fill(is_left_out_TG1, -inf)
    return kept_TGE.flatten(1)
