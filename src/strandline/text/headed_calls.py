"""Parser for a section of tool calls, each with its id in tags before its arguments in JSON.

The id, such as ``functions.weather:0``, names the function. It is passed to the client unchanged, because the chat
template renders the id that the client sends back, and another id would change the prompt.
"""

import re
from typing import Final

from strandline.text.segments import HeldSpace, Segment, SegmentKind, content, split_at_tag, split_space

OPEN: Final = "<|tool_calls_section_begin|>"
CLOSE: Final = "<|tool_calls_section_end|>"
CALL: Final = "<|tool_call_begin|>"
END_CALL: Final = "<|tool_call_end|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
MAX_ID_CHARACTERS: Final = 256
ID: Final = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


class HeadedCalls:
    """Parses the calls of one section. A call is passed on with its first argument, and these as they arrive.

    Args:
        opener: the tag that was found; a model may leave out that of the section.
    """

    def __init__(self, opener: str) -> None:
        self._has_section = opener == OPEN
        self._text = "" if self._has_section else opener
        """Text that has not been parsed yet."""
        self._num_fed = len(opener)
        self._raw = [opener] if self._has_section else []
        """Text read since the last segment."""
        self._space = HeldSpace()
        self._step = self._between
        self._call: Segment | None = None
        """A call whose arguments have not begun."""
        self._rest: str | None = None

    def feed(self, text: str, segments: list[Segment]) -> str | None:
        self._num_fed += len(text)
        self._text += text
        while self._rest is None and self._step(segments):
            pass
        return self._rest

    def finish(self, segments: list[Segment]) -> None:
        if self._step == self._in_arguments and self._call is None:
            if self._text.strip():
                segments.append(Segment(SegmentKind.ARGUMENTS, self._space.drop() + self._text))
            return
        text = "".join(self._raw) + self._space.drop() + self._text
        if text.strip():
            segments.append(content(text, self._num_fed))

    # States of the parser. Each returns whether the next one can run on the remaining text.

    def _between(self, segments: list[Segment]) -> bool:
        space, self._text = split_space(self._text)
        self._raw.append(space)
        if any(tag.startswith(self._text) and self._text != tag for tag in (CALL, CLOSE)):
            return False
        if self._text.startswith(CALL):
            self._raw.append(CALL)
            self._text, self._step = self._text[len(CALL) :], self._in_id
            return True
        raw = "".join(self._raw)
        if self._text.startswith(CLOSE) and not raw.strip():
            self._rest = self._text[len(CLOSE) :]
        elif self._has_section:
            self._step = self._lost
        else:
            self._rest = raw + self._text
        return self._rest is None

    def _in_id(self, segments: list[Segment]) -> bool:
        split = split_at_tag(self._text, (ARGUMENTS, END_CALL, CLOSE))
        if split.tag is None and len(split.before) <= MAX_ID_CHARACTERS:
            return False
        call_id = split.before.strip()
        name = function_name(call_id) if len(split.before) <= MAX_ID_CHARACTERS else None
        if split.tag != ARGUMENTS or name is None:
            self._step = self._lost
            return True
        self._raw.append(split.before + split.tag)
        self._call = Segment(SegmentKind.CALL, name, call_id)
        self._text, self._step = split.after, self._in_arguments
        return True

    def _in_arguments(self, segments: list[Segment]) -> bool:
        split = split_at_tag(self._text, (END_CALL, CLOSE))
        self._take(self._space.take(split.before), segments)
        self._text = split.after
        if split.tag is None:
            return False
        if self._call is not None:
            self._take("{}", segments)
        self._space.drop()
        self._text = split.after if split.tag == END_CALL else split.tag + split.after
        self._step = self._between
        return True

    def _take(self, text: str, segments: list[Segment]) -> None:
        """Pass on a part of the arguments, after the call if it is the first."""
        if text and self._call is not None:
            segments.append(self._call)
            self._call, self._raw, text = None, [], text.lstrip()
        if text:
            segments.append(Segment(SegmentKind.ARGUMENTS, text))

    def _lost(self, segments: list[Segment]) -> bool:
        """Pass on text that is not a call as content, up to the closing tag."""
        split = split_at_tag("".join(self._raw) + self._text, (CLOSE if self._has_section else END_CALL,))
        segments.append(content(split.before + (split.tag or ""), self._num_fed - len(split.after)))
        self._raw, self._text = [], split.after
        self._rest = split.after if split.tag else None
        return False


def function_name(call_id: str) -> str | None:
    """Return the function that an id names; None if it is not the id of a call."""
    found = ID.fullmatch(call_id) if len(call_id) <= MAX_ID_CHARACTERS else None
    return found[1] if found else None
