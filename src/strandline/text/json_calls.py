"""Parser for tool calls written as JSON objects between two tags (one, a list, or one per line) or without tags.

A call is emitted when its arguments begin, and the arguments as they arrive. Text that is not JSON remains content,
together with everything after it up to the closing tag.
"""

import json
from collections.abc import Callable, Container
from math import isfinite
from typing import Any, Final

from strandline.text.segments import Segment, SegmentKind, content, split_at_tag

ARGUMENTS: Final = ("arguments", "parameters")
"""Keys that models use for a call's arguments."""
KNOWN: Final = ("name", "id", "type", *ARGUMENTS)
"""Keys of a call. If it has no arguments, they may have been lost under another key."""
SEPARATORS: Final = "[], \t\r\n"
"""Characters allowed between calls."""
BARE_SEPARATORS: Final = "; \t\r\n"
"""Characters allowed between calls without tags."""


class JsonCalls:
    """Parses the calls between two tags, or without a closing one.

    Args:
        opener: the tag that was found; empty if calls need none.
        close: the closing tag, ignored inside strings. None: the calls end at the first text that is not a call.
        names: functions that may be called; None: any.
    """

    def __init__(self, opener: str, close: str | None, names: Container[str] | None = None) -> None:
        self._opener = opener
        self._close = close
        self._names = names
        self._separators = SEPARATORS if close else BARE_SEPARATORS
        self._raw = [opener]
        """Text read since the last segment."""
        self._held = ""
        """Text that may be the beginning of the closing tag."""
        self._num_fed = len(opener)
        self._object: JsonCall | None = None
        self._is_lost = False

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._num_fed += len(text)
        text, self._held = self._held + text, ""
        if self._is_lost:
            return self._pass_on(text, segments)
        for index, character in enumerate(text):
            if self._close and character == self._close[0] and not (self._object and self._object.is_in_string):
                rest = text[index : index + len(self._close)]
                if rest == self._close:
                    after = text[index + len(rest) :]
                    self._end(self._close, len(after), segments)
                    return after
                if self._close.startswith(rest):
                    self._held = rest
                    return None
            if self._object is None and character not in "{" + self._separators:
                self._is_lost = True
                return self._pass_on(text[index:], segments)
            if not self._take(character, segments):
                return self._pass_on(text[index + 1 :], segments)
        return None

    def finish(self, segments: list[Segment]) -> None:
        self._raw.append(self._held)
        self._end("", 0, segments)

    def _end(self, tag: str, num_after: int, segments: list[Segment]) -> None:
        """Emit the text read since the last segment, unless it is only separators.

        Args:
            tag: follows the text.
            num_after: characters that follow the tag.
        """
        text = "".join(self._raw)
        if text.strip(self._separators):
            segments.append(content(text + tag, self._num_fed - num_after))

    def _take(self, character: str, segments: list[Segment]) -> bool:
        """Consume one character; return whether it may be part of calls."""
        self._raw.append(character)
        if self._object is None:
            self._object = JsonCall(self._names) if character == "{" else None
            return True
        num_segments = len(segments)
        self._object.take(character, segments)
        self._is_lost = self._object.is_lost or (self._object.is_complete and not self._object.has_arguments)
        if len(segments) > num_segments or (self._object.is_complete and not self._is_lost):
            self._raw.clear()
        if self._object.is_complete:
            self._object = None
        return not self._is_lost

    def _pass_on(self, text: str, segments: list[Segment]) -> str | None:
        """Emit text that is not a call as content, up to the closing tag."""
        raw = "".join(self._raw)
        self._raw.clear()
        if self._close is None:
            opener = self._opener if raw.startswith(self._opener) else ""
            rest = raw[len(opener) :] + text
            segments.append(content(opener, self._num_fed - len(rest)))
            return rest
        split = split_at_tag(raw + text, (self._close,))
        segments.append(content(split.before + (split.tag or ""), self._num_fed - len(split.after)))
        self._held = "" if split.tag else split.after
        return split.after if split.tag else None


