"""Input items of OpenAI's Responses API as they are stored: with ids, and without references to other items."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

from strandline.errors import RequestError
from strandline.server.requests.usage_and_logprobs import Json
from strandline.server.responses.content import shown

PREFIXES: Final[Mapping[str, str]] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Beginnings of ids, by type of item."""

FindItem = Callable[[str], Mapping[str, Any] | None]
"""Returns a stored item; None if it is not stored."""


def read_items(given: str | Sequence[Mapping[str, Any]], find_item: FindItem) -> list[Mapping[str, Any]]:
    """Return a request's items; stored ones replace references to them.

    Raises:
        RequestError: an item is not stored.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [
        _referred(item, f"input[{index}]", find_item) if _is_reference(item) else item
        for index, item in enumerate(given)
    ]


def with_ids(items: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return items with types and ids, and the contents of messages as parts."""
    found: list[Json] = []
    for item in items:
        kind = item.get("type") or "message"
        named: Json = {**item, "type": kind}
        if not isinstance(item.get("id"), str):
            named["id"] = f"{PREFIXES.get(str(kind), 'item')}_{uuid4().hex}"
        if kind == "message" and isinstance(text := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            named["content"] = [{"type": part, "text": text}]
        found.append(named)
    return found


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _referred(item: Mapping[str, Any], path: str, find_item: FindItem) -> Mapping[str, Any]:
    item_id = item.get("id")
    found = find_item(item_id) if isinstance(item_id, str) else None
    if found is None:
        raise RequestError(f"{path}: no item {shown(item_id)} is stored; send the item itself", param=path)
    return found
