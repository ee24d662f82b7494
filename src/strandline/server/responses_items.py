"""Conversion between items of OpenAI's Responses API and the server's messages and segments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final
from uuid import uuid4

from strandline.errors import RequestError
from strandline.server.tools import Toolbox, toolbox
from strandline.server.usage_and_logprobs import Json
from strandline.text.segments import Segment, SegmentKind

SYSTEM_ROLES: Final = ("system", "developer")
TEXT_PARTS: Final = ("input_text", "output_text", "text")


# Requests


def chat_messages(instructions: str | None, items: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation as chat messages; adjacent items of the model become one message.

    Raises:
        RequestError: an item is malformed or of a kind that is not served.
    """
    given = [{"role": "user", "content": items}] if isinstance(items, str) else items
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in given:
        for message in _messages_of(item):
            last = messages[-1] if messages else {}
            if message["role"] == "system" and last.get("role") == "system":
                last["content"] = f"{last['content']}\n\n{message['content']}"
            elif message["role"] == "assistant" and last.get("role") == "assistant":
                _join(last, message)
            else:
                messages.append(message)
    return messages


def _messages_of(item: Any) -> list[dict[str, Any]]:
    match item:
        case {"role": "user" | "assistant" | "system" | "developer" as role, "content": str() | list() as content}:
            name = "system" if role in SYSTEM_ROLES else role
            return [{"role": name, "content": _text(content, is_joined=name != "user")}]
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        case {"type": "function_call_output", "call_id": str(call_id), "output": str() | list() as output}:
            return [{"role": "tool", "tool_call_id": call_id, "content": _text(output, is_joined=True)}]
        case {"type": "reasoning"}:
            content = item.get("content")
            parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
            texts = [text for part in parts if isinstance(text := part.get("text"), str)]
            return [{"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)}] if texts else []
        case _:
            raise RequestError(
                "an input item must be a message, function_call, function_call_output or reasoning with all of its "
                f"fields; got {json.dumps(item, default=str)[:200]}",
                param="input",
            )


def _text(content: Any, *, is_joined: bool) -> Any:
    """Return content as text, or as text parts with their cache marks."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        if not is_text:
            raise RequestError(f"a content part must be text, got {json.dumps(part, default=str)[:200]}", param="input")
        parts.append({**part, "type": "text"})
    return "\n".join(part["text"] for part in parts) if is_joined else parts


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    last["content"] = "\n".join(text for text in (last.get("content"), message["content"]) if text)
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    if "reasoning_content" in message:
        earlier = last.get("reasoning_content")
        last["reasoning_content"] = "\n".join(text for text in (earlier, message["reasoning_content"]) if text)


def chat_tools(tools: Sequence[Any] | None, choice: Any, *, is_parallel: bool) -> Toolbox:
    """Return the tools in the form of chat completions.

    Raises:
        RequestError: they are malformed, or OpenAI's hosted tools.
    """
    found = []
    for tool in tools or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(
                f"a tool must be of type function, got {json.dumps(tool, default=str)[:200]}", param="tools"
            )
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return toolbox(found, choice, is_parallel=is_parallel)


# Answers


class Items:
    """Builds a response's output items and their events."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._is_open = False
        self._logprobs: list[Json] = []
        """Log-probabilities of tokens whose text is not part of a message yet."""

    def append(self, segments: Iterable[Segment], logprobs: Sequence[Json] = ()) -> list[Json]:
        """Append segments; return their events.

        Args:
            logprobs: log-probabilities of the tokens that came with them.
        """
        self._logprobs += logprobs
        events: list[Json] = []
        for kind, text, call_id in segments:
            if kind is SegmentKind.CALL:
                call = {"id": _name("fc"), "type": "function_call", "status": "in_progress"}
                given = {"call_id": call_id or _name("call"), "name": text, "arguments": ""}
                events += self._open({**call, **given})
                continue
            if kind is SegmentKind.CONTENT:
                events += self._need("message")
            elif kind is SegmentKind.REASONING:
                events += self._need("reasoning")
            events.append(self._grow(text))
        return events

    def finish(self, status: str) -> list[Json]:
        """Close the last item and return its events. A response has at least one item.

        Args:
            status: status of the last item.
        """
        events = self._need("message") if not self.items else []
        if self._is_open and self._last["type"] == "message":
            self._take_logprobs()  # of the end token
        return events + self._close(status)

    @property
    def _last(self) -> Json:
        return self.items[-1]

    def _place(self) -> Json:
        place: Json = {"item_id": self._last["id"], "output_index": len(self.items) - 1}
        return place if self._last["type"] == "function_call" else {**place, "content_index": 0}

    def _need(self, kind: str) -> list[Json]:
        """Open an item of a kind unless it is open."""
        if self._is_open and self._last["type"] == kind:
            return []
        if kind == "message":
            item: Json = {"id": _name("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _name("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events = self._open(item)
        item["content"].append(part)
        return [*events, {"type": "response.content_part.added", **self._place(), "part": deepcopy(part)}]

    def _open(self, item: Json) -> list[Json]:
        events = self._close("completed")
        self.items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [*events, {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}]

    def _grow(self, text: str) -> Json:
        if self._last["type"] == "function_call":
            self._last["arguments"] += text
            return {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}
        part = self._last["content"][0]
        part["text"] += text
        more: Json = {"logprobs": self._take_logprobs()} if part["type"] == "output_text" else {}
        return {"type": f"response.{part['type']}.delta", **self._place(), "delta": text, **more}

    def _take_logprobs(self) -> list[Json]:
        """Move the log-probabilities into the message that is open; return them."""
        taken, self._logprobs = self._logprobs, []
        self._last["content"][0]["logprobs"] += taken
        return taken

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._last
        item["status"] = status
        events: list[Json] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **self._place(), **done})
        else:
            part = item["content"][0]
            more: Json = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            done = {"text": part["text"], **more}
            events.append({"type": f"response.{part['type']}.done", **self._place(), **done})
            events.append({"type": "response.content_part.done", **self._place(), "part": part})
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]


def _name(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
