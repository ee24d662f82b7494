"""Parser for a model's reasoning, ``<think>…</think>``."""

from typing import Final

from strandline.text.segments import HeldSpace, Segment, SegmentKind, split_at_tag, split_space

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
        """Only white space of the text or of the current part has arrived."""
        self._may_open = True
        self._space = HeldSpace()
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
        held, self._text = self._space.drop() + self._text, ""
        return [Segment(SegmentKind.REASONING if self._is_inside else SegmentKind.CONTENT, held)] if held else []

    def _take_opening(self) -> bool:
        """Consume the opening tag if the text begins with it; return whether that is decided."""
        space, self._text = split_space(self._text)
        self._space.take(space)
        if OPEN.startswith(self._text) and self._text != OPEN:
            return False
        self._may_open = False
        space = self._space.drop()
        if self._text.startswith(OPEN):
            self._is_inside = True
            self._text = self._text[len(OPEN) :]
        elif not self._is_inside:
            self._text = space + self._text  # without reasoning, leading white space is content
            self._is_start = False
        return True

    def _take_reasoning(self, segments: list[Segment]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        split = split_at_tag(self._text, (CLOSE,))
        kept = self._space.take(split.before)
        if kept:
            segments.append(Segment(SegmentKind.REASONING, kept))
        self._text = split.after
        if split.tag is not None:
            self._space.drop()
            self._is_inside, self._is_start = False, True

    def _take_content(self, segments: list[Segment]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        if self._text:
            segments.append(Segment(SegmentKind.CONTENT, self._text))
            self._text = ""
