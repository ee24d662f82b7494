"""Repair of conversations that a chat template refuses or renders incompletely.

Templates are programs that raise on what their authors did not expect: a system message after the first turn, two
questions in a row, a call whose arguments were cut. A repair depends on the template, which is probed once, and on the
messages up to the repaired one: so a conversation's turns are rendered as they were when there were fewer of them, and
cached prefixes stay valid. Nothing changes for templates that take what is given.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.chat_messages import REASONING_FIELDS, SENTINEL, SYSTEM_ROLES, MarkedMessage

TURNS_AROUND: Final = ("user", "tool")
"""Roles whose turns can hold a reminder."""
INVALID_JSON: Final = "invalid_json"
"""Key of arguments that are not an object, as ``/v1/messages`` returns them."""
EMPTY: Final = "(empty)"
"""Content of messages without any, if a template refuses them."""
CALL: Final = "call"
"""In a probe: an answer that calls a function."""

Messages = Sequence[MarkedMessage]
Render = Callable[[Sequence[Mapping[str, Any]]], str]


class TemplateTraits:
    """What a template takes, found by rendering probes of it on first use.

    Args:
        render: renders a conversation, or raises a RequestError.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._late: dict[str, bool] = {}
        self._empty: dict[str, bool] = {}

    @cached_property
    def takes_system(self) -> bool:
        """Whether there may be a system message."""
        return self._text(["system", "user"]) is not None or self._text(["user"]) is None

    @cached_property
    def takes_systems(self) -> bool:
        """Whether a conversation may begin with several system messages."""
        return self._takes(["system", "system", "user"], ["system", "user"])

    def takes_late(self, role: str) -> bool:
        """Return whether system messages may follow others, and are rendered where they are."""
        if role not in self._late:
            self._late[role] = (
                self._takes(["user", role], ["user"])
                and self._takes(["user", role, "assistant", "user"], ["user", "assistant", "user"])
                and self._takes(["user", "assistant", role, "user"], ["user", "assistant", "user"])
                and self._takes(["user", CALL, "tool", role], ["user", CALL, "tool"])
            )
        return self._late[role]

    def takes_pair(self, first: str, second: str) -> bool:
        """Return whether a message of one role may follow one of the other."""
        match first, second:
            case "user", "user":
                return self._takes_questions
            case "assistant", "assistant":
                return self._takes_answers
            case "tool", "user":
                return self._takes_question_after_result
            case _:
                return True

    @cached_property
    def takes_no_question(self) -> bool:
        """Whether a conversation may begin with an answer, or consist of a system message."""
        return self._takes(["assistant", "user"], ["user"]) and self._takes(["system"], ["system", "user"])

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether the arguments of a call may be a text, which is rendered."""
        texts = (self._called(arguments) for arguments in ({"x": SENTINEL}, SENTINEL))
        with_object, with_text = (text is not None and SENTINEL in text for text in texts)
        return with_text or not with_object

    @cached_property
    def takes_thought_with_content(self) -> bool:
        """Whether a message with a call may have both thoughts and content."""
        thoughts, content = dict.fromkeys(REASONING_FIELDS, _word(1)), {"content": _word(2)}
        return self._called({}, thoughts | content) is not None or self._called({}, thoughts) is None

    @cached_property
    def takes_calls_together(self) -> bool:
        """Whether all calls of a message are rendered; also if one is not, or several are refused."""
        names = _word(1), _word(2)
        calls = [call for name in names for call in _call({}, name)["tool_calls"]]
        one, both = (self._called({}, {"tool_calls": shown}) for shown in (calls[:1], calls))
        return one is None or both is None or names[0] not in one or all(name in both for name in names)

    @cached_property
    def takes_results(self) -> bool:
        """Whether results of calls are rendered."""
        return self._takes(["user", CALL, "tool"], ["user"])

    def takes_empty(self, role: str) -> bool:
        """Return whether a message of a role may be empty."""
        if role not in self._empty:
            before = {"user": [], "assistant": ["user"], "tool": ["user", CALL]}.get(role, ["user"])
            roles = [*before, role]
            self._empty[role] = self._text(roles, end="") is not None or self._text(roles) is None
        return self._empty[role]

    @cached_property
    def _takes_questions(self) -> bool:
        return self._takes(["user", "user"], ["user"])

    @cached_property
    def _takes_answers(self) -> bool:
        return self._takes(["user", "assistant", "assistant", "user"], ["user", "assistant", "user"])

    @cached_property
    def _takes_question_after_result(self) -> bool:
        return self._takes(["user", CALL, "tool", "user"], ["user", CALL, "tool"])

    def _takes(self, roles: Sequence[str], control: Sequence[str]) -> bool:
        """Return whether messages are all rendered, in their order; also if those of the control are not either."""
        return self._shows(roles) or not self._shows(control)

    def _shows(self, roles: Sequence[str]) -> bool:
        text = self._text(roles)
        if text is None:
            return False
        position = 0
        for index, role in enumerate(roles):
            if role != CALL:
                position = text.find(_word(index), position)
                if position < 0:
                    return False
        return True

    def _text(self, roles: Sequence[str], end: str | None = None) -> str | None:
        """Render messages of these roles; return None if they are refused.

        Args:
            end: content of the last message.
        """
        messages: list[dict[str, Any]] = []
        for index, role in enumerate(roles):
            if role == CALL:
                messages.append(_call({}))
            else:
                of_tool = {"tool_call_id": "call_1", "name": "f"} if role == "tool" else {}
                messages.append({"role": role, "content": _word(index), **of_tool})
        if end is not None:
            messages[-1]["content"] = end
        with contextlib.suppress(RequestError):
            return self._render(messages)
        return None

    def _called(self, arguments: Any, fields: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """Render a question and a message that calls a function; return None if it is refused.

        Args:
            fields: fields of the message.
        """
        with contextlib.suppress(RequestError):
            return self._render([{"role": "user", "content": _word(0)}, {**_call(arguments), **fields}])
        return None


def repaired(messages: Messages, traits: TemplateTraits) -> list[MarkedMessage]:
    """Return messages in a form that a template takes."""
    found = [_with_one_thought(_with_taken_arguments(entry, traits), traits) for entry in messages]
    found = _with_single_calls(found, traits)
    if any(entry.role == "tool" for entry in found) and not traits.takes_results:
        found = [_written_result(entry) if entry.role == "tool" else entry for entry in found]
    leading = list(takewhile(lambda entry: entry.role in SYSTEM_ROLES, found))
    later = found[len(leading) :]
    if len(leading) > 1 and not traits.takes_systems:
        leading = [_joined(leading)]
    if any(entry.role in SYSTEM_ROLES and not traits.takes_late(entry.role) for entry in later):
        later = _with_reminders(later)
    if leading and not traits.takes_system:
        later = _with_preamble(_joined(leading), later)
        leading = []
    if messages and not (later and later[0].role == "user") and not traits.takes_no_question:
        later.insert(0, MarkedMessage({"role": "user", "content": EMPTY}))
    return [_not_empty(entry, traits) for entry in [*leading, *_with_pairs(later, traits)]]


def object_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have objects as arguments."""
    calls = []
    for call in message["tool_calls"]:
        called = call["function"]
        if isinstance(called["arguments"], str):
            called = {**called, "arguments": {INVALID_JSON: called["arguments"]}}
        calls.append({**call, "function": called})
    return {**message, "tool_calls": calls}


