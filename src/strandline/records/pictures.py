"""Pictures in prompts: their pixels, their tokens' ids, and where rotary embeddings see them.

A picture is a run of tokens with *virtual ids*: at or above ``2**31``, where no vocabulary has any. They are drawn from
a digest of the pixels: the same picture has the same ids in every prompt and process, and two pictures differ in their
first token. Whatever names prefixes by token ids therefore works for pictures, too.

Source: Wang et al., arXiv:2409.12191, section 2.1, for positions in three dimensions.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256, shake_256
from itertools import repeat
from typing import Final, NamedTuple

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.records.tokens import TOKEN_BYTES, decode

DIGEST_BYTES: Final = 16
WITH_TOP_BIT: Final = bytes(byte | 0x80 for byte in range(256))


class Picture(NamedTuple):
    """A picture, decoded and resized as the model's configuration says."""

    digest: bytes
    """``picture_digest`` of the other fields but the last."""
    pixels: bytes
    """RGB, a byte each, row by row from the top."""
    height: int
    width: int
    original_size: tuple[int, int]
    """Width and height before it was resized, for display."""


class PictureReference(NamedTuple):
    """A picture as a request names it."""

    url: str
    detail: str = "auto"
    """``low``: in few tokens; others: as the model reads it."""


class PictureSpan(NamedTuple):
    """A picture's tokens in a prompt: row by row from the top, each from left to right."""

    start: int
    """Position of the first token."""
    rows: int
    columns: int
    digest: bytes
    """That of the picture."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


class PlacedPicture(NamedTuple):
    """A picture of a prompt."""

    span: PictureSpan
    picture: Picture


class RotaryPositions(NamedTuple):
    """Positions of tokens in three dimensions, as int32; they are equal for tokens of text."""

    time: "array[int]"
    height: "array[int]"
    width: "array[int]"


def picture_digest(pixels: bytes, height: int, width: int) -> bytes:
    """Return what names a picture."""
    return sha256(height.to_bytes(4, "big") + width.to_bytes(4, "big") + pixels).digest()[:DIGEST_BYTES]


def virtual_ids(digest: bytes, rows: int, columns: int) -> list[int]:
    """Return the ids of a picture's tokens."""
    grid = rows.to_bytes(4, "big") + columns.to_bytes(4, "big")
    drawn = bytearray(shake_256(digest + grid).digest(rows * columns * TOKEN_BYTES))
    drawn[::TOKEN_BYTES] = drawn[::TOKEN_BYTES].translate(WITH_TOP_BIT)
    return decode(drawn)


def with_virtual_ids(prompt_ids: Sequence[int], spans: Iterable[PictureSpan]) -> list[int]:
    """Return a prompt as prefixes are named by: with virtual ids instead of the model's token for pictures."""
    token_ids = list(prompt_ids)
    for span in spans:
        token_ids[span.start : span.end] = virtual_ids(span.digest, span.rows, span.columns)
    return token_ids


def place_pictures(
    token_ids: Sequence[int], pad_id: int, pictures: Sequence[Picture], side: int
) -> tuple[list[int], list[PlacedPicture]]:
    """Return a prompt with as many tokens for each picture as it has, instead of one, and where the pictures are.

    Args:
        pad_id: the token that stands for a picture, in the order of the pictures.
        side: pixels of a token's side.
    """
    found, placed, start = list[int](), list[PlacedPicture](), 0
    for picture in pictures:
        at = token_ids.index(pad_id, start)
        found += token_ids[start:at]
        rows, columns = picture.height // side, picture.width // side
        placed.append(PlacedPicture(PictureSpan(len(found), rows, columns, picture.digest), picture))
        found += [pad_id] * (rows * columns)
        start = at + 1
    return [*found, *token_ids[start:]], placed


def is_virtual(token_id: int) -> bool:
    """Whether an id is that of a picture's token."""
    return token_id >= FIRST_VIRTUAL_ID


def rotary_delta(spans: Sequence[PictureSpan]) -> int:
    """Return what is added to the position of a token that follows these pictures: 0 or a negative number."""
    return sum(max(span.rows, span.columns) - span.num_tokens for span in spans)


def rotary_positions(spans: Sequence[PictureSpan], start: int, end: int) -> RotaryPositions:
    """Return where rotary embeddings see the tokens ``[start, end)`` of a prompt with pictures.

    A picture's tokens share their position in time, and a token's position in height or width is its row or column
    from there. The text that follows a picture goes on after the largest of its positions.

    Args:
        spans: spans of the prompt, in order.
    """
    positions = RotaryPositions(array("i"), array("i"), array("i"))
    delta = 0
    for span in spans:
        if span.start >= end:
            break
        _add_text(positions, delta, start, min(end, span.start))
        if span.end > start:
            _add_picture(positions, span, delta, max(start, span.start), min(end, span.end))
        delta += rotary_delta((span,))
        start = max(start, span.end)
    _add_text(positions, delta, start, end)
    return positions


def _add_text(positions: RotaryPositions, delta: int, start: int, end: int) -> None:
    text = array("i", range(start + delta, end + delta))
    for dimension in positions:
        dimension.extend(text)


def _add_picture(positions: RotaryPositions, span: PictureSpan, delta: int, start: int, end: int) -> None:
    """Add the tokens ``[start, end)``, all of them in the picture."""
    origin, columns = span.start + delta, span.columns
    positions.time.extend(repeat(origin, end - start))
    across = array("i", range(origin, origin + columns))
    first, last = start - span.start, end - span.start
    for row in range(first // columns, -(-last // columns)):
        left, right = max(first - row * columns, 0), min(last - row * columns, columns)
        positions.height.extend(repeat(origin + row, right - left))
        positions.width.extend(across[left:right])
