"""Conversion of the input items of OpenAI's Responses API to chat messages.

Clients send the whole history with each request, so an item that is refused once ends the session. Every kind of item
has a rendering: as the turn or tool call that it is, and otherwise as text. Only malformed items are rejected.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.responses.content import message_text, shown, text_of, text_parts, without_media
from strandline.server.responses.tools import INPUT, DeclaredTools, ToolName

SYSTEM_ROLES: Final = ("system", "developer")
ROLES: Final = ("user", "assistant", *SYSTEM_ROLES)
TO_MODEL: Final = ("_output", "_response", "_update")
"""Ends of the types of items that the model does not write."""
CALL_FIELDS: Final = ("arguments", "action", "actions", "operation", "input", "queries", "code")
"""Fields of calls that hold their arguments, by precedence."""
RESULT_FIELDS: Final = ("output", "outputs", "results", "error")
"""Fields of calls that hold the results of tools that run on a server."""
ABOUT_ITEMS: Final = frozenset(
    {"type", "id", "call_id", "status", "role", "internal_chat_message_metadata_passthrough"}
)
"""Fields of items that say nothing to the model."""
UPDATED: Final = ("reasoning", "text")
"""Fields of the request that a ``configuration_update`` replaces in part."""
COMPACTIONS: Final = ("compaction", "compaction_summary", "context_compaction", "compaction_trigger")
UNREADABLE: Final = "[The summary of the earlier conversation is encrypted, and cannot be read.]"
LATER_TOOLS: Final = "Further tools:"

Json = dict[str, Any]
Message = Json
Unseal = Callable[[str], str | None]
"""Returns the reasoning in ``encrypted_content``; None if another server wrote it."""


@dataclass(slots=True)
class _Turn:
    """Adjacent items of the model, or of the system, which become one message."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def add(self, message: Message) -> None:
        self.texts.append(message["content"])
        self.thoughts.append(message.get("reasoning_content", ""))
        self.calls += message.get("tool_calls", ())

    def message(self) -> Message:
        joint = "\n\n" if self.role == "system" else "\n"
        message: Message = {"role": self.role, "content": joint.join(filter(None, self.texts))}
        if self.calls:
            message["tool_calls"] = self.calls
        if thought := "\n".join(filter(None, self.thoughts)):
            message["reasoning_content"] = thought
        return message


