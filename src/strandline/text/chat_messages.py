"""Messages of a conversation as clients send them, read into the form that chat templates know.

Parts are joined to texts, calls of the older kind become those of today, and the marks of caches are taken out of the
messages: a template never sees them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.json_calls import parse_json
from strandline.text.marks import common_length
from strandline.text.prompts import check_messages

MARK: Final = "cache_control"
BREAKPOINT: Final = "prompt_cache_breakpoint"
"""OpenAI's mark of a part."""
MARKS: Final = (MARK, BREAKPOINT)
MAX_MARKS: Final = 4
"""Maximum marks per request; Anthropic's limit, and the number of breakpoints that OpenAI's API writes."""
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the thoughts of an assistant's message; each has what a request gives under any."""
REASONING_DETAILS: Final = "reasoning_details"
"""OpenRouter's list of parts of reasoning, read where none of the other fields is given."""
SYSTEM_ROLES: Final = ("system", "developer")
OLD_CALL: Final = "function_call"
SENTINEL: Final = "Zq7strandlinemark9x"
TEXT_PARTS: Final = ("text", "input_text", "output_text")
MEDIA: Final = ("image", "audio", "video", "file")
"""Words in the types of parts that are not text."""


class MessageError(RequestError):
    """A message is malformed.

    Args:
        reason: what is wrong with it.
        index: index of the message in the conversation.
        param: as in ``RequestError``.
    """

    def __init__(self, reason: str, index: int, param: str | None = "messages") -> None:
        super().__init__(f"messages[{index}]: {reason}", param=param)
        self.reason = reason
        self.index = index


@dataclass(frozen=True, slots=True)
class MarkedMessage:
    """A message without marks, and the positions in its content that were marked."""

    message: dict[str, Any]
    marks: list[int] = field(default_factory=list)

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def content(self) -> str:
        content: str = self.message.get("content") or ""
        return content

    def with_content(self, before: str = "", after: str = "") -> "MarkedMessage":
        """Return the message with text around its content. A mark at the end stays at the end."""
        length, added = len(self.content), len(before)
        marks = [added + mark + (len(after) if mark == length else 0) for mark in self.marks]
        return MarkedMessage({**self.message, "content": before + self.content + after}, marks)

    def joined(self, other: "MarkedMessage", separator: str = "\n\n") -> "MarkedMessage":
        """Return one message with the contents of both; the fields are those of this one."""
        text = self.content + (separator if self.content and other.content else "")
        marks = [*self.marks, *(len(text) + mark for mark in other.marks)]
        return MarkedMessage({**self.message, "content": text + other.content}, marks)

    def without(self, pattern: re.Pattern[str]) -> "MarkedMessage":
        """Return the message without the matches of a pattern in its content."""
        spans = [match.span() for match in pattern.finditer(self.content)]
        dropped = [sum(max(0, min(end, mark) - start) for start, end in spans) for mark in self.marks]
        marks = [mark - count for mark, count in zip(self.marks, dropped, strict=True)]
        return MarkedMessage({**self.message, "content": pattern.sub("", self.content)}, marks)

    def with_sentinels(self) -> dict[str, Any]:
        """Return the message with a sentinel after every mark."""
        if not self.marks:
            return self.message
        content, marks = self.content, sorted(self.marks)
        pieces = [content[start:end] for start, end in zip([0, *marks], [*marks, None], strict=True)]
        return {**self.message, "content": SENTINEL.join(pieces)}


def read_messages(messages: Iterable[Any]) -> list[MarkedMessage]:
    """Return all messages without marks.

    Raises:
        MessageError: one is malformed.
    """
    given = _with_breakpoints(list(messages))
    newest = max((index for index, message in enumerate(given) if _role_of(message) not in SYSTEM_ROLES), default=0)
    found = []
    for index, message in enumerate(given):
        is_newest = index == newest and _role_of(message) not in ("assistant", "tool", "function")
        try:
            found.append(_read(message, is_newest=is_newest))
        except RequestError as error:
            if error.param not in ("messages", MARK):
                raise
            raise MessageError(str(error), index, error.param) from error
    return found