class JsonCall:
    """Parses one object, starting after its opening brace.

    Args:
        names: functions that may be called; None: any.
    """

    def __init__(self, names: Container[str] | None) -> None:
        self._names = names
        self.is_complete = False
        """Whether its closing brace has been read."""
        self.is_lost = False
        """Whether it is not JSON."""
        self.is_in_string = False
        self.has_arguments = False
        """Whether it is a call whose arguments have begun."""
        self._step: Callable[[str, list[Segment]], None] = self._at_key
        self._name: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._is_escaped = False
        self._is_streamed = False
        self._has_unknown_keys = False
        self._arguments: str | None = None
        """Complete arguments whose name is not known yet."""

    def take(self, character: str, segments: list[Segment]) -> None:
        """Consume one character."""
        self._step(character, segments)

    # States of the parser. Each consumes one character.

    def _at_key(self, character: str, segments: list[Segment]) -> None:
        if character == '"':
            self._value, self._step, self.is_in_string = ['"'], self._in_key, True
        elif character == "}":
            self.is_complete = True
            if self._name is not None and not self.has_arguments and not self._has_unknown_keys:
                self._begin(segments, "{}")
        else:
            self.is_lost = not (character.isspace() or character == ",")

    def _in_key(self, character: str, segments: list[Segment]) -> None:
        self._value.append(character)
        self._take_in_string(character)
        if not self.is_in_string:
            self._key = str(parse_json("".join(self._value)))
            self._has_unknown_keys |= self._key not in KNOWN
            self._step = self._at_colon

    def _at_colon(self, character: str, segments: list[Segment]) -> None:
        if character == ":":
            self._step = self._at_value
        else:
            self.is_lost = not character.isspace()

    def _at_value(self, character: str, segments: list[Segment]) -> None:
        if character.isspace():
            return
        self._value, self._depth = [], 0
        is_arguments = self._key in ARGUMENTS and not self.has_arguments
        self._is_streamed = is_arguments and character == "{" and self._name is not None
        if self._is_streamed:
            self._begin(segments)
        self._step = self._in_value
        self._in_value(character, segments)

    def _in_value(self, character: str, segments: list[Segment]) -> None:
        if not self.is_in_string and self._depth == 0 and (character in ",}" or character.isspace()):
            self._take_value(segments)  # a number or a word ends before this character
            if not self.is_lost:
                self._step(character, segments)
            return
        if self._is_streamed:
            segments.append(Segment(SegmentKind.ARGUMENTS, character))
        else:
            self._value.append(character)
        if self.is_in_string:
            self._take_in_string(character)
            if self.is_in_string:
                return
        elif character == '"':
            self.is_in_string = True
            return
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        else:  # neither is JSON; continuing could read all following text once for each call that begins in it
            self.is_lost = character in "\\<" and not self._is_streamed
            return
        if self._depth <= 0:
            self._take_value(segments)

    def _take_in_string(self, character: str) -> None:
        self.is_in_string = self._is_escaped or character != '"'
        self._is_escaped = character == "\\" and not self._is_escaped

    def _take_value(self, segments: list[Segment]) -> None:
        """Consume a complete value."""
        self._step = self._at_key
        if self._is_streamed:
            self._is_streamed = False
            return
        text = "".join(self._value)
        value = parse_json(text)
        self.is_lost = value is None and text != "null"
        if self._key in ARGUMENTS and self._arguments is None and not self.is_lost:
            text = value if isinstance(value, str) else text  # some models write arguments as a JSON string
            self._arguments = "{}" if text in ("null", "") else text
        elif self._key == "name" and self._name is None and isinstance(value, str):
            self._name = value or None
            self.is_lost = self._names is not None and value not in self._names
        if self._name is not None and self._arguments is not None and not (self.has_arguments or self.is_lost):
            self._begin(segments, self._arguments)

    def _begin(self, segments: list[Segment], arguments: str = "") -> None:
        """Emit the call, with its arguments so far."""
        self.has_arguments = True
        segments += [Segment(SegmentKind.CALL, self._name or ""), Segment(SegmentKind.ARGUMENTS, arguments)]


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
