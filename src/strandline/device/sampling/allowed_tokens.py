"""Outputs that are limited to some tokens of the vocabulary (``allowed_token_ids``).

Shape suffixes: P the rank's part of the vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strandline.device.hardware.upload import upload
from strandline.records.constraints import TokenMatcher
from strandline.records.plan import NewRequest


def forbidden_mask(new: NewRequest, columns: range, device: torch.device) -> Tensor | None:
    """Return which tokens of a rank's part a request forbids, as a mask [P]; None: it has no list of allowed ones."""
    if new.params.allowed_token_ids is None:
        return None
    held_ids = [token - columns.start for token in new.params.allowed_token_ids if token in columns]
    mask_P = torch.ones(len(columns), dtype=torch.bool, device=device)
    return mask_P.index_fill_(0, upload(np.array(held_ids, dtype=np.int64), device), 0)


class AllowedMatcher:
    """A matcher that allows the listed tokens alone, and those that end the output where its grammar is complete.

    Args:
        matcher: the grammar's.
    """

    def __init__(self, matcher: TokenMatcher, new: NewRequest) -> None:
        self._matcher = matcher
        self._ids = np.array(sorted({*(new.params.allowed_token_ids or ()), *new.stop_ids}), dtype=np.int64)

    @property
    def num_free_tokens(self) -> int:
        return self._matcher.num_free_tokens

    def append(self, token: int) -> None:
        self._matcher.append(token)

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        self._matcher.fill(words, row)
        ids = self._ids[self._ids < 32 * words.shape[1]]
        allowed = np.zeros(words.shape[1], dtype=np.uint32)
        np.bitwise_or.at(allowed, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        words[row] &= allowed.view(np.int32)