def check_count(marked: Sequence[MarkedMessage], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise a RequestError if there are too many marks."""
    num_marked = sum(len(entry.marks) for entry in marked) + sum(is_marked(tool) for tool in tools)
    if num_marked > MAX_MARKS:
        raise RequestError(f"at most {MAX_MARKS} {MARK} marks may be set, got {num_marked}", param=MARK)


def is_marked(thing: Mapping[str, Any]) -> bool:
    """Return whether something is marked.

    Raises:
        RequestError: the mark is of an unknown kind.
    """
    mark = thing.get(MARK)
    if mark is None:
        return False
    if not isinstance(mark, Mapping) or mark.get("type") != "ephemeral":
        raise RequestError(f"{MARK} must be {{'type': 'ephemeral'}}, got {json.dumps(mark)[:100]}", param=MARK)
    return True


def sentinel_positions(rendered: str, text: str) -> list[int]:
    """Return the positions in the plain text that correspond to the sentinels in the other rendering."""
    pieces = rendered.split(SENTINEL)
    return [common_length("".join(pieces[:count]), text) for count in range(1, len(pieces))]


def _with_breakpoints(messages: list[Any]) -> list[Any]:
    """Return messages with OpenAI's breakpoints as marks.

    The latest ones count, as in OpenAI's API, because clients send those of earlier turns again.

    Raises:
        MessageError: a breakpoint is of an unknown kind.
    """
    found = [
        (index, position, part[BREAKPOINT])
        for index, message in enumerate(messages)
        if isinstance(message, Mapping) and isinstance(parts := message.get("content"), list)
        for position, part in enumerate(parts)
        if isinstance(part, Mapping) and part.get(BREAKPOINT) is not None
    ]
    for index, _, value in found:
        if not isinstance(value, Mapping) or value.get("mode") != "explicit":
            raise MessageError(
                f"{BREAKPOINT} must be {{'mode': 'explicit'}}, got {json.dumps(value)[:100]}", index, BREAKPOINT
            )
    marked = list(messages)
    for index, position, _ in found[-MAX_MARKS:]:
        parts = list(marked[index]["content"])
        parts[position] = {**parts[position], MARK: parts[position].get(MARK) or {"type": "ephemeral"}}
        marked[index] = {**marked[index], "content": parts}
    return marked


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _read(message: Any, *, is_newest: bool) -> MarkedMessage:
    """Return a message without marks and nulls, its content as a text.

    Args:
        is_newest: it is the newest question, so parts that are not text are refused rather than replaced by a note.
    """
    [message] = check_messages([_of_today(message)])
    # Clients send null for what a message has not; templates test whether a field is there.
    plain = {name: value for name, value in message.items() if name != MARK and value is not None}
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    thought = thought or _reasoning_of(message.get(REASONING_DETAILS))
    if not isinstance(thought, str | None):
        raise RequestError(f"a message's reasoning must be a string, got {thought!r:.100}", param="messages")
    if thought is not None:
        plain |= {name: thought for name in REASONING_FIELDS if name not in plain}
    if message.get("tool_calls"):
        plain["tool_calls"] = _parsed_calls(message["tool_calls"])
    content = message.get("content")
    marks: list[int] = []
    if isinstance(content, list):
        plain["content"], marks = _joined_parts(content, is_newest=is_newest)
    elif content is None or isinstance(content, str):
        if "content" in message or "tool_calls" in plain:
            plain["content"] = content or ""
    else:
        raise RequestError(
            f"a message's content must be a string or a list of parts, got {content!r:.100}", param="messages"
        )
    end = len(plain.get("content") or "")
    if is_marked(message) and end not in marks:
        marks.append(end)
    return MarkedMessage(plain, marks)


def _of_today(message: Any) -> Any:
    """Return a message with its call of the older kind, ``function_call``, as a tool call.

    An answer of reasoning alone, as one that was cut, gets an empty content.
    """
    if not isinstance(message, Mapping):
        return message
    if "content" not in message and any(message.get(name) for name in (*REASONING_FIELDS, REASONING_DETAILS)):
        message = {**message, "content": ""}
    if not isinstance(call := message.get(OLD_CALL), Mapping):
        return message
    known = {name: value for name, value in message.items() if name != OLD_CALL}
    if known.get("tool_calls"):
        return known
    old_call = {"id": f"call_{call.get('name')}", "type": "function", "function": dict(call)}
    return {**known, "tool_calls": [old_call]}


def _joined_parts(content: Sequence[Any], *, is_newest: bool) -> tuple[str, list[int]]:
    """Join text parts by newlines, as vLLM does for text-only templates; return the marked positions with the text.

    Args:
        is_newest: as in ``_read``.
    """
    texts: list[str] = []
    marks = []
    for part in content:
        text = part if isinstance(part, str) else _text_of(part)
        if text is None and not is_newest:
            text = _note(part)
        if text is None:
            unread = "" if _medium(part) is None else f"this model does not read {part['type']:.60} parts; "
            raise RequestError(
                f"{unread}a message's content parts must be {{'type': 'text', 'text': …}}, got {part!r:.200}",
                param="messages",
            )
        texts.append(text)
        if isinstance(part, Mapping) and is_marked(part):
            marks.append(sum(map(len, texts)) + len(texts) - 1)
    return "\n".join(texts), marks


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    text = part.get("text") if kind in TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
    return text if isinstance(text, str) else None


def _medium(part: Any) -> str | None:
    """Return what a part has instead of text, such as an image; None if it is malformed."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return next((name for name in MEDIA if name in kind), None) if isinstance(kind, str) else None


def _note(part: Any) -> str | None:
    """Return a note that a part is left out; None if it is malformed."""
    name = _medium(part)
    return None if name is None else f"[{name} left out: this model reads text only]"


def _reasoning_of(details: Any) -> str | None:
    """Return the text of OpenRouter's parts of reasoning; None if they hold no text."""
    parts = [part for part in details if isinstance(part, Mapping)] if isinstance(details, list) else []
    texts = [text for part in parts if isinstance(text := part.get("text") or part.get("summary"), str)]
    return "\n".join(texts) or None


def _parsed_calls(calls: Any) -> list[dict[str, Any]]:
    """Parse the arguments of earlier tool calls into objects, none into an empty one; others are texts."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "a message's tool_calls must be a list of {'id': …, 'type': 'function', 'function': {'name': …, "
                f"'arguments': …}}}}, got {json.dumps(call, default=str)[:200]}",
                param="messages",
            )
        found.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return found


def _arguments(given: Any) -> Mapping[str, Any] | str:
    if isinstance(given, Mapping):
        return given
    text = given if isinstance(given, str) else "" if given is None else json.dumps(given, ensure_ascii=False)
    if not text.strip() or text.strip() == "null":
        return {}
    value = parse_json(text)
    return value if isinstance(value, dict) else text
