"""Anthropic's content blocks as text.

What a client has in its history is sent with every later request, so a block that only Anthropic's servers, another
server or a newer client can have written is rendered as text, never refused. Images and documents that are not text are
refused in the newest message alone, with the path of the block, by which Claude Code finds and removes it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from strandline.errors import RequestError
from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.chat_messages import MARK

READS_TEXT: Final = "this model reads text only"
MEDIA: Final = ("image", "document")
ENCODED: Final = ("base64", "url", "file")
"""Kinds of sources whose content is not text."""
OPAQUE_PREFIXES: Final = ("encrypted_", "signature", MARK)
"""Fields of blocks that have no meaning to a model."""


class Position(NamedTuple):
    """Where a block is in a request."""

    path: str
    is_newest: bool
    """It is in the last message but system messages, so a client can still remove it."""

    def inside(self, path: str) -> "Position":
        return Position(f"{self.path}.{path}", self.is_newest)

    def fault(self, message: str) -> RequestError:
        return RequestError(f"{self.path}: {message}", param="messages")


class BlockTexts:
    """Renders blocks as text.

    Args:
        definitions: the request's tools by name, in OpenAI's form, for blocks that refer to them.
    """

    def __init__(self, definitions: Mapping[str, Json]) -> None:
        self._definitions = dict(definitions)
        self.added: list[Json] = []
        """Tools that only the conversation defines, in OpenAI's form."""
        self._writers: Mapping[str, Callable[[Json, Position], str]] = {
            "text": self._text,
            "image": self._image,
            "document": self._document,
            "search_result": self._search_result,
            "tool_reference": self._tool_reference,
            "tool_addition": self._tool_addition,
            "tool_removal": self._tool_removal,
            "compaction": self._compaction,
            "redacted_thinking": lambda block, position: "",
        }

    def part(self, block: Any, position: Position) -> Json | None:
        """Return a block as a text part with its mark; None if it has no text.

        Raises:
            RequestError: it is malformed, or not text and in the newest turn.
        """
        if not isinstance(block, Mapping) or not isinstance(kind := block.get("type"), str):
            raise position.fault(f"a content block must be an object with a type, got {_shown(block)}")
        text = self._writers.get(kind, self._other)(dict(block), position)
        mark = {MARK: block[MARK]} if block.get(MARK) is not None else {}
        return {"type": "text", "text": text, **mark} if text or mark else None

    def parts(self, content: Any, position: Position) -> list[Json]:
        """Return content, a text or a list of blocks, as text parts. Raises as ``part``."""
        if content is None:
            return []
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        if not isinstance(content, list):
            raise position.fault(f"content must be a text or a list of blocks, got {_shown(content)}")
        found: list[Json] = []
        for index, block in enumerate(content):
            add_part(found, self.part(block, position.inside(f"content.{index}")))
        return found

    def _texts(self, content: Any, position: Position) -> str:
        return "\n".join(part["text"] for part in self.parts(content, position))

    def _text(self, block: Json, position: Position) -> str:
        text = block.get("text")
        if not isinstance(text, str | None):
            raise position.fault(f"the text of a block must be a string, got {_shown(text)}")
        return text or ""

    def _image(self, block: Json, position: Position) -> str:
        return _left_out("image", position)

    def _document(self, block: Json, position: Position) -> str:
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or not isinstance(kind, str):
            raise position.fault(f"a document needs a source with a type, got {_shown(source)}")
        if kind == "text":
            content = source.get("data")
            if not isinstance(content, str):
                raise position.fault(f"a document's text must be a string, got {_shown(content)}")
        elif kind == "content":
            content = self._texts(source.get("content"), position.inside("source"))
        elif kind in ENCODED:
            content = _left_out("document", position)
        else:
            return self._other(block, position)
        return _tagged("document", [block.get("title"), block.get("context"), content])

    def _search_result(self, block: Json, position: Position) -> str:
        text = self._texts(block.get("content"), position)
        return _tagged("search_result", [block.get("title"), block.get("source"), text])

    def _tool_reference(self, block: Json, position: Position) -> str:
        name = _tool_name(block)
        if name not in self._definitions:
            return f"[the tool {name} is not available]"
        return _tagged("tools", [json.dumps(self._definitions[name], ensure_ascii=False)])

    def _tool_addition(self, block: Json, position: Position) -> str:
        tool = block.get("tool")
        definition = tool.get("definition") if isinstance(tool, Mapping) else None
        if not isinstance(definition, Mapping) or not isinstance(definition.get("name"), str):
            return self._tool_reference(block, position)
        function = function_tool(definition)
        if definition["name"] not in self._definitions:
            self._definitions[definition["name"]] = function
            self.added.append(function)
        return _tagged("tools", [json.dumps(function, ensure_ascii=False)])

    def _tool_removal(self, block: Json, position: Position) -> str:
        return f"[the tool {_tool_name(block)} is no longer available]"

    def _compaction(self, block: Json, position: Position) -> str:
        return self._texts(block.get("content"), position)

    def _other(self, block: Json, position: Position) -> str:
        try:
            plain = _plain({name: value for name, value in block.items() if name not in ("type", MARK)})
            return _tagged(block["type"], [json.dumps(plain, ensure_ascii=False)])
        except RecursionError as error:
            raise position.fault("the block is nested too deeply") from error


def function_tool(tool: Mapping[str, Any]) -> Json:
    """Return a tool in OpenAI's form."""
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def add_part(parts: list[Json], part: Json | None) -> None:
    """Append a part; an empty one leaves only its mark, on the part before it."""
    if part is None:
        return
    if not part["text"] and parts:
        parts[-1] = {**parts[-1], MARK: part[MARK]}
    else:
        parts.append(part)


def _left_out(kind: str, position: Position) -> str:
    if position.is_newest:
        raise position.inside(kind).fault(READS_TEXT)
    return f"[{kind} left out: {READS_TEXT}]"


def _tool_name(block: Mapping[str, Any]) -> str:
    """Return the name of the tool that a block refers to, itself or in its ``tool``."""
    tool = block.get("tool")
    holders = [block, tool] if isinstance(tool, Mapping) else [block]
    names = [holder.get(field) for holder in holders for field in ("tool_name", "name")]
    return next((name for name in names if isinstance(name, str)), "")


def _tagged(kind: str, texts: Sequence[Any]) -> str:
    lines = [text for text in texts if isinstance(text, str) and text]
    return "\n".join([f"<{kind}>", *lines, f"</{kind}>"])


def _plain(value: Any) -> Any:
    """Return a block's fields without what only machines read."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ENCODED and "data" in value:
        return {"type": value["type"], "media_type": value.get("media_type")}
    return {name: _plain(item) for name, item in value.items() if not name.startswith(OPAQUE_PREFIXES)}


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:200]
