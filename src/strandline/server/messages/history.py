"""Conversations of Anthropic's API as chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from strandline.server.messages.content import BlockTexts, Position, add_part
from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.chat_messages import MARK

SYSTEM: Final = "system"


class History(NamedTuple):
    """A conversation in OpenAI's form, and the path of each message's source in the request."""

    messages: list[Json]
    paths: list[str]


def read_history(system: Any, messages: Sequence[Any], texts: BlockTexts, earlier: Sequence[Any] = ()) -> History:
    """Return a conversation. Cache marks are retained; every tool result becomes a message.

    Args:
        earlier: messages of the conversation before the request's.

    Raises:
        RequestError: a block is malformed, or not text and in the newest turn; the error has its path.
    """
    found: list[Json] = []
    paths: list[str] = []
    if system:
        content = system if isinstance(system, str) else _system_parts(system, texts)
        found.append({"role": "system", "content": content})
        paths.append(SYSTEM)
    start = -len(earlier)
    whole = list(enumerate([*earlier, *messages], start))
    newest = max((index for index, message in whole if message.get("role") != "system"), default=0)
    for index, message in whole:
        path = f"messages.{index}" if index >= 0 else f"thread.messages.{index - start}"
        position = Position(path, is_newest=index == newest and message.get("role") != "assistant")
        content = message.get("content")
        turns = _split(message, content, texts, position) if isinstance(content, list) else [dict(message)]
        found += turns
        paths += [path] * len(turns)
    return History(found, paths)


def _system_parts(blocks: Sequence[Any], texts: BlockTexts) -> list[Json]:
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        add_part(parts, texts.part(block, Position(f"{SYSTEM}.{index}", is_newest=True)))
    return parts


def _split(message: Mapping[str, Any], blocks: Sequence[Any], texts: BlockTexts, position: Position) -> list[Json]:
    """Return one message's blocks as messages; tool results are first."""
    results: list[Json] = []
    own: Json = {"role": message.get("role"), "content": []}
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        where = position.inside(f"content.{index}")
        match block:
            case {"type": "thinking"}:
                thoughts += [text] if isinstance(text := block.get("thinking"), str) and text else []
            case {"type": "tool_use"}:
                own.setdefault("tool_calls", []).append(_call(block, where))
                if block.get(MARK) is not None:
                    own[MARK] = block[MARK]
            case {"type": "tool_result"}:
                results.append(_result(block, texts, where))
            case _:
                add_part(own["content"], texts.part(block, where))
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    has_own = own["content"] or "tool_calls" in own or not results
    return [*results, own] if has_own else results


def _call(block: Mapping[str, Any], position: Position) -> Json:
    name, call_id, arguments = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(call_id, str) or not isinstance(arguments, Mapping | str | None):
        raise position.fault("a tool_use needs an id, a name and an object as input")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any], texts: BlockTexts, position: Position) -> Json:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise position.fault("a tool_result needs a tool_use_id")
    content = texts.parts(block.get("content"), position.inside("tool_result"))
    if block.get("is_error"):
        content.insert(0, {"type": "text", "text": "Error:"})
    result = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**result, **({MARK: block[MARK]} if block.get(MARK) is not None else {})}
