"""A model's reply in the shapes of OpenAI's API: content, reasoning and calls of tools, whole and in deltas."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from strandline.errors import ConfigError
from strandline.server.answers import Json
from strandline.server.pieces import Kind, Piece, PieceParser, joined
from strandline.server.reasoning import OPEN, ThinkParser
from strandline.server.tool_calls import FUNCTION, TOOL_PARSERS, Schemas
from strandline.server.tool_calls import OPEN as OPEN_CALL

TOOL_CALL_PARSERS: Final = ("auto", *TOOL_PARSERS, "none")
REASONING_PARSERS: Final = ("auto", "qwen3", "deepseek_r1", "none")


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes calls of tools and reasoning; ``none`` for what it does not write."""

    tool_calls: str = "none"
    reasoning: str = "none"

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the text that follows a prompt begins inside the reasoning."""
        if self.reasoning == "none":
            return False
        return self.reasoning == "deepseek_r1" or prompt.rstrip().endswith(OPEN)

    def reply(self, prompt: str, schemas: Schemas | None) -> "Reply":
        """Return an empty reply.

        Args:
            schemas: of the tools that may be called; None when calls are not looked for.
        """
        think = None if self.reasoning == "none" else ThinkParser(is_open=self.opens_reasoning(prompt))
        tools = None if schemas is None or self.tool_calls == "none" else TOOL_PARSERS[self.tool_calls](schemas)
        return Reply(think, tools)


def choose_format(tool_calls: str, reasoning: str, template: str) -> ReplyFormat:
    """Choose the parsers; ``auto`` goes by what the chat template says.

    Raises:
        ConfigError: there is no such parser.
    """
    for name, flag, known in (
        (tool_calls, "--tool-call-parser", TOOL_CALL_PARSERS),
        (reasoning, "--reasoning-parser", REASONING_PARSERS),
    ):
        if name not in known:
            raise ConfigError(f"{flag} must be one of {', '.join(known)}; got {name!r}")
    if tool_calls == "auto":
        tool_calls = "qwen3_coder" if FUNCTION in template else "hermes" if OPEN_CALL in template else "none"
    if reasoning == "auto":
        reasoning = "qwen3" if OPEN in template else "none"
    return ReplyFormat(tool_calls, reasoning)


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it is known."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid4().hex}")


class Reply:
    """One output, taken apart as it grows."""

    def __init__(self, think: PieceParser | None = None, tools: PieceParser | None = None) -> None:
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []
        self._think = think
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; return its parts."""
        return self._note(self._of_tools(self._of_reasoning(text)))

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        pieces = self._of_tools(self._think.finish()) if self._think is not None else []
        return self._note(pieces + (self._tools.finish() if self._tools is not None else []))

    def _of_reasoning(self, text: str) -> list[Piece]:
        return self._think.feed(text) if self._think is not None else [Piece(Kind.CONTENT, text)]

    def _of_tools(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        parts = ([piece] if piece.kind is not Kind.CONTENT else self._tools.feed(piece.text) for piece in pieces)
        return [part for part_of_piece in parts for part in part_of_piece]

    def _note(self, pieces: Iterable[Piece]) -> list[Piece]:
        pieces = joined(pieces)
        for kind, text in pieces:
            if kind is Kind.CALL:
                self.calls.append(ToolCall(text))
            elif kind is Kind.ARGUMENTS:
                self.calls[-1].arguments += text
            elif kind is Kind.CONTENT:
                self.content += text
            else:
                self.reasoning += text
        return pieces


def finish_reason(reply: Reply, reason: str | None) -> str | None:
    """Say why an output ended, in OpenAI's words."""
    return "tool_calls" if reply.calls and reason == "stop" else reason


def message(reply: Reply) -> Json:
    """Return a finished reply as a message."""
    body: Json = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        body["reasoning_content"] = reply.reasoning
    if reply.calls:
        body["content"] = reply.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return body


def deltas(reply: Reply, pieces: Iterable[Piece]) -> list[Json]:
    """Return the pieces that a reply gave last as deltas of its message."""
    pieces = list(pieces)
    index = len(reply.calls) - sum(piece.kind is Kind.CALL for piece in pieces) - 1
    found: list[Json] = []
    for kind, text in pieces:
        if kind is Kind.CALL:
            index += 1
            call: dict[str, Any] = {"index": index, "id": reply.calls[index].id, "type": "function"}
            found.append({"tool_calls": [{**call, "function": {"name": text, "arguments": ""}}]})
        elif kind is Kind.ARGUMENTS:
            found.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        else:
            found.append({"content" if kind is Kind.CONTENT else "reasoning_content": text})
    return found