def _with_taken_arguments(entry: MarkedMessage, traits: TemplateTraits) -> MarkedMessage:
    has_text = any(isinstance(call["function"]["arguments"], str) for call in entry.message.get("tool_calls", ()))
    if not has_text or traits.takes_text_arguments:
        return entry
    return replace(entry, message=object_arguments(entry.message))


def _with_one_thought(entry: MarkedMessage, traits: TemplateTraits) -> MarkedMessage:
    """Return a message with what it says before a call as the end of its thoughts, if the template refuses both."""
    message = entry.message
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
    if not (message.get("tool_calls") and thought and entry.content) or traits.takes_thought_with_content:
        return entry
    thoughts = dict.fromkeys(REASONING_FIELDS, f"{thought}\n{entry.content}")
    return MarkedMessage({**message, **thoughts, "content": ""}, [0 for _ in entry.marks])


def _with_single_calls(entries: Messages, traits: TemplateTraits) -> list[MarkedMessage]:
    """Return messages with one call each, its result after it, if the template leaves out all calls but the first."""
    if traits.takes_calls_together or all(len(entry.message.get("tool_calls", ())) < 2 for entry in entries):
        return list(entries)
    found: list[MarkedMessage] = []
    waiting: list[MarkedMessage] = []
    for entry in entries:
        if entry.role == "tool" and waiting:
            called = entry.message.get("tool_call_id")
            known = (index for index, other in enumerate(waiting) if _called_id(other) == called)
            found += [waiting.pop(next(known, 0)), entry]
            continue
        found += waiting
        first, *waiting = _one_by_one(entry)
        found.append(first)
        if waiting:
            waiting.insert(0, found.pop())
    return found + waiting


