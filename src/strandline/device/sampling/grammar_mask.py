"""Masks the logits of outputs that are constrained.

Shape suffixes: N rows, P the rank's part of the vocabulary, R rows with a grammar, W words of 32 bits.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strandline.device.hardware.upload import upload
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.records.constraints import TokenMatcher
from strandline.records.failures import OUTPUT_FAILED, failure_text

NOT_ALLOWED = float("-inf")
LOGGER: Final = logging.getLogger(__name__)


class GuardedMatcher:
    """A matcher whose errors end its own output: once it has raised one, it allows no token.

    Args:
        make: returns the underlying matcher.
    """

    def __init__(self, make: Callable[[], TokenMatcher]) -> None:
        self._matcher: TokenMatcher | None = None
        self.error: str | None = None
        """Why it no longer allows any token."""
        with self._guard():
            self._matcher = make()

    @property
    def num_free_tokens(self) -> int:
        """As many next tokens may be any, whatever they are."""
        return 0 if self._matcher is None else self._matcher.num_free_tokens

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
        except Exception as error:  # any exception of the library concerns only this output
            LOGGER.exception(OUTPUT_FAILED)
            self.error = failure_text(error)
            self._matcher = None


def mask_logits(
    logits_NP: Tensor, rows: Sequence[int], matchers: Sequence[TokenMatcher], ranks: Ranks = ONE_RANK
) -> None:
    """Set logits of tokens that a row's matcher forbids to minus infinity, in place.

    Where the request's own bans leave no allowed token, the matcher's allowed tokens are restored.

    Args:
        rows: the row of each matcher.
        ranks: the ranks with the logits of the rest of the vocabulary.
    """
    num_columns = logits_NP.shape[1]
    first_word, first_bit = divmod(ranks.rank * num_columns, 32)
    words_RW = np.zeros((len(rows), -(-(num_columns * ranks.size + 1) // 32)), dtype=np.int32)
    for index, matcher in enumerate(matchers):
        matcher.fill(words_RW, index)
    device = logits_NP.device
    bits = torch.arange(32, dtype=torch.int32, device=device)
    own_words = slice(first_word, first_word + -(-(first_bit + num_columns) // 32))
    mask_RW = upload(np.ascontiguousarray(words_RW[:, own_words]), device)
    own_bits = slice(first_bit, first_bit + num_columns)
    is_allowed_RP = ((mask_RW[:, :, None] >> bits) & 1).bool().flatten(1)[:, own_bits]
    rows_R = upload(np.array(rows, dtype=np.int64), device)
    masked_RP = logits_NP[rows_R].masked_fill(~is_allowed_RP, NOT_ALLOWED)
    is_left_R1 = (masked_RP != NOT_ALLOWED).any(dim=-1, keepdim=True)
    is_empty_R1 = ranks.sum(is_left_R1.long()) == 0
    logits_NP[rows_R] = masked_RP.masked_fill(is_empty_R1 & is_allowed_RP, 0.0)
