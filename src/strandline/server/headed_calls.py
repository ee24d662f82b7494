"""Parses a section of tool calls, each with its id in tags before its arguments in JSON.

The id, such as ``functions.weather:0``, names the function. It is handed on, because the chat template writes the id
that the client sends back: another one would be another prompt.
"""

import re
from typing import Final

from strandline.server.segments import Segment, SegmentKind, split_at_tag

OPEN: Final = "<|tool_calls_section_begin|>"
CLOSE: Final = "<|tool_calls_section_end|>"
CALL: Final = "<|tool_call_begin|>"
END_CALL: Final = "<|tool_call_end|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
ID: Final = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


class HeadedCalls:
    """Parses the calls of one section. Arguments are passed on as they arrive.

    Args:
        opener: the tag that was found; a model may leave out that of the section.
    """

    def __init__(self, opener: str) -> None:
        self._has_section = opener == OPEN
        self._text = "" if self._has_section else opener
        self._raw = opener if self._has_section else ""
        """What was read since the last call."""
        self._step = self._between
        self._has_arguments = False
        self._rest: str | None = None

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._text += text
        while self._rest is None and self._step(segments):
            pass
        return self._rest

    def finish(self, segments: list[Segment]) -> None:
        if self._step == self._in_arguments:
            self._end_arguments(self._text, segments)
        elif self._step == self._in_id or self._raw or self._text.strip():
            segments.append(Segment(SegmentKind.CONTENT, self._raw + self._text))

    # States of the parser. Each returns whether the next one can run on the remaining text.

    def _between(self, segments: list[Segment]) -> bool:
        stripped = self._text.lstrip()
        nexts = (CALL, CLOSE)
        if any(tag.startswith(stripped) and stripped != tag for tag in nexts):
            return False
        if stripped.startswith(CALL):
            self._raw += self._text[: len(self._text) - len(stripped)] + CALL
            self._text, self._step = stripped[len(CALL) :], self._in_id
        elif stripped.startswith(CLOSE) and not self._raw:
            self._rest = stripped[len(CLOSE) :]
            return False
        elif self._has_section:
            self._step = self._lost
        else:
            self._rest = self._raw + self._text
            return False
        return True

    def _in_id(self, segments: list[Segment]) -> bool:
        split = split_at_tag(self._text, (ARGUMENTS, END_CALL, CLOSE))
        if split.tag is None:
            return False
        call_id = split.before.strip()
        name = function_name(call_id)
        if split.tag != ARGUMENTS or name is None:
            self._step = self._lost
            return True
        segments.append(Segment(SegmentKind.CALL, name, call_id))
        self._raw, self._text, self._step, self._has_arguments = "", split.after, self._in_arguments, False
        return True

    def _in_arguments(self, segments: list[Segment]) -> bool:
        split = split_at_tag(self._text, (END_CALL, CLOSE))
        if split.tag is not None:
            self._end_arguments(split.before, segments)
            self._text = split.after if split.tag == END_CALL else split.tag + split.after
            self._step = self._between
            return True
        kept = split.before.rstrip()
        self._take(kept, segments)
        self._text = split.before[len(kept) :] + split.after
        return False

    def _take(self, text: str, segments: list[Segment]) -> None:
        text = text if self._has_arguments else text.lstrip()
        if text:
            segments.append(Segment(SegmentKind.ARGUMENTS, text))
            self._has_arguments = True

    def _end_arguments(self, text: str, segments: list[Segment]) -> None:
        self._take(text.rstrip(), segments)
        if not self._has_arguments:
            segments.append(Segment(SegmentKind.ARGUMENTS, "{}"))

    def _lost(self, segments: list[Segment]) -> bool:
        """Pass on text that is not a call as content, up to the closing tag."""
        split = split_at_tag(self._text, (CLOSE if self._has_section else END_CALL,))
        if split.tag is not None:
            segments.append(Segment(SegmentKind.CONTENT, self._raw + split.before + split.tag))
            self._rest = split.after
        return False


def function_name(call_id: str) -> str | None:
    """Return the function that an id names; None if it is not the id of a call."""
    found = ID.fullmatch(call_id)
    return found[1] if found else None