def _one_by_one(entry: MarkedMessage) -> list[MarkedMessage]:
    """Return a message as one for each of its calls; the first has all that is not a call."""
    first, *others = entry.message.get("tool_calls") or [None]
    if not others:
        return [entry]
    bare = {name: value for name, value in entry.message.items() if name not in REASONING_FIELDS} | {"content": ""}
    later = [MarkedMessage({**bare, "tool_calls": [call]}) for call in others]
    return [replace(entry, message={**entry.message, "tool_calls": [first]}), *later]


def _called_id(entry: MarkedMessage) -> Any:
    return entry.message["tool_calls"][0].get("id")


def _written_result(entry: MarkedMessage) -> MarkedMessage:
    return _as_question(entry.with_content("<tool_response>\n", "\n</tool_response>"))


def _joined(entries: Messages) -> MarkedMessage:
    whole = entries[0]
    for entry in entries[1:]:
        whole = whole.joined(entry)
    return whole


def _with_reminders(entries: Messages) -> list[MarkedMessage]:
    """Return messages with each system message as a reminder in the user's or tool's turn around it.

    That is the turn before it, so that an answer that follows does not move it; else the one after it.
    """
    found: list[MarkedMessage] = []
    waiting: list[MarkedMessage] = []
    for entry in entries:
        if entry.role not in SYSTEM_ROLES:
            found += _after(waiting, entry)
            waiting = []
        elif not entry.content.strip():
            continue
        elif not waiting and found and found[-1].role in TURNS_AROUND:
            found[-1] = found[-1].joined(_reminder(entry))
        else:
            waiting.append(_reminder(entry))
    return found + ([_as_question(_joined(waiting))] if waiting else [])


def _after(reminders: Messages, entry: MarkedMessage) -> list[MarkedMessage]:
    """Return a message after reminders: in its turn, or in one of their own."""
    if not reminders:
        return [entry]
    whole = _joined(reminders)
    if entry.role in TURNS_AROUND:
        return [replace(whole.joined(entry), message={**entry.message, "content": whole.joined(entry).content})]
    return [_as_question(whole), entry]


def _reminder(entry: MarkedMessage) -> MarkedMessage:
    if entry.content.lstrip().startswith("<system-reminder>"):
        return entry
    return entry.with_content("<system-reminder>\n", "\n</system-reminder>")


def _as_question(entry: MarkedMessage) -> MarkedMessage:
    return replace(entry, message={"role": "user", "content": entry.content})


def _with_preamble(system: MarkedMessage, entries: Messages) -> list[MarkedMessage]:
    """Return messages with a system prompt at the beginning of the first question."""
    if entries and entries[0].role == "user":
        return [_as_question(system).joined(entries[0]), *entries[1:]]
    return [_as_question(system), *entries]


def _with_pairs(entries: Messages, traits: TemplateTraits) -> list[MarkedMessage]:
    """Return messages with those joined that the template refuses to take one after the other."""
    found: list[MarkedMessage] = []
    for entry in entries:
        if found and not traits.takes_pair(found[-1].role, entry.role):
            found[-1] = _joined_answers(found[-1], entry) if entry.role == "assistant" else found[-1].joined(entry)
        else:
            found.append(entry)
    return found


def _joined_answers(first: MarkedMessage, second: MarkedMessage) -> MarkedMessage:
    whole = first.joined(second)
    both = (first.message, second.message)
    for name in REASONING_FIELDS:
        if texts := [text for message in both if isinstance(text := message.get(name), str) and text]:
            whole.message[name] = "\n".join(texts)
    if calls := [call for message in both for call in message.get("tool_calls", ())]:
        whole.message["tool_calls"] = calls
    return whole


def _not_empty(entry: MarkedMessage, traits: TemplateTraits) -> MarkedMessage:
    if entry.content.strip() or entry.message.get("tool_calls") or traits.takes_empty(entry.role):
        return entry
    return entry.with_content(after=EMPTY)


def _call(arguments: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def _word(index: int) -> str:
    return f"{SENTINEL}{index}"
