"""Masks the logits of structured outputs.

Shape suffixes: N rows, V vocabulary, R rows with a grammar, W words of 32 bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.device.upload import upload
from strandline.records.grammars import TokenMatcher

NOT_ALLOWED = float("-inf")


def mask_logits(logits_NV: Tensor, rows: Sequence[int], matchers: Sequence[TokenMatcher]) -> None:
    """Set logits of tokens that a row's matcher forbids to minus infinity, in place.

    Where the request's own bans leave no allowed token, the matcher's allowed tokens are restored.

    Args:
        rows: the row of each matcher.
    """
    vocab_size = logits_NV.shape[1]
    words_RW = np.zeros((len(rows), -(-(vocab_size + 1) // 32)), dtype=np.int32)
    for index, matcher in enumerate(matchers):
        matcher.fill(words_RW, index)
    device = logits_NV.device
    bits = torch.arange(32, dtype=torch.int32, device=device)
    mask_RW = upload(words_RW, device)
    is_allowed_RV = ((mask_RW[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
    rows_R = upload(np.array(rows, dtype=np.int64), device)
    masked_RV = logits_NV[rows_R].masked_fill(~is_allowed_RV, NOT_ALLOWED)
    is_empty_R1 = (masked_RV == NOT_ALLOWED).all(dim=-1, keepdim=True)
    logits_NV[rows_R] = masked_RV.masked_fill(is_empty_R1 & is_allowed_RV, 0.0)
