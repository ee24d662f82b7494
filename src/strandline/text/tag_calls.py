"""Parser for tool calls in tags: one for the function, one for each parameter. The tags contain no types."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from strandline.text.json_calls import parse_json
from strandline.text.parameter_sets import parameter_types
from strandline.text.python_calls import parse_literal
from strandline.text.segments import Segment, SegmentKind, content, split_at_tag, split_space
from strandline.text.tool_calls import Schemas

MAX_NAME_CHARACTERS: Final = 256
"""Maximum length of the name of a function or parameter, with the end of its tag."""
NULLS: Final = ("null", "None")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format. ``function`` and ``parameter`` are followed by a name and ``>``."""

    open: str
    close: str
    function: str
    end_function: str
    parameter: str
    end_parameter: str
    quote: str = ""
    """Text that templates write around names."""
    around_value: str = "\n"
    """Text that templates write around values."""


class TagCalls:
    """Parses the calls between two tags. Strings are streamed, other values are emitted once complete.

    A call is emitted with its first parameter, or when it ends without one. Text between parameters follows the call
    as content.

    Args:
        opener: the tag that was found; a model may leave out the outer one.
        schemas: types of the parameters.
    """

    def __init__(self, tags: Tags, opener: str, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        self._has_outer = opener != tags.function
        self._raw = [opener] if self._has_outer else []
        """Text of a possible call, which becomes content if it turns out not to be one."""
        self._text = "" if self._has_outer else opener
        """Text that has not been parsed yet."""
        self._num_fed = len(opener)
        self._step: Callable[[list[Segment]], bool] = self._at_function
        self._name = ""
        self._key = ""
        self._num_parameters = 0
        self._stray: list[Segment] = []
        """Text between parameters."""
        self._value: list[str] = []
        self._is_first = True
        self._is_streamed = False
        self._rest: str | None = None

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._num_fed += len(text)
        self._text += text
        while self._rest is None and self._step(segments):
            pass
        return self._rest

    def finish(self, segments: list[Segment]) -> None:
        is_call = self._num_parameters > 0
        if is_call and self._step == self._in_value:
            self._take(self._text, segments)
            if not self._is_streamed:
                segments.append(Segment(SegmentKind.ARGUMENTS, "".join(self._value)))
            self._text = ""
        elif is_call and self._step == self._in_function and not self._text:
            segments.append(Segment(SegmentKind.ARGUMENTS, "}"))
        tag = self._tags.parameter if self._step == self._at_parameter else ""
        self._emit_stray(tag + self._text, self._num_fed, segments)

    # States of the parser. Each returns whether the next one can run on the remaining text.

    def _at_function(self, segments: list[Segment]) -> bool:
        tag = self._tags.function
        space, stripped = split_space(self._text)
        self._raw.append(space)
        self._text = stripped
        if tag.startswith(stripped) and stripped != tag:
            return False
        split = split_name(stripped[len(tag) :]) if stripped.startswith(tag) else (None, "")
        if split is None:
            return False
        name, rest = split
        if name is None:
            self._step = self._lost
            return True
        self._name, self._text = name, rest
        self._raw.append(stripped[: len(stripped) - len(self._text)])
        self._step, self._num_parameters = self._in_function, 0
        return True

    def _lost(self, segments: list[Segment]) -> bool:
        """Emit text that is not a call as content: up to the closing tag, or only the tag that opened the call."""
        text = "".join([*self._raw, *(segment.text for segment in self._stray)]) + self._text
        self._raw, self._stray = [], []
        if not self._has_outer:
            before, tag, self._rest = text.partition(self._tags.function)
            segments.append(content(before + tag, self._num_fed - len(self._rest)))
            return False
        split = split_at_tag(text, (self._tags.close,))
        self._text = split.after
        segments.append(content(split.before + (split.tag or ""), self._num_fed - len(split.after)))
        self._rest = split.after if split.tag else None
        return False

    def _in_function(self, segments: list[Segment]) -> bool:
        tags = self._tags
        split = split_at_tag(self._text, (tags.parameter, tags.end_function, tags.close, tags.function))
        if split.before:
            self._stray.append(content(split.before, self._num_fed - len(self._text) + len(split.before)))
        self._text = split.after
        if split.tag is None:
            return False
        if split.tag == tags.parameter:
            self._step = self._at_parameter
            return True
        if not self._num_parameters:
            if any(not segment.text.isspace() for segment in self._stray):
                self._text, self._step = split.tag + split.after, self._lost
                return True
            self._begin(segments)
        segments.append(Segment(SegmentKind.ARGUMENTS, "}"))
        self._emit_stray("", 0, segments)
        self._step = self._behind if split.tag == tags.end_function else self._at_function
        if split.tag == tags.function:
            self._text = split.tag + split.after
        elif split.tag == tags.close:
            self._rest = split.after
        return self._rest is None

    def _at_parameter(self, segments: list[Segment]) -> bool:
        split = split_name(self._text)
        if split is None:
            return False
        name, rest = split
        if name is None:
            self._stray.append(content(self._tags.parameter, self._num_fed - len(self._text)))
            self._step = self._in_function
            return True
        self._key, self._text = name, rest
        self._value, self._is_first = [], True
        self._is_streamed = is_text(self._types())
        if not self._num_parameters:
            self._begin(segments)
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        quote = '"' if self._is_streamed else ""
        segments.append(Segment(SegmentKind.ARGUMENTS, f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {quote}"))
        self._step = self._in_value
        return True

    def _begin(self, segments: list[Segment]) -> None:
        self._raw = []
        segments += [Segment(SegmentKind.CALL, self._name), Segment(SegmentKind.ARGUMENTS, "{")]

    def _in_value(self, segments: list[Segment]) -> bool:
        tags = self._tags
        if self._is_first and self._text:
            self._text, self._is_first = self._text.removeprefix("\n"), False
        split = split_at_tag(self._text, (tags.end_parameter, tags.parameter, tags.end_function))
        if split.tag is None:
            # The newline before a closing tag is not part of the value.
            kept = split.before.removesuffix("\n")
            self._take(kept, segments)
            self._text = split.before[len(kept) :] + split.after
            return False
        self._take(split.before.removesuffix("\n"), segments)
        if self._is_streamed:
            segments.append(Segment(SegmentKind.ARGUMENTS, '"'))
        else:
            types = self._types() or frozenset()
            segments.append(Segment(SegmentKind.ARGUMENTS, value_as_json("".join(self._value), types)))
        self._text = split.after if split.tag == tags.end_parameter else split.tag + split.after
        self._step = self._in_function
        return True

    def _take(self, text: str, segments: list[Segment]) -> None:
        if not text:
            return
        if self._is_streamed:
            segments.append(Segment(SegmentKind.ARGUMENTS, json.dumps(text, ensure_ascii=False)[1:-1]))
        else:
            self._value.append(text)

    def _behind(self, segments: list[Segment]) -> bool:
        """Look for another function or the closing tag; without either, the calls have ended."""
        self._text = self._text.lstrip()
        nexts = (self._tags.close, self._tags.function)
        if any(tag.startswith(self._text) and self._text != tag for tag in nexts):
            return False
        if self._text.startswith(self._tags.function):
            self._step = self._at_function
            return True
        self._rest = self._text.removeprefix(self._tags.close)
        return False

    def _emit_stray(self, text: str, end: int, segments: list[Segment]) -> None:
        """Emit the text of a possible call, that between parameters, and a text after both, unless all is space.

        Args:
            end: the character after the last text.
        """
        raw = "".join(self._raw)
        num_after = len(text) + sum(len(segment.text) for segment in self._stray)
        found = [content(raw, end - num_after), *self._stray, content(text, end)]
        if any(not segment.text.isspace() for segment in found if segment.text):
            segments += found
        self._stray = []

    def _types(self) -> frozenset[str] | None:
        return parameter_types(self._schemas.get(self._name, {}), self._key)


def split_name(text: str) -> tuple[str | None, str] | None:
    """Return a name and what follows its tag, given the text after ``function`` or ``parameter``.

    The name is None if the text does not begin with one; the result is None if that is not known yet.
    """
    name, end, rest = text[:MAX_NAME_CHARACTERS].partition(">")
    is_name = "<" not in name and (bool(end) or len(text) < MAX_NAME_CHARACTERS)
    name = name.strip().strip("\"'")
    if not is_name or "\n" in name:
        return None, text
    return (name, rest + text[MAX_NAME_CHARACTERS:]) if end else None


def is_text(types: frozenset[str] | None) -> bool:
    """Return whether a value of these types is a string. One without a type is."""
    return types is None or types == {"string"}


def value_as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: what it says as one of the types, else a string.

    Python's spellings are understood, because templates write earlier values in them.
    """
    value = _parsed(text)
    is_null = value is None and text.strip() in NULLS
    if "string" in types and not (_is_of(value, types) or (is_null and "null" in types)):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text if value is None and not is_null else value, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """Return what a text says in JSON or Python; None if it is neither."""
    text = text.strip()
    if (value := parse_json(text)) is not None:
        return value
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.startswith(("[", "{", "(")):
        return None
    try:
        value = parse_literal(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return value


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of the types other than string and null."""
    match value:
        case bool():
            return "boolean" in types
        case int() | float():
            return bool(types & {"integer", "number"})
        case list():
            return "array" in types
        case dict():
            return "object" in types
    return False
