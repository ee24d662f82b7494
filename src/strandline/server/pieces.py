"""What a model's text is made of, piece by piece: reasoning, content, and calls of tools.

A parser takes text in pieces of any size and gives pieces back; how the text was cut changes nothing once adjacent
pieces of a kind are joined. What might be the beginning of a tag is held back until it is known.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Kind(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """A call begins; the text is the function's name."""
    ARGUMENTS = "arguments"
    """More of the call's arguments, as JSON."""


class Piece(NamedTuple):
    kind: Kind
    text: str


class PieceParser(Protocol):
    """Tells the parts of a text from one another."""

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; return what is certain now."""

    def finish(self) -> list[Piece]:
        """Return what was held back: no more text will come."""


class Cut(NamedTuple):
    """A text, cut at the first of some tags."""

    before: str
    tag: str | None
    """None: there is no tag yet, and ``after`` may be the beginning of one."""
    after: str


def cut_at(text: str, tags: Sequence[str]) -> Cut:
    """Cut a text at the tag that comes first."""
    places = [(place, -len(tag), tag) for tag in tags if (place := text.find(tag)) >= 0]
    if places:
        place, _, tag = min(places)
        return Cut(text[:place], tag, text[place + len(tag) :])
    held = max(_num_begun(text, tag) for tag in tags)
    return Cut(text[: len(text) - held], None, text[len(text) - held :])


def _num_begun(text: str, tag: str) -> int:
    """Return how many characters at a text's end are the beginning of a tag."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:count]):
            return count
    return 0


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of a kind, names of calls aside."""
    result: list[Piece] = []
    for piece in pieces:
        if result and piece.kind is result[-1].kind and piece.kind is not Kind.CALL:
            result[-1] = Piece(piece.kind, result[-1].text + piece.text)
        elif piece.text or piece.kind is Kind.CALL:
            result.append(piece)
    return result
