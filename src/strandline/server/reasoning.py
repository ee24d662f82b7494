"""Telling a model's reasoning, ``<think>…</think>``, from its answer."""

from typing import Final

from strandline.server.pieces import Kind, Piece, cut_at

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ThinkParser:
    """Reasoning comes first, if at all; the white space around it belongs to nobody.

    Args:
        is_open: the text begins inside the reasoning, since the prompt opened it or the model never does.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_inside = is_open
        self._is_start = True
        """Nothing but white space came yet, of the text or of the part that it is in."""
        self._may_open = True
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        if self._may_open and not self._take_opening():
            return pieces
        if self._is_inside:
            self._take_reasoning(pieces)
        if not self._is_inside:
            self._take_content(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._text = self._text, ""
        return [Piece(Kind.REASONING if self._is_inside else Kind.CONTENT, held)] if held else []

    def _take_opening(self) -> bool:
        """Find out whether the text begins with the opening tag; return whether that is known."""
        stripped = self._text.lstrip()
        if OPEN.startswith(stripped) and stripped != OPEN:
            return False
        self._may_open = False
        if stripped.startswith(OPEN):
            self._is_inside = True
            self._text = stripped[len(OPEN) :]
        elif not self._is_inside:
            self._is_start = False  # white space before an answer without reasoning is the answer's own
        return True

    def _take_reasoning(self, pieces: list[Piece]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        cut = cut_at(self._text, (CLOSE,))
        kept = cut.before.rstrip()
        if kept:
            pieces.append(Piece(Kind.REASONING, kept))
        if cut.tag is None:
            self._text = cut.before[len(kept) :] + cut.after
        else:
            self._is_inside, self._is_start, self._text = False, True, cut.after

    def _take_content(self, pieces: list[Piece]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        if self._text:
            pieces.append(Piece(Kind.CONTENT, self._text))
            self._text = ""
