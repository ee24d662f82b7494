"""The bytes that each token stands for.

A token may be a part of a character, whose text alone would be U+FFFD. The bytes of an output's tokens, joined, are the
bytes of its text.
"""

import json
import re
from functools import cache
from typing import Any, Final

from tokenizers import pre_tokenizers

SPACE: Final = "\u2581"
"""Stands for a space in tokens of sentencepiece's kind."""
RESTORED_SPACE: Final = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
"""A decoder that does inside of a text what ``Metaspace`` does."""
OF_SENTENCEPIECE: Final = frozenset({"Metaspace", "ByteFallback", "Fuse", "Strip"})
"""Decoders of sentencepiece's kind. ``Strip`` acts at the beginning of a text only."""
BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of sentencepiece's kind for a single byte."""


class TokenBytes(dict[int, bytes | None]):
    """The bytes of a tokenizer's tokens as they appear inside of a text, found on first use; None: they are not known.

    None are known if the tokenizer is not one of the ``tokenizers`` library, or decodes in an unknown way.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {token: str(added) for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._kinds = _decoder_kinds(tokenizer)

    def __missing__(self, token: int) -> bytes | None:
        found = self[token] = self._find(token)
        return found

    def _find(self, token: int) -> bytes | None:
        if token in self._added:
            return self._added[token].encode()
        word: str | None = self._tokenizer.convert_ids_to_tokens(token) if self._kinds else None
        if word is None:
            return None
        if "ByteLevel" in self._kinds:
            values = _byte_values()
            found = [values.get(character) for character in word]
            return None if None in found else bytes(value for value in found if value is not None)
        match = BYTE.fullmatch(word) if "ByteFallback" in self._kinds else None
        if match:
            return bytes([int(match[1], 16)])
        return (word.replace(SPACE, " ") if "Metaspace" in self._kinds else word).encode()


def _decoder_kinds(tokenizer: Any) -> frozenset[str]:
    """Return the kinds of a tokenizer's decoders, if this module knows all of them; else none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = frozenset("Metaspace" if part == RESTORED_SPACE else part["type"] for part in parts)
    return kinds if kinds == {"ByteLevel"} or kinds <= OF_SENTENCEPIECE else frozenset()


@cache
def _byte_values() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for.

    Printable bytes stand for themselves; the others, in their order, are written as the characters from U+0100 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(character) for character in alphabet if ord(character) < 256}
    others = [value for value in range(256) if value not in own]
    shifted = [character for character in alphabet if ord(character) >= 256]
    return {chr(value): value for value in own} | dict(zip(shifted, others, strict=True))
