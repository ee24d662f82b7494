"""Excerpts of prompts, for display."""

from typing import Final, NamedTuple

from strandline.records.tokens import TOKEN_BYTES, decode

EXCERPT_TOKENS: Final = 24
BEFORE_TOKENS: Final = 16


class Excerpt(NamedTuple):
    """Consecutive tokens, for display."""

    before: tuple[int, ...] = ()
    """The tokens before it, at most ``BEFORE_TOKENS``: they may contain the beginning of its first word."""
    tokens: tuple[int, ...] = ()
    """At most ``EXCERPT_TOKENS``."""


def excerpt(data: bytes | bytearray, start: int) -> Excerpt:
    """Return the excerpt of encoded tokens that begins at the token ``start``."""
    before = decode(data[max(start - BEFORE_TOKENS, 0) * TOKEN_BYTES : start * TOKEN_BYTES])
    tokens = decode(data[start * TOKEN_BYTES : (start + EXCERPT_TOKENS) * TOKEN_BYTES])
    return Excerpt(tuple(before), tuple(tokens))
