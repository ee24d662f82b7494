"""Routers that score every expert by itself, with a sigmoid, in plain torch.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.1.2 (a bias that takes part in the choice alone).

Shape suffixes: T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from strandline.kernels.operation import operation


@operation()
def route_by_sigmoid(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, eps: float, scale: float, *, is_normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return each token's ``top_k`` experts as ``(weights_TK, experts_TK)``, in float32 and int64.

    Args:
        bias_E: float32; added to the scores by which experts are chosen, not to their weights.
        eps: added to the sum that normalised weights are divided by.
        scale: of the weights.
        is_normalised: whether the weights of a token add up to ``scale``; else they are scaled scores.
    """
    score_TE = logits_TE.float().sigmoid()
    rank_TE = score_TE if bias_E is None else score_TE + bias_E
    experts_TK = torch.topk(rank_TE, top_k, dim=-1).indices
    weights_TK = score_TE.gather(1, experts_TK)
    if is_normalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + eps)
    return weights_TK * scale, experts_TK