class History:
    """Reads a conversation.

    Args:
        tools: the request's; items may declare more.
        unseal: reads encrypted reasoning.
    """

    def __init__(self, tools: DeclaredTools, unseal: Unseal = lambda _: None) -> None:
        self._tools = tools
        self._unseal = unseal
        self._turns: list[_Turn | Message] = []
        self.updates: dict[str, Json] = {}
        """Fields of the request that items replace, ``reasoning`` and ``text``; the last item counts."""

    def read(self, instructions: str | None, items: Sequence[Any], earlier: Sequence[Any] = ()) -> list[Message]:
        """Return a conversation as chat messages; adjacent items of the model become one message.

        Args:
            earlier: stored items that come before the request's.

        Raises:
            RequestError: an item is malformed; its path is the error's parameter.
        """
        if instructions:
            self._add({"role": "system", "content": instructions})
        for index, item in enumerate(earlier):
            self._read_item(item, f"previous_response_id[{index}]")
        for index, item in enumerate(items):
            self._read_item(item, f"input[{index}]")
        messages = [turn.message() if isinstance(turn, _Turn) else turn for turn in self._turns]
        # Clients probe a server without input. A template that needs a question gets an empty one, as in later turns.
        return messages or [{"role": "user", "content": ""}]

    def _add(self, message: Message) -> None:
        role = message["role"]
        if role not in ("assistant", "system"):
            self._turns.append(message)
            return
        last = self._turns[-1] if self._turns else None
        if not (isinstance(last, _Turn) and last.role == role):
            last = _Turn(role)
            self._turns.append(last)
        last.add(message)

    def _read_item(self, item: Any, path: str) -> None:
        if not isinstance(item, Mapping):
            raise _malformed(item, path)
        kind = item.get("type")
        if kind == "message" or (kind is None and "role" in item):
            self._read_message(item, path)
        elif not isinstance(kind, str):
            raise _malformed(item, path)
        elif kind in ("function_call", "custom_tool_call"):
            self._read_call(item, path)
        elif kind == "agent_message":
            text = text_of(item.get("content"), f"{path}.content")
            self._add({"role": "user", "content": f"[{item.get('author') or 'another agent'}]\n{text}"})
        elif kind == "reasoning":
            self._read_reasoning(item)
        elif kind in ("additional_tools", "tool_search_output") and isinstance(item.get("tools"), list):
            self._read_tools(item, path)
        elif kind in COMPACTIONS:
            self._read_compaction(item, path)
        elif kind == "configuration_update":
            self._read_update(item, path)
        elif kind.endswith("_output"):
            self._read_output(item, path)
        else:
            self._read_other(kind, item, path)

    def _read_message(self, item: Mapping[str, Any], path: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise RequestError(
                f"{path}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{path}.role"
            )
        if role == "user":
            self._add({"role": role, "content": text_parts(content, f"{path}.content")})
            return
        text = message_text(content, f"{path}.content")
        self._add({"role": "assistant" if role == "assistant" else "system", "content": text})

    def _read_call(self, item: Mapping[str, Any], path: str) -> None:
        is_custom = item["type"] == "custom_tool_call"
        name, given = (_text_field(item, field, path) for field in ("name", "input" if is_custom else "arguments"))
        call_id = _call_id(item, path)
        namespace = item.get("namespace")
        if not isinstance(namespace, str | None):
            raise RequestError(f"{path}.namespace must be a text, got {shown(namespace)}", param=f"{path}.namespace")
        tool = ToolName("custom" if is_custom else "function", name, namespace or None)
        arguments = json.dumps({INPUT: given}, ensure_ascii=False) if is_custom else given
        self._add_call(call_id, self._tools.function(tool), arguments)

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._add({"role": "assistant", "content": "", "tool_calls": [call]})

    def _read_output(self, item: Mapping[str, Any], path: str) -> None:
        """Add the result of a call; computers and shells have other fields than functions."""
        call_id = _call_id(item, path)
        if item.get("output") is not None:
            text = text_of(item["output"], f"{path}.output")
        elif item["type"] in ("function_call_output", "custom_tool_call_output"):
            raise RequestError(f"{path}.output is missing", param=f"{path}.output")
        else:  # a patch, for example, may have a status alone
            text = json.dumps(_said(item, but=ABOUT_ITEMS - {"status"}), ensure_ascii=False)
        self._add({"role": "tool", "tool_call_id": call_id, "content": text})

    def _read_reasoning(self, item: Mapping[str, Any]) -> None:
        sealed = item.get("encrypted_content")
        text = _joined_texts(item.get("content"))
        if not text and isinstance(sealed, str):
            text = self._unseal(sealed) or ""
        text = text or _joined_texts(item.get("summary"))
        if text:
            self._add({"role": "assistant", "content": "", "reasoning_content": text})

    def _read_tools(self, item: Mapping[str, Any], path: str) -> None:
        """Add tools that are declared in the conversation, as text where they are declared."""
        functions = self._tools.add_later(item["tools"], f"{path}.tools")
        text = "\n".join([LATER_TOOLS, *(json.dumps(function, ensure_ascii=False) for function in functions)])
        call_id = item.get("call_id")
        if isinstance(call_id, str):
            self._add({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            self._add({"role": "system", "content": text})

    def _read_update(self, item: Mapping[str, Any], path: str) -> None:
        for name in UPDATED:
            value = item.get(name)
            if not isinstance(value, Mapping | None):
                raise RequestError(f"{path}.{name} must be an object, got {shown(value)}", param=f"{path}.{name}")
            self.updates[name] = {**self.updates.get(name, {}), **(value or {})}

    def _read_compaction(self, item: Mapping[str, Any], path: str) -> None:
        texts = [text_of(item[name], f"{path}.{name}") for name in ("summary", "content", "text") if item.get(name)]
        if not texts and item["type"] == "compaction_trigger":
            return
        self._add({"role": "user", "content": "\n".join(texts) or UNREADABLE})

    def _read_other(self, kind: str, item: Mapping[str, Any], path: str) -> None:
        """Add an item of a further kind: a call, with its result if it has one, or else a text."""
        call_id = item.get("call_id")
        results = {name: item[name] for name in RESULT_FIELDS if item.get(name) is not None}
        if kind.endswith("_call") and (isinstance(call_id, str) or results):
            call_id = call_id if isinstance(call_id, str) else str(item.get("id"))
            name = item.get("name")
            name = name if isinstance(name, str) and name else kind.removesuffix("_call")
            self._add_call(call_id, name, _arguments_of(item))
            if results:
                text = "\n".join(text_of(value, f"{path}.{name}") for name, value in results.items())
                self._add({"role": "tool", "tool_call_id": call_id, "content": text})
            return
        role = "user" if kind.endswith(TO_MODEL) else "assistant"
        said = json.dumps(_said(item, but=ABOUT_ITEMS), ensure_ascii=False)
        self._add({"role": role, "content": f"[{kind[:60]}: {said}]"})


def _arguments_of(item: Mapping[str, Any]) -> str:
    """Return the arguments of a call that is no function's, as JSON."""
    name = next((name for name in CALL_FIELDS if item.get(name) is not None), None)
    if name is None:
        return "{}"
    value = item[name]
    if name == "arguments" and isinstance(value, str):
        return value
    return json.dumps(value if isinstance(value, Mapping) else {name: value}, ensure_ascii=False)


def _joined_texts(parts: Any) -> str:
    """Return the texts of a reasoning item's parts."""
    if not isinstance(parts, list):
        return parts if isinstance(parts, str) else ""
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _said(item: Mapping[str, Any], *, but: Collection[str]) -> dict[str, Any]:
    """Return the fields of an item that are not null, without encoded files."""
    return {name: without_media(value) for name, value in item.items() if name not in but and value is not None}


def _call_id(item: Mapping[str, Any], path: str) -> str:
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        raise RequestError(f"{path}.call_id must be a text, got {shown(call_id)}", param=f"{path}.call_id")
    return call_id


def _text_field(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{path}.{name} must be a text, got {shown(value)}", param=f"{path}.{name}")
    return value


def _malformed(item: Any, path: str) -> RequestError:
    return RequestError(f"{path} must be an item with a type, or a message with a role, got {shown(item)}", param=path)
