"""Masks the logits of structured outputs.

Shape suffixes: N rows, V vocabulary, R rows with a grammar, W words of 32 bits.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strandline.device.upload import upload
from strandline.records.failures import OUTPUT_FAILED, failure_text
from strandline.records.grammars import TokenMatcher

NOT_ALLOWED = float("-inf")
LOGGER: Final = logging.getLogger(__name__)


class GuardedMatcher:
    """A matcher whose errors end its own output: once it has raised one, it allows no token.

    Args:
        make: returns the matcher behind it.
    """

    def __init__(self, make: Callable[[], TokenMatcher]) -> None:
        self._matcher: TokenMatcher | None = None
        self.error: str | None = None
        """Why it allows no token any more."""
        with self._guard():
            self._matcher = make()

    def append(self, token: int) -> None:
        """Advance by the sampled token."""
        if self._matcher is not None:
            with self._guard():
                self._matcher.append(token)

    def fill(self, words: NDArray[np.int32], row: int) -> None:
        """Set the bits of the tokens allowed next in ``words[row]``, 32 tokens a word; clear all others."""
        if self._matcher is not None:
            with self._guard():
                self._matcher.fill(words, row)
        if self._matcher is None:
            words[row] = 0

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the library raises concerns this output alone
            LOGGER.exception(OUTPUT_FAILED)
            self.error = failure_text(error)
            self._matcher = None


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
