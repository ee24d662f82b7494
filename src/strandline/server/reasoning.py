"""Parses a model's reasoning, ``<think>…</think>``."""

from typing import Final

from strandline.server.segments import Segment, SegmentKind, split_at_tag

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ThinkParser:
    """Splits reasoning from the content after it. White space around the reasoning is dropped.

    Args:
        is_open: the text begins inside the reasoning: the prompt or the model's training opens it.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_inside = is_open
        self._is_start = True
        """Only white space has arrived of the text or of the current part."""
        self._may_open = True
        self._text = ""

    def feed(self, text: str) -> list[Segment]:
        self._text += text
        segments: list[Segment] = []
        if self._may_open and not self._take_opening():
            return segments
        if self._is_inside:
            self._take_reasoning(segments)
        if not self._is_inside:
            self._take_content(segments)
        return segments

    def finish(self) -> list[Segment]:
        held, self._text = self._text, ""
        return [Segment(SegmentKind.REASONING if self._is_inside else SegmentKind.CONTENT, held)] if held else []

    def _take_opening(self) -> bool:
        """Consume the opening tag if the text begins with it; return whether that is decided."""
        stripped = self._text.lstrip()
        if OPEN.startswith(stripped) and stripped != OPEN:
            return False
        self._may_open = False
        if stripped.startswith(OPEN):
            self._is_inside = True
            self._text = stripped[len(OPEN) :]
        elif not self._is_inside:
            self._is_start = False  # without reasoning, leading white space is content
        return True

    def _take_reasoning(self, segments: list[Segment]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        split = split_at_tag(self._text, (CLOSE,))
        kept = split.before.rstrip()
        if kept:
            segments.append(Segment(SegmentKind.REASONING, kept))
        if split.tag is None:
            self._text = split.before[len(kept) :] + split.after
        else:
            self._is_inside, self._is_start, self._text = False, True, split.after

    def _take_content(self, segments: list[Segment]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        if self._text:
            segments.append(Segment(SegmentKind.CONTENT, self._text))
            self._text = ""
