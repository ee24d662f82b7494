"""Token ids as bytes: four bytes each, big-endian.

Comparing, hashing and slicing then run at memory speed, and the order of the bytes is the order of the tokens,
so that in a sorted list the longest common prefix with a key is found next to the key's index.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Final

from strandline.ids import BLOCK_TOKENS

TOKEN_BYTES: Final = 4
BLOCK_KEY_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
VIRTUAL_BYTES: Final = bytes(range(0x80, 0x100))
"""What encoded tokens of pictures begin with (``pictures.virtual_ids``), and no others."""


def encode(tokens: Iterable[int]) -> bytes:
    """Return the tokens as big-endian bytes.

    Raises:
        OverflowError: a token is negative or needs more than 32 bits.
    """
    values = array("I", tokens)
    if sys.byteorder == "little":
        values.byteswap()
    return values.tobytes()


def decode(data: bytes | bytearray) -> list[int]:
    """Return the token ids that ``encode`` wrote."""
    values = array("I", bytes(data))
    if sys.byteorder == "little":
        values.byteswap()
    return values.tolist()


def common_tokens(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """Count the leading tokens that two keys share."""
    start, size = 0, min(len(left), len(right))
    while size - start > 4 * BLOCK_KEY_BYTES:
        middle = (start + size) // 2
        if left[start:middle] == right[start:middle]:
            start = middle
        else:
            size = middle
    difference = int.from_bytes(left[start:size], "big") ^ int.from_bytes(right[start:size], "big")
    return (size - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


def resumable_end(data: bytes | bytearray, position: int, grid_tokens: int = 1) -> int:
    """Return the last position up to ``position``, and on the grid, that is not strictly inside a picture.

    Between two pictures there is always a token of text.
    """
    position -= position % grid_tokens
    while 0 < (at := position * TOKEN_BYTES) < len(data) and data[at] in VIRTUAL_BYTES:
        start = len(data[:at:TOKEN_BYTES].rstrip(VIRTUAL_BYTES))
        if start == position:
            break
        position = start - start % grid_tokens
    return position


class TokenBuffer:
    """A growing sequence of token ids, shared by a request and its lease on the cache."""

    __slots__ = ("data",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.data = bytearray(encode(tokens))

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def append(self, token: int) -> None:
        self.data += token.to_bytes(TOKEN_BYTES, "big")

    def extend(self, tokens: Iterable[int]) -> None:
        self.data += encode(tokens)

    def slice(self, start: int, end: int) -> bytes:
        """Return the key of tokens ``[start, end)``."""
        return bytes(self.data[start * TOKEN_BYTES : end * TOKEN_BYTES])
