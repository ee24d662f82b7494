"""Parsing of a model's output into content, reasoning and tool calls, rendered as OpenAI's messages and deltas."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

from strandline.errors import ConfigError
from strandline.reasoning_config import CLOSE, OPEN
from strandline.records.reasoning_rules import CallTag, ReasoningRules
from strandline.text.channels import CHANNEL, TAGS, ChannelParser
from strandline.text.reasoning import StrayClose, ThinkParser
from strandline.text.segments import Segment, SegmentKind, Span, content, merge_segments
from strandline.text.tool_calls import Schemas, ToolCallParser
from strandline.text.tool_formats import ALIASES, TOOL_FORMATS, find_tool_format, tool_format

Json = dict[str, Any]

CHANNELS: Final = "openai_gptoss"
"""vLLM's name for a parser of messages in channels, those to functions among them."""
CHANNEL_CALLS: Final = "openai"
"""vLLM's name for a parser of these calls alone."""
TOOL_CALL_PARSERS: Final = ("auto", *sorted({*TOOL_FORMATS, *ALIASES, CHANNEL_CALLS}), "none")
OPENED_BY_PROMPT: Final = ("kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "qwen3")
"""vLLM's names for parsers of ``<think>…</think>``, which the prompt may open."""
ALWAYS_OPEN: Final = "deepseek_r1"
REASONING_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
"""Values of ``--reasoning-field``, and the fields of a message: vLLM has the first, others the second."""
REASONING_PARSERS: Final = ("auto", ALWAYS_OPEN, *OPENED_BY_PROMPT, CHANNELS, "none")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Formats of a model's tool calls and reasoning, or ``none``."""

    tool_calls: str = "none"
    reasoning: str = "none"
    added_tokens: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The tokenizer's, with their ids: tags may be among them."""

    @property
    def has_thoughts(self) -> bool:
        """Whether reasoning is between ``<think>`` and ``</think>``."""
        return self.reasoning not in ("none", CHANNELS)

    def opens_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Return whether the text that follows a prompt begins inside the reasoning.

        Args:
            continued: text of the answer that the prompt ends with.
        """
        if not self.has_thoughts:
            return False
        if continued:
            return continued.rfind(OPEN) > continued.rfind(CLOSE)
        return self.reasoning == ALWAYS_OPEN or prompt.rstrip().endswith(OPEN)

    def reasoning_rules(self, prompt: str, *, with_tools: bool, continued: str = "") -> ReasoningRules | None:
        """Return the rules of the reasoning in the outputs that follow a prompt; None: reasoning is not parsed.

        Args:
            with_tools: tools may be called.
            continued: as in ``opens_reasoning``.
        """
        if not self.has_thoughts:
            return None
        tag = tool_format(self.tool_calls).frame.first_tag if with_tools and self.tool_calls != "none" else ""
        call_tag = CallTag(tag, self.added_tokens.get(tag)) if tag else None
        return ReasoningRules(self.opens_reasoning(prompt, continued), call_tag, bool(continued))

    def parser(self, prompt: str, schemas: Schemas | None, continued: str = "") -> "OutputParser":
        """Return a parser for the output that follows a prompt.

        Args:
            schemas: parameter schemas of the tools that may be called; None to leave calls unparsed.
            continued: as in ``opens_reasoning``.
        """
        if self.reasoning == CHANNELS:
            return OutputParser(ChannelParser(takes_calls=schemas is not None))
        rules = self.reasoning_rules(prompt, with_tools=schemas is not None, continued=continued)
        think = None if rules is None else ThinkParser.of(rules)
        tools = None if schemas is None or self.tool_calls == "none" else tool_format(self.tool_calls).parser(schemas)
        return OutputParser(think, tools)

    def tags(self, *, with_tools: bool) -> frozenset[str]:
        """Return the tags that the parsers look for, which the detokenizer must keep."""
        if self.reasoning == CHANNELS:
            return frozenset(TAGS)
        think = (OPEN, CLOSE) if self.has_thoughts else ()
        tools = tool_format(self.tool_calls).tags if with_tools and self.tool_calls != "none" else ()
        return frozenset((*think, *tools))


def choose_output_format(
    tool_calls: str, reasoning: str, template: str, added_tokens: Mapping[str, int] = MappingProxyType({})
) -> OutputFormat:
    """Return the format selected by the flags; ``auto`` detects it from the chat template and the tokenizer.

    Args:
        added_tokens: the tokenizer's, with their ids; the tags of some formats do not occur in the template.

    Raises:
        ConfigError: there is no such parser.
    """
    for name, flag, known in (
        (tool_calls, "--tool-call-parser", TOOL_CALL_PARSERS),
        (reasoning, "--reasoning-parser", REASONING_PARSERS),
    ):
        if name not in known:
            raise ConfigError(f"{flag} must be one of {', '.join(known)}; got {name!r}")
    added = frozenset(added_tokens)
    has_channels = CHANNEL in template or CHANNEL in added
    if tool_calls == CHANNEL_CALLS or reasoning == CHANNELS or (has_channels and "auto" == tool_calls == reasoning):
        return OutputFormat("none", CHANNELS, added_tokens)
    if tool_calls == "auto":
        tool_calls = find_tool_format(template, added)
    if reasoning == "auto":
        reasoning = "qwen3" if OPEN in template or CLOSE in template or OPEN in added else "none"
    return OutputFormat(tool_calls, reasoning, added_tokens)


def new_call_id() -> str:
    """Return an id for a call without one from the model."""
    return f"call_{uuid4().hex}"


@dataclass(slots=True)
class ToolCall:
    """A tool call, complete or so far."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=new_call_id)


class OutputParser:
    """Parses one output as it grows, and keeps what was parsed."""

    def __init__(self, think: ThinkParser | ChannelParser | None = None, tools: ToolCallParser | None = None) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self.shown: list[Span] = []
        """The characters of the output that content and calls were read from, in ascending order."""
        self._think = think
        self._tools = tools
        self._stray_close = StrayClose()
        self._num_fed = 0
        self._is_content_begun = False

    def feed(self, text: str, marks: Collection[int] = ()) -> list[Segment]:
        """Add text; return its segments.

        Args:
            marks: the characters of the text at which a special token opens a call.
        """
        return self._keep(self._split_calls(self._show(self._split_reasoning(text, marks))))

    def finish(self) -> list[Segment]:
        """End the output; return the segments that were held back."""
        segments = self._split_calls(self._show(self._think.finish())) if self._think is not None else []
        segments += self._drop_stray_close(self._tools.finish()) if self._tools is not None else []
        return self._keep([*segments, *self._stray_close.finish()])

    def _split_reasoning(self, text: str, marks: Collection[int]) -> list[Segment]:
        self._num_fed += len(text)
        return self._think.feed(text, marks) if self._think is not None else [content(text, self._num_fed)]

    def _show(self, segments: list[Segment]) -> list[Segment]:
        for start, end in (span for segment in segments for span in segment.spans):
            is_next = bool(self.shown) and self.shown[-1][1] == start
            self.shown.append((self.shown.pop()[0] if is_next else start, end))
        return segments

    def _split_calls(self, segments: list[Segment]) -> list[Segment]:
        if self._tools is None:
            return segments
        found: list[Segment] = []
        for segment in segments:
            if segment.kind is SegmentKind.CONTENT:
                if segment.spans and not self._is_content_begun:
                    self._is_content_begun = True
                    self._tools.skip(segment.spans[0][0])
                found += self._drop_stray_close(self._tools.feed(segment.text))
            else:
                found.append(segment)
        return found

    def _drop_stray_close(self, segments: list[Segment]) -> list[Segment]:
        is_due = self._think is not None and self._think.is_ended_by_call
        return self._stray_close.feed(segments) if is_due else segments

    def _keep(self, segments: Iterable[Segment]) -> list[Segment]:
        segments = merge_segments(segments)
        for segment in segments:
            kind, text = segment.kind, segment.text
            if kind is SegmentKind.CALL:
                self.calls.append(ToolCall(text, id=segment.call_id or new_call_id()))
            elif kind is SegmentKind.ARGUMENTS:
                self.calls[-1].arguments += text
            elif kind is SegmentKind.CONTENT:
                self.content += text
            else:
                self.reasoning += text
        return segments


def chat_finish_reason(parser: OutputParser, reason: str | None) -> str | None:
    """Return why an output ended, in OpenAI's terms."""
    return "tool_calls" if parser.calls and reason == "stop" else reason


def chat_message(parser: OutputParser, reasoning_fields: Sequence[str]) -> Json:
    """Return a finished output as a message, with its reasoning in these fields."""
    body: Json = {"role": "assistant", "content": parser.content, "refusal": None}
    if parser.reasoning:
        body.update(dict.fromkeys(reasoning_fields, parser.reasoning))
    if parser.calls:
        body["content"] = parser.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parser.calls
        ]
    return body


def chat_deltas(parser: OutputParser, segments: Iterable[Segment], reasoning_fields: Sequence[str]) -> list[Json]:
    """Return a parser's latest segments as deltas of its message, with reasoning in these fields."""
    segments = list(segments)
    index = len(parser.calls) - 1
    if parser.calls:
        index -= [segment.kind for segment in segments].count(SegmentKind.CALL)
    found: list[Json] = []
    for segment in segments:
        kind, text = segment.kind, segment.text
        if kind is SegmentKind.CALL:
            index += 1
            call: dict[str, Any] = {"index": index, "id": parser.calls[index].id, "type": "function"}
            found.append({"tool_calls": [{**call, "function": {"name": text, "arguments": ""}}]})
        elif kind is SegmentKind.ARGUMENTS:
            found.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        elif kind is SegmentKind.CONTENT:
            found.append({"content": text})
        elif reasoning_fields:
            found.append(dict.fromkeys(reasoning_fields, text))
    return found
