"""Parsing of answers that consist of messages in channels: reasoning, content and tool calls, each with a header.

An answer is ``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``; a
header may name a recipient, ``<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{…}<|call|>``,
also before the channel: ``<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{…}<|call|>``.

Source: OpenAI, "OpenAI Harmony Response Format".
"""

import re
from collections.abc import Collection
from typing import Final

from strandline.text.segments import Segment, SegmentKind, split_at_tag, verbatim

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL: Final = "<|call|>"
ENDS: Final = ("<|end|>", CALL, "<|return|>")
TAGS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
TAG: Final = re.compile("|".join(map(re.escape, TAGS)))

MAX_HEADER_CHARACTERS: Final = 512
NAME: Final = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
FUNCTION: Final = re.compile(r"\bto=functions\.([^\s<]+)")
RECIPIENT: Final = re.compile(r"\bto=\S")
TO: Final = " to="
"""What an answer begins with that names a recipient before the channel: the prompt has begun the header."""


class ChannelParser:
    """Splits an answer into reasoning, content and calls.

    Text before any header is content, unless it names a recipient.

    Args:
        takes_calls: messages to functions are calls; else they are content, as a function's name and arguments.
    """

    is_ended_by_call = False

    def __init__(self, *, takes_calls: bool) -> None:
        self._takes_calls = takes_calls
        self._text = ""
        self._num_fed = 0
        self._is_begun = False
        self._header: str | None = None
        """The header so far; None: a message is read, or nothing."""
        self._kind: SegmentKind | None = SegmentKind.CONTENT
        """The kind of the message that is read; None: it has ended."""
        self._written: set[SegmentKind] = set()
        self._separator = ""

    def feed(self, text: str, marks: Collection[int] = ()) -> list[Segment]:
        """Add text; return its segments."""
        del marks
        segments: list[Segment] = []
        self._num_fed += len(text)
        self._text += text
        if not self._is_begun:
            if len(self._text) < len(TO) and TO.startswith(self._text):
                return segments
            self._is_begun = True
            self._header = "" if self._text.startswith(TO) else None
        text, start = self._text, 0
        num_before = self._num_fed - len(text)
        for tag in TAG.finditer(text):
            self._take(text[start : tag.start()], num_before + tag.start(), segments)
            self._take_tag(tag[0], num_before + tag.start(), segments)
            start = tag.end()
        rest = split_at_tag(text[start:], TAGS)  # its end may be the beginning of a tag
        self._take(rest.before, self._num_fed - len(rest.after), segments)
        self._text = rest.after
        return segments

    def finish(self) -> list[Segment]:
        """End the answer; return what was held back."""
        segments: list[Segment] = []
        self._take(self._text, self._num_fed, segments)
        self._text = ""
        return segments

    def _take(self, text: str, end: int, segments: list[Segment]) -> None:
        """Take text up to a character of the answer."""
        if self._header is not None:
            self._header += text
            if len(self._header) > MAX_HEADER_CHARACTERS:
                text, self._header = self._header, None
                self._begin(SegmentKind.CONTENT)
        if self._header is None and self._kind is not None and text:
            if self._separator:
                segments.append(Segment(self._kind, self._separator))
            is_reasoning = self._kind is SegmentKind.REASONING
            segments.append(Segment(self._kind, text) if is_reasoning else verbatim(self._kind, text, end))
            self._written.add(self._kind)
            self._separator = ""

    def _take_tag(self, tag: str, start: int, segments: list[Segment]) -> None:
        """Take a tag that begins at a character of the answer."""
        if tag == MESSAGE and self._header is not None:
            header, self._header = self._header, None
            self._read_header(header, start, segments)
        elif tag in ENDS:
            self._header = self._kind = None
        elif tag in (START, CHANNEL) and self._header is None:
            self._header = tag
        elif self._header is not None:
            self._header += tag

    def _read_header(self, header: str, end: int, segments: list[Segment]) -> None:
        """Begin the message that follows a header, which ends at a character of the answer."""
        function, channel = FUNCTION.search(header), NAME.search(header)
        if function is not None and self._takes_calls:
            segments.append(verbatim(SegmentKind.CALL, function[1], end - len(header) + function.end(1)))
            self._kind, self._separator = SegmentKind.ARGUMENTS, ""
        elif function is not None:
            self._begin(SegmentKind.CONTENT)
            self._take(function[1], end - len(header) + function.end(1), segments)
            segments.append(Segment(SegmentKind.CONTENT, " "))
        elif RECIPIENT.search(header) or (channel is not None and channel[1] == "analysis"):
            self._begin(SegmentKind.REASONING)
        else:
            self._begin(SegmentKind.CONTENT)

    def _begin(self, kind: SegmentKind) -> None:
        self._kind, self._separator = kind, "\n" if kind in self._written else ""
