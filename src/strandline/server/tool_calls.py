"""Parses tool calls in a model's output.

Two formats are known. ``hermes``: JSON, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.
``qwen3_coder``, of Qwen3-Coder and Qwen3.5: tags, ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…``.
The model's output is not trusted to be well-formed: text that is not a call is content.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from strandline.server.segments import Segment, SegmentKind, split_at_tag

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]
"""Maps a function to the JSON schema of its parameters."""


class Call(Protocol):
    """Parses one call, from the end of its opening tag."""

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        """Add text; return the text after the call, or None while the call continues."""

    def finish(self, segments: list[Segment]) -> None:
        """Append what is left of a call that the output ends in."""


class ToolCallParser:
    """Splits output into content and calls. White space around calls is dropped."""

    def __init__(self, openers: tuple[str, ...], make_call: Callable[[str], Call]) -> None:
        """
        Args:
            openers: tags that begin a call.
            make_call: returns a parser of the call that a tag begins.
        """
        self._openers = openers
        self._make_call = make_call
        self._call: Call | None = None
        self._has_called = False
        self._text = ""

    def feed(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        self._text += text
        while self._text:
            if self._call is None:
                if not self._take_content(segments):
                    break
            else:
                rest = self._call.feed(self._text, segments)
                self._text = rest or ""
                if rest is not None:
                    self._call = None
        return segments

    def finish(self) -> list[Segment]:
        segments: list[Segment] = []
        if self._call is not None:
            self._call.finish(segments)
        elif self._text and not (self._has_called and self._text.isspace()):
            segments.append(Segment(SegmentKind.CONTENT, self._text))
        self._text = ""
        return segments

    def _take_content(self, segments: list[Segment]) -> bool:
        """Consume content up to a call; return whether a call begins."""
        split = split_at_tag(self._text, self._openers)
        before = split.before
        if self._has_called:
            before = before.lstrip()
        kept = before.rstrip()
        if kept:
            segments.append(Segment(SegmentKind.CONTENT, kept))
            self._has_called = False
        if split.tag is None:
            self._text = before[len(kept) :] + split.after
            return False
        self._has_called = True
        self._call = self._make_call(split.tag)
        self._text = split.after
        return True


class JsonCall:
    """Parses a call written as a JSON object. Arguments are streamed once the name is known."""

    def __init__(self) -> None:
        self._text = ""
        self._raw: list[str] = []
        self._step: Callable[[str, list[Segment]], None] = self._before
        self._name: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._is_string = self._is_escaped = False
        self._is_streamed = False
        self._arguments: str | None = None
        """Complete arguments whose name is not known yet."""
        self._has_arguments = False

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        split = split_at_tag(self._text + text, (CLOSE,))
        self._text = split.after
        self._walk(split.before, segments)
        if split.tag is None:
            return None
        self._end(segments, CLOSE)
        return split.after

    def finish(self, segments: list[Segment]) -> None:
        self._walk(self._text, segments)
        self._end(segments, "")

    def _end(self, segments: list[Segment], tag: str) -> None:
        if self._name is None:
            segments.append(Segment(SegmentKind.CONTENT, OPEN + "".join(self._raw) + tag))
        elif not self._has_arguments:
            segments.append(Segment(SegmentKind.ARGUMENTS, "{}"))

    def _walk(self, text: str, segments: list[Segment]) -> None:
        self._raw.append(text)
        for character in text:
            self._step(character, segments)

    # States of the parser. Each consumes one character.

    def _before(self, character: str, segments: list[Segment]) -> None:
        if not character.isspace():
            self._step = self._at_key if character == "{" else self._lost

    def _lost(self, character: str, segments: list[Segment]) -> None:
        """Ignore text after the object, or text that is not JSON."""

    def _at_key(self, character: str, segments: list[Segment]) -> None:
        if character == '"':
            self._value, self._is_escaped = ['"'], False
            self._step = self._in_key
        elif not (character.isspace() or character == ","):
            self._step = self._lost

    def _in_key(self, character: str, segments: list[Segment]) -> None:
        self._value.append(character)
        if self._is_escaped or character != '"':
            self._is_escaped = character == "\\" and not self._is_escaped
            return
        self._key = str(_loads("".join(self._value)))
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
        is_arguments = self._key in ("arguments", "parameters") and not self._has_arguments
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
            name = _loads(text)
            if isinstance(name, str) and name:
                self._name = name
                segments.append(Segment(SegmentKind.CALL, name))
                if self._arguments is not None:
                    self._append_arguments(self._arguments, segments)
        elif self._key in ("arguments", "parameters") and not self._has_arguments:
            if self._name is None:
                self._arguments = text
            else:
                self._append_arguments(text, segments)

    def _append_arguments(self, text: str, segments: list[Segment]) -> None:
        """Append complete arguments, which some models write as a JSON string."""
        value = _loads(text) if text.startswith('"') else text
        self._has_arguments = True
        segments.append(Segment(SegmentKind.ARGUMENTS, "{}" if value in ("null", "", None) else str(value)))


class TagCall:
    """Parses a call written in tags. Strings are streamed, other values are passed on once complete.

    Args:
        opener: the tag that was found; a model may leave out the outer one.
        schemas: types of the parameters, which the tags do not contain.
    """

    def __init__(self, opener: str, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = FUNCTION if opener == FUNCTION else ""
        self._raw = opener
        self._step: Callable[[list[Segment]], bool] = self._at_function
        self._name: str | None = None
        self._key = ""
        self._num_parameters = 0
        self._value: list[str] = []
        self._is_first = True
        self._is_streamed = False
        self._rest: str | None = None

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._text += text
        while self._rest is None and self._step(segments):
            pass
        return self._rest

    def finish(self, segments: list[Segment]) -> None:
        if self._name is None:
            held = self._text if self._raw != FUNCTION else self._text[len(FUNCTION) :]
            segments.append(Segment(SegmentKind.CONTENT, self._raw + held))
        elif self._step == self._in_function:
            segments.append(Segment(SegmentKind.ARGUMENTS, "}"))

    # States of the parser. Each returns whether the next one can run on the remaining text.

    def _at_function(self, segments: list[Segment]) -> bool:
        stripped = self._text.lstrip()
        if FUNCTION.startswith(stripped) and stripped != FUNCTION:
            return False
        if not stripped.startswith(FUNCTION):
            self._step = self._lost
            return True
        name, end, rest = stripped[len(FUNCTION) :].partition(">")
        if not end:
            return False
        self._name = name.strip().strip("\"'")
        self._text, self._step = rest, self._in_function
        segments += [Segment(SegmentKind.CALL, self._name), Segment(SegmentKind.ARGUMENTS, "{")]
        return True

    def _lost(self, segments: list[Segment]) -> bool:
        """Pass on text that is not a call as content, up to the closing tag."""
        split = split_at_tag(self._text, (CLOSE,))
        if split.tag is not None:
            segments.append(Segment(SegmentKind.CONTENT, self._raw + split.before + split.tag))
            self._rest = split.after
        return False

    def _in_function(self, segments: list[Segment]) -> bool:
        split = split_at_tag(self._text, (PARAMETER, END_FUNCTION, CLOSE))
        self._text = split.after
        if split.tag is None:
            return False
        if split.tag == PARAMETER:
            self._step = self._at_parameter
            return True
        segments.append(Segment(SegmentKind.ARGUMENTS, "}"))
        if split.tag == CLOSE:
            self._rest = split.after
            return False
        self._step = self._behind
        return True

    def _at_parameter(self, segments: list[Segment]) -> bool:
        name, end, rest = self._text.partition(">")
        if not end:
            return False
        self._key = name.strip().strip("\"'")
        self._text, self._value, self._is_first = rest, [], True
        self._is_streamed = _is_text(self._schema())
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        quote = '"' if self._is_streamed else ""
        segments.append(Segment(SegmentKind.ARGUMENTS, f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {quote}"))
        self._step = self._in_value
        return True

    def _in_value(self, segments: list[Segment]) -> bool:
        if self._is_first and self._text:
            self._text, self._is_first = self._text.removeprefix("\n"), False
        split = split_at_tag(self._text, (END_PARAMETER, PARAMETER, END_FUNCTION))
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
            segments.append(Segment(SegmentKind.ARGUMENTS, _value_as_json("".join(self._value), self._schema())))
        self._text = split.after if split.tag == END_PARAMETER else split.tag + split.after
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
        stripped = self._text.lstrip()
        if CLOSE.startswith(stripped) and stripped != CLOSE:
            return False
        self._rest = stripped.removeprefix(CLOSE)
        return False

    def _schema(self) -> Any:
        properties = self._schemas.get(self._name or "", {}).get("properties")
        return properties.get(self._key) if isinstance(properties, Mapping) else None


def _is_text(schema: Any) -> bool:
    """Return whether a value must be a string. A value without a schema is one."""
    if not isinstance(schema, Mapping):
        return True
    return schema.get(
        "type", "string" if not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "enum"} else None
    ) in (
        "string",
        ["string"],
    )


def _value_as_json(text: str, schema: Any) -> str:
    """Return a value as JSON: unchanged if it is valid JSON that the schema allows, else as a string."""
    value = _loads(text.strip())
    if value is None and text.strip() != "null":
        lowered = text.strip().lower()
        if lowered in ("true", "false"):  # as Python writes them
            return lowered
        return json.dumps(text, ensure_ascii=False)
    types = schema.get("type") if isinstance(schema, Mapping) else None
    allowed = types if isinstance(types, list) else [types]
    is_only_text = (
        "string" in allowed and not isinstance(value, list | dict) and not (value is None and "null" in allowed)
    )
    if is_only_text and not (isinstance(value, bool | int | float) and set(allowed) & {"boolean", "integer", "number"}):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _loads(text: str) -> Any:
    """Parse JSON; return None if it is invalid. Infinities and NaN are invalid."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def hermes_parser(schemas: Schemas) -> ToolCallParser:
    """Return a parser of calls written in JSON."""
    return ToolCallParser((OPEN,), lambda _: JsonCall())


def qwen3_coder_parser(schemas: Schemas) -> ToolCallParser:
    """Return a parser of calls written in tags."""
    return ToolCallParser((OPEN, FUNCTION), lambda opener: TagCall(opener, schemas))


TOOL_PARSERS: Final[Mapping[str, Callable[[Schemas], ToolCallParser]]] = {
    "hermes": hermes_parser,
    "qwen3_coder": qwen3_coder_parser,
}
