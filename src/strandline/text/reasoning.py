"""Parser for a model's reasoning, ``<think>…</think>``.

Models also call tools without closing their reasoning, so a tag that opens a call ends it: the special token of this
tag anywhere, text that spells it only at the beginning of a line, since reasoning may mention the tag.
"""

from collections.abc import Collection

from strandline.reasoning_config import CLOSE, OPEN
from strandline.records.reasoning_rules import ReasoningRules
from strandline.text.segments import HeldSpace, Segment, SegmentKind, content, joined, split_at_tag, split_space


class ThinkParser:
    """Splits reasoning from the content after it. White space around the reasoning is dropped.

    Args:
        is_open: the text begins inside the reasoning: the prompt or the model's training opens it.
        call_tag: tag of a tool call that ends the reasoning; empty: none does.
        is_continued: the text continues an answer, so its first white space belongs to it and no tag opens it.
    """

    def __init__(self, *, is_open: bool, call_tag: str = "", is_continued: bool = False) -> None:
        self.content_start: int | None = None
        """Characters before the content; None while the content has not begun."""
        self.is_ended_by_call = False
        self.is_inside = is_open
        self.is_opened_by_tag = False
        self.may_open = not is_continued
        """The text so far may be the beginning of the opening tag."""
        self._end_tags = (CLOSE, call_tag) if call_tag else (CLOSE,)
        self._is_start = not is_continued
        """Only white space of the text or of the current part has arrived."""
        self._is_line_start = True
        """Only spaces and tabs of the current line of reasoning have been parsed."""
        self._space = HeldSpace()
        self._text = ""
        self._num_fed = 0
        self._marks: set[int] = set()

    @classmethod
    def of(cls, rules: ReasoningRules) -> "ThinkParser":
        """Return a parser that follows a request's rules."""
        tag = rules.call_tag.text if rules.call_tag is not None else ""
        return cls(is_open=rules.is_open, call_tag=tag, is_continued=rules.is_continued)

    def feed(self, text: str, marks: Collection[int] = ()) -> list[Segment]:
        """Add text; return the segments that are certain so far.

        Args:
            marks: the characters of the text at which a special token opens a call.
        """
        self._marks.update(self._num_fed + mark for mark in marks)
        self._num_fed += len(text)
        self._text += text
        segments: list[Segment] = []
        if self.may_open and not self._take_opening():
            return segments
        if self.is_inside:
            self._take_reasoning(segments)
        if not self.is_inside:
            self._take_content(segments)
        return segments

    def finish(self) -> list[Segment]:
        held, self._text = self._space.drop() + self._text, ""
        if not held:
            return []
        return [Segment(SegmentKind.REASONING, held) if self.is_inside else content(held, self._num_fed)]

    def _take_opening(self) -> bool:
        """Consume the opening tag if the text begins with it; return whether that is decided."""
        space, self._text = split_space(self._text)
        self._space.take(space)
        if OPEN.startswith(self._text) and self._text != OPEN:
            return False
        self.may_open = False
        space = self._space.drop()
        if self._text.startswith(OPEN):
            self.is_inside = self.is_opened_by_tag = True
            self._text = self._text[len(OPEN) :]
        elif not self.is_inside:
            self._text = space + self._text  # without reasoning, leading white space is content
            self._is_start = False
        return True

    def _take_reasoning(self, segments: list[Segment]) -> None:
        if self._is_start:
            space, self._text = split_space(self._text)
            self._note_line(space)
            self._is_start = not self._text
        while self.is_inside:
            split = split_at_tag(self._text, self._end_tags)
            self._take_text(split.before, segments)
            self._text = split.after
            if split.tag is None:
                break
            start = self._num_fed - len(split.after) - len(split.tag)
            if split.tag == CLOSE:
                self.is_inside, self._is_start = False, True
            elif self._is_line_start or start in self._marks:
                self.is_inside, self._is_start, self.is_ended_by_call = False, False, True
                self._text = split.tag + split.after
            else:
                self._take_text(split.tag, segments)
        if not self.is_inside:
            self._space.drop()
            self._marks.clear()

    def _take_text(self, text: str, segments: list[Segment]) -> None:
        """Append a part of the reasoning."""
        self._note_line(text)
        kept = self._space.take(text)
        if kept:
            segments.append(Segment(SegmentKind.REASONING, kept))

    def _note_line(self, text: str) -> None:
        line_break = text.rfind("\n")
        self._is_line_start = (self._is_line_start or line_break >= 0) and not text[line_break + 1 :].strip(" \t")

    def _take_content(self, segments: list[Segment]) -> None:
        if self._is_start:
            self._text = self._text.lstrip()
            self._is_start = not self._text
        if self._text:
            if self.content_start is None:
                self.content_start = self._num_fed - len(self._text)
            segments.append(content(self._text, self._num_fed))
            self._text = ""


class StrayClose:
    """Drops the tag that closes reasoning from the content after a call that has ended the reasoning before."""

    def __init__(self) -> None:
        self._held = content("", 0)
        """Content that may be the beginning of the tag."""
        self._is_found = False
        self._is_start = True
        """No content has come since the last call."""

    def feed(self, segments: list[Segment]) -> list[Segment]:
        """Take the segments of the text after the reasoning; return those that are certain so far."""
        kept: list[Segment] = []
        for segment in segments:
            if segment.kind is SegmentKind.CONTENT:
                self._take(segment, kept)
            else:
                kept += self.finish()
                kept.append(segment)
                self._is_start = True
        return kept

    def finish(self) -> list[Segment]:
        """End the content; return what was held back."""
        held, self._held = self._held, content("", 0)
        return [held] if held.text else []

    def _take(self, segment: Segment, kept: list[Segment]) -> None:
        if self._is_found:
            self._keep(segment, kept)
            return
        segment = joined([self._held, segment])
        end = len(segment.text)
        split = split_at_tag(segment.text, (CLOSE,))
        self._keep(segment.part(0, len(split.before)), kept)
        self._held = segment.part(end - len(split.after), end)
        if split.tag is not None:
            self._is_found = True
            for after in self.finish():
                self._keep(after, kept)

    def _keep(self, segment: Segment, kept: list[Segment]) -> None:
        if self._is_found and self._is_start:
            space, _ = split_space(segment.text)
            segment = segment.part(len(space), len(segment.text))
        if segment.text:
            kept.append(segment)
            self._is_start = False
