"""Parses tool calls written as JSON objects between two tags: one, a list, or one a line.

The name ends the waiting: from then on arguments are passed on as they arrive.
"""

import json
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from strandline.server.segments import Segment, SegmentKind, split_at_tag

ARGUMENTS: Final = ("arguments", "parameters")
"""Keys under which models write a call's arguments."""


class JsonCalls:
    """Parses the calls between two tags.

    Args:
        opener: the tag that was found.
        close: the tag that ends them.
    """

    def __init__(self, opener: str, close: str) -> None:
        self._close = close
        self._held = ""
        self._raw: list[str] | None = [opener]
        """What was read so far; None once it holds a call."""
        self._object: JsonCall | None = None
        self._is_lost = False

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        split = split_at_tag(self._held + text, (self._close,))
        self._held = split.after
        self._walk(split.before, segments)
        if split.tag is None:
            return None
        self._end(segments, split.tag)
        return split.after

    def finish(self, segments: list[Segment]) -> None:
        self._walk(self._held, segments)
        self._end(segments, "")

    def _end(self, segments: list[Segment], tag: str) -> None:
        if self._object is not None:
            self._object.end(segments)
        if self._raw is not None:
            segments.append(Segment(SegmentKind.CONTENT, "".join(self._raw) + tag))

    def _walk(self, text: str, segments: list[Segment]) -> None:
        if self._raw is not None:
            self._raw.append(text)
        for character in text:
            if self._object is not None:
                self._object.take(character, segments)
                if self._object.has_name:
                    self._raw = None
                if self._object.is_complete:
                    self._object = None
            elif self._is_lost:
                break
            elif character == "{":
                self._object = JsonCall()
            else:  # what follows text that is neither a call nor between calls is ignored
                self._is_lost = not (character.isspace() or character in ",[]")


class JsonCall:
    """Parses one object, from behind its opening brace."""

    def __init__(self) -> None:
        self.is_complete = False
        """Whether its closing brace has been read."""
        self._step: Callable[[str, list[Segment]], None] = self._at_key
        self._name: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._is_string = self._is_escaped = False
        self._is_streamed = False
        self._arguments: str | None = None
        """Complete arguments whose name is not known yet."""
        self._has_arguments = False

    @property
    def has_name(self) -> bool:
        """Whether it is known to be a call."""
        return self._name is not None

    def take(self, character: str, segments: list[Segment]) -> None:
        """Consume one character."""
        self._step(character, segments)

    def end(self, segments: list[Segment]) -> None:
        """Append what is left of a call that was cut off, or is complete."""
        if self._name is not None and not self._has_arguments:
            segments.append(Segment(SegmentKind.ARGUMENTS, "{}"))

    # States of the parser. Each consumes one character.

    def _lost(self, character: str, segments: list[Segment]) -> None:
        """Ignore text that is not JSON."""

    def _at_key(self, character: str, segments: list[Segment]) -> None:
        if character == '"':
            self._value, self._is_escaped = ['"'], False
            self._step = self._in_key
        elif character == "}":
            self.is_complete = True
            self.end(segments)
        elif not (character.isspace() or character == ","):
            self._step = self._lost

    def _in_key(self, character: str, segments: list[Segment]) -> None:
        self._value.append(character)
        if self._is_escaped or character != '"':
            self._is_escaped = character == "\\" and not self._is_escaped
            return
        self._key = str(parse_json("".join(self._value)))
        self._step = self._at_colon

    def _at_colon(self, character: str, segments: list[Segment]) -> None:
        if character == ":":
            self._step = self._at_value
        elif not character.isspace():
            self._step = self._lost

    def _at_value(self, character: str, segments: list[Segment]) -> None:
        if character.isspace():
            return
        self._value, self._depth, self._is_string, self._is_escaped = [], 0, False, False
        is_arguments = self._key in ARGUMENTS and not self._has_arguments
        self._is_streamed = is_arguments and character == "{" and self._name is not None
        self._has_arguments |= self._is_streamed
        self._step = self._in_value
        self._in_value(character, segments)

    def _in_value(self, character: str, segments: list[Segment]) -> None:
        if not self._is_string and self._depth == 0 and self._value and (character in ",}" or character.isspace()):
            self._take_value(segments)  # a number or a word ends before this character
            self._step(character, segments)
            return
        self._value.append(character)
        if self._is_streamed:
            segments.append(Segment(SegmentKind.ARGUMENTS, character))
        if self._is_string:
            if self._is_escaped or character != '"':
                self._is_escaped = character == "\\" and not self._is_escaped
                return
            self._is_string = False
        elif character == '"':
            self._is_string = True
            return
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        else:
            return
        if self._depth == 0:
            self._take_value(segments)

    def _take_value(self, segments: list[Segment]) -> None:
        self._step = self._at_key
        text = "".join(self._value)
        if self._key == "name" and self._name is None:
            name = parse_json(text)
            if isinstance(name, str) and name:
                self._name = name
                segments.append(Segment(SegmentKind.CALL, name))
                if self._arguments is not None:
                    self._append_arguments(self._arguments, segments)
        elif self._key in ARGUMENTS and not self._has_arguments:
            if self._name is None:
                self._arguments = text
            else:
                self._append_arguments(text, segments)

    def _append_arguments(self, text: str, segments: list[Segment]) -> None:
        """Append complete arguments, which some models write as a JSON string."""
        value = parse_json(text) if text.startswith('"') else text
        self._has_arguments = True
        segments.append(Segment(SegmentKind.ARGUMENTS, "{}" if value in ("null", "", None) else str(value)))


def parse_json(text: str) -> Any:
    """Parse JSON; return None if it is invalid, as are numbers too large for a float and halves of surrogate pairs."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _finite(text: str) -> float:
    """Return a number. Raises ValueError if it is infinite or NaN."""
    if not isfinite(value := float(text)):
        raise ValueError(text)
    return value
