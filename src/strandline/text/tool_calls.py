"""Splitting of a model's output into content and tool calls, independent of the format of the calls.

The model's output is not trusted to be well-formed: text that is not a call is content.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from strandline.text.segments import HeldSpace, Segment, content, split_at_tag, split_space

Schemas = Mapping[str, Mapping[str, Any]]
"""Maps a function to the JSON schema of its parameters."""


class Calls(Protocol):
    """Parses the calls after one opening tag. The spans of its segments count from the tag."""

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        """Add text; return the text after the calls, or None while they continue."""

    def finish(self, segments: list[Segment]) -> None:
        """End the output; append the rest of unfinished calls."""


class ToolCallParser:
    """Splits output into content and calls. White space around calls is dropped."""

    def __init__(self, openers: tuple[str, ...], make_calls: Callable[[str], Calls], bare: str = "") -> None:
        """
        Args:
            openers: tags that begin calls.
            make_calls: returns a parser of the calls that a tag begins, or, for no tag, the text itself.
            bare: how calls without a tag, at the beginning of the output, start; empty: there are none.
        """
        self._openers = openers
        self._bare = bare
        self._make_calls = make_calls
        self._calls: Calls | None = None
        self._has_called = False
        self._space = HeldSpace()
        self._text = ""
        self._num_fed = 0
        self._calls_start = 0
        """The character at which the latest calls begin."""

    def skip(self, num_characters: int) -> None:
        """Count characters before the text in the spans of its segments."""
        self._num_fed += num_characters

    def feed(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        self._num_fed += len(text)
        self._text += text
        while self._text:
            if self._calls is None:
                if not self._take_content(segments):
                    break
            else:
                found: list[Segment] = []
                rest = self._calls.feed(self._text, found)
                segments += [segment.shifted(self._calls_start) for segment in found]
                self._text = rest or ""
                if rest is not None:
                    self._calls = None
        return segments

    def finish(self) -> list[Segment]:
        segments: list[Segment] = []
        if self._calls is not None:
            self._calls.finish(segments)
            segments = [segment.shifted(self._calls_start) for segment in segments]
        else:
            segments.append(content(self._space.drop() + self._text, self._num_fed))
        self._text = ""
        return segments

    def _take_content(self, segments: list[Segment]) -> bool:
        """Consume content up to a call; return whether a call begins."""
        if self._bare:
            space, self._text = split_space(self._text)
            self._space.take(space)
            if not self._text:
                return False
            is_call, self._bare = self._text.startswith(self._bare), ""
            if is_call:
                self._begin("")
                return True
        split = split_at_tag(self._text, self._openers)
        kept = self._space.take(split.before.lstrip() if self._has_called else split.before)
        if kept:
            end = self._num_fed - len(self._text) + len(split.before.rstrip())
            segments.append(content(kept, end))
            self._has_called = False
        self._text = split.after
        if split.tag is None:
            return False
        self._begin(split.tag)
        return True

    def _begin(self, tag: str) -> None:
        self._space.drop()
        self._has_called = True
        self._calls_start = self._num_fed - len(self._text) - len(tag)
        self._calls = self._make_calls(tag)
