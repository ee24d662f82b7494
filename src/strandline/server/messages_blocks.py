"""Conversion between Anthropic's content blocks and the server's messages, tools and segments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.output_parser import new_call_id
from strandline.server.tools import Toolbox, toolbox
from strandline.server.usage_and_logprobs import Json
from strandline.text.json_calls import parse_json
from strandline.text.segments import Segment, SegmentKind

MARK: Final = "cache_control"
CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "none": "none", "any": "required"}


# Requests


def chat_messages(system: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form. Cache marks are kept.

    Raises:
        RequestError: a block is malformed or of a kind that is not served.
    """
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": system if isinstance(system, str) else _texts(system)})
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found += _split(message, content)
        else:
            found.append(dict(message))
    return found


def _split(message: Mapping[str, Any], blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return one message's blocks as messages; every tool result becomes its own message."""
    found: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.get("role"), "content": []}
    reasoning: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str()}:
                own["content"].append(block)
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "id": str(name_of_call), "name": str(name), "input": Mapping() as arguments}:
                call = {"id": name_of_call, "type": "function", "function": {"name": name, "arguments": arguments}}
                own.setdefault("tool_calls", []).append(call)
                if MARK in block:
                    own[MARK] = block[MARK]
            case {"type": "tool_result", "tool_use_id": str(name_of_call)}:
                result = {"role": "tool", "tool_call_id": name_of_call, "content": _result(block.get("content"))}
                found.append({**result, **({MARK: block[MARK]} if MARK in block else {})})
            case _:
                raise RequestError(
                    "a content block must be text, thinking, tool_use or tool_result with all of its fields; "
                    f"got {json.dumps(block, default=str)[:200]}",
                    param="messages",
                )
    if reasoning:
        own["reasoning_content"] = "\n".join(reasoning)
    has_own = own["content"] or "tool_calls" in own or not found
    return [*found, own] if has_own else found


def _texts(blocks: Any) -> list[Any]:
    """Return text blocks as parts; other blocks are rejected when messages are rendered."""
    if not isinstance(blocks, list):
        raise RequestError(f"system must be a text or a list of text blocks, got {str(blocks)[:100]!r}", param="system")
    return blocks


def _result(content: Any) -> str | list[Any]:
    if content is None:
        return ""
    if isinstance(content, str | list):
        return content
    raise RequestError(
        f"a tool_result's content must be a text or a list of text blocks, got {str(content)[:100]!r}", param="messages"
    )


def chat_tools(tools: Sequence[Any] | None, choice: Mapping[str, Any] | None) -> Toolbox:
    """Return the tools in OpenAI's form.

    Raises:
        RequestError: they are malformed, or Anthropic's server tools.
    """
    found = []
    for tool in tools or ():
        if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom" or "name" not in tool:
            raise RequestError(
                "a tool must be {'name': …, 'input_schema': …}, run by the client; "
                f"got {json.dumps(tool, default=str)[:200]}",
                param="tools",
            )
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        entry = {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}
        found.append({**entry, **({MARK: tool[MARK]} if MARK in tool else {})})
    choice = choice or {"type": "auto"}
    wish: Any = CHOICES.get(str(choice.get("type")))
    if choice.get("type") == "tool":
        wish = {"type": "function", "function": {"name": choice.get("name")}}
    if wish is None:
        raise RequestError(
            f"tool_choice must be of type auto, any, tool or none, got {json.dumps(choice)[:100]}", param="tool_choice"
        )
    return toolbox(found, wish, is_parallel=not choice.get("disable_parallel_tool_use", False))


# Answers


class Blocks:
    """Builds a message's content blocks and their events."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self._is_open = False
        self._arguments = ""

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def append(self, segments: Iterable[Segment]) -> list[Json]:
        """Append segments; return their events."""
        events: list[Json] = []
        for kind, text, call_id in segments:
            match kind:
                case SegmentKind.CALL:
                    empty = {
                        "type": "tool_use",
                        "id": call_id or new_call_id().replace("call_", "toolu_"),
                        "name": text,
                        "input": {},
                    }
                    events += self._open(empty)
                case SegmentKind.ARGUMENTS:
                    self._arguments += text
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case SegmentKind.CONTENT:
                    events += self._grow("text", "text", text, {})
                case SegmentKind.REASONING:
                    events += self._grow("thinking", "thinking", text, {"signature": ""})
        return events

    def finish(self) -> list[Json]:
        """Close the last block and return its events. A message has at least one block."""
        events = [] if self.blocks else self._open({"type": "text", "text": ""})
        return events + self._close()

    def _grow(self, kind: str, field: str, text: str, more: Json) -> list[Json]:
        events: list[Json] = []
        if not self._is_open or self.blocks[-1]["type"] != kind:
            events += self._open({"type": kind, field: "", **more})
        self.blocks[-1][field] += text
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _open(self, block: Json) -> list[Json]:
        events = self._close()
        self.blocks.append(block)
        self._is_open = True
        self._arguments = ""
        index = len(self.blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _input(self._arguments)
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> Json:
    """Return a call's arguments as an object, which Anthropic's API requires even if the model wrote none."""
    value = parse_json(arguments or "{}")
    return value if isinstance(value, dict) else {"invalid_json": arguments}
