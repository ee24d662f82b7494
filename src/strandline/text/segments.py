"""Segments of a model's output: reasoning, content, tool calls and their arguments.

A parser takes text in chunks of any size and returns segments. Once adjacent segments of a kind are merged, the result
does not depend on how the text was chunked. Text that may be the beginning of a tag is held back until that is known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class SegmentKind(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """The beginning of a tool call; the text is the function's name."""
    ARGUMENTS = "arguments"
    """A part of the call's arguments, as JSON."""


Span = tuple[int, int]
"""Characters ``[start, end)`` of a text."""


@dataclass(slots=True)
class Segment:
    """A part of an output. Two are equal if their kinds, texts and ids are, wherever they were read."""

    kind: SegmentKind
    text: str
    call_id: str | None = None
    """The id that the model gave a call, if its format has one."""
    spans: tuple[Span, ...] = field(default=(), compare=False)
    """The characters of the parsed text that it was read from, in ascending order. Reasoning has none, and calls have
    some only where the parser that finds reasoning also finds calls.
    """

    def shifted(self, num_characters: int) -> "Segment":
        """Return the segment with spans that begin this many characters later."""
        if not self.spans:
            return self
        spans = tuple((start + num_characters, end + num_characters) for start, end in self.spans)
        return Segment(self.kind, self.text, self.call_id, spans)

    def part(self, start: int, end: int) -> "Segment":
        """Return characters ``[start, end)`` of content that was read from the parsed text as it is."""
        spans: list[Span] = []
        num_before = 0
        for span_start, span_end in self.spans:
            offset = span_start - num_before
            first, last = max(start, num_before), min(end, span_end - offset)
            if first < last:
                spans.append((first + offset, last + offset))
            num_before = span_end - offset
        return Segment(self.kind, self.text[start:end], self.call_id, tuple(spans))


def content(text: str, end: int) -> Segment:
    """Return content that ends at a character of the parsed text and stands there as it is."""
    return verbatim(SegmentKind.CONTENT, text, end)


def verbatim(kind: SegmentKind, text: str, end: int) -> Segment:
    """Return a segment that ends at a character of the parsed text and stands there as it is."""
    return Segment(kind, text, None, ((end - len(text), end),) if text else ())


class SegmentParser(Protocol):
    """Splits text into segments as it arrives."""

    def feed(self, text: str) -> list[Segment]:
        """Add text; return the segments that are certain so far."""

    def finish(self) -> list[Segment]:
        """End the text; return the segments that were held back."""


class TagSplit(NamedTuple):
    """A text split at the first of several tags."""

    before: str
    tag: str | None
    """None if no tag was found; ``after`` may then be the beginning of one."""
    after: str


def split_at_tag(text: str, tags: Sequence[str]) -> TagSplit:
    """Split a text at the first occurrence of a tag."""
    starts = [(start, -len(tag), tag) for tag in tags if (start := text.find(tag)) >= 0]
    if starts:
        start, _, tag = min(starts)
        return TagSplit(text[:start], tag, text[start + len(tag) :])
    held = max(_num_tag_characters(text, tag) for tag in tags)
    return TagSplit(text[: len(text) - held], None, text[len(text) - held :])


def _num_tag_characters(text: str, tag: str) -> int:
    """Return how many characters at the end of a text are the beginning of a tag."""
    start = text.find(tag[0], max(len(text) - len(tag) + 1, 0))
    while start >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start = text.find(tag[0], start + 1)
    return 0


class HeldSpace:
    """Holds back white space at the end of a text until more text follows. No character is scanned twice."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def take(self, text: str) -> str:
        """Add text; return the held white space and the text up to its trailing white space, which is held."""
        kept = text.rstrip()
        before = self.drop() if kept else ""
        self._pieces.append(text[len(kept) :])
        return before + kept

    def drop(self) -> str:
        """Return the held white space and clear it."""
        text = "".join(self._pieces)
        self._pieces = []
        return text


def split_space(text: str, characters: str | None = None) -> tuple[str, str]:
    """Split the white space, or other characters, off the beginning of a text."""
    rest = text.lstrip(characters)
    return text[: len(text) - len(rest)], rest


def joined(segments: Sequence[Segment]) -> Segment:
    """Return segments of one kind as one."""
    spans: list[Span] = []
    for segment in segments:
        for start, end in segment.spans:
            is_next = bool(spans) and spans[-1][1] == start
            spans.append((spans.pop()[0] if is_next else start, end))
    return Segment(segments[0].kind, "".join([segment.text for segment in segments]), None, tuple(spans))


def merge_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Merge adjacent segments of the same kind, except names of calls."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and segment.kind is runs[-1][0].kind and segment.kind is not SegmentKind.CALL:
            runs[-1].append(segment)
        elif segment.text or segment.kind is SegmentKind.CALL:
            runs.append([segment])
    return [run[0] if len(run) == 1 else joined(run) for run in runs]
