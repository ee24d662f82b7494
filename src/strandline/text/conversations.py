"""Rendering of conversations to prompts: text, tokens, and the positions where snapshots are worthwhile.

``cache_control`` on a message, on a part of one or on a tool marks its end. The template is rendered a second time
with a sentinel after every mark; the mark is where the two renderings diverge, for any template.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.control_tokens import ControlTokens, SplitText
from strandline.text.marks import (
    MIN_GAP_TOKENS,
    Characters,
    Messages,
    Turns,
    common_length,
    find_turns,
    next_start,
    start_before,
)
from strandline.text.prompts import (
    check_length,
    check_messages,
    check_template_options,
    check_text,
    render_chat,
    template_text,
)
from strandline.text.remembered_answers import Recollection, RememberedAnswers
from strandline.text.tool_formats import ToolFormat, find_tool_format, tool_format

MARK: Final = "cache_control"
MAX_MARKS: Final = 4
"""Maximum marks per request; Anthropic's limit."""
REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the thoughts of an assistant's message; each has what a request gives under any."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that any template may get; other roles must be named in it, as ``ipython`` is in some."""
SYSTEM_ROLES: Final = ("system", "developer")
SENTINEL: Final = "Zq7strandlinemark9x"
MIN_TOOLS_TOKENS: Final = 64
"""Fewer tokens before the system prompt are the opening of its turn, not tools."""
PROBE_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {"name": SENTINEL, "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a prompt."""

    text: str
    token_ids: list[int]
    marks: tuple[int, ...]
    """Token positions where a snapshot is worthwhile, ascending."""
    recollection: Recollection | None = field(default=None, compare=False)
    """None: answers are not remembered."""


@dataclass(slots=True)
class _MarkedMessage:
    """A message without marks, and the positions in its content that were marked."""

    message: dict[str, Any]
    places: list[int] = field(default_factory=list)


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        chat_template: replaces the tokenizer's own.
        parse_special_tokens: parse control tokens in user and tool messages.
        tool_calls: format of earlier calls, for templates that leave them out; ``auto``: detected; ``none``: they stay
            out.
        answers: remembered answers, which are encoded as they were generated; None: none are.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        parse_special_tokens: bool = False,
        tool_calls: str = "auto",
        answers: RememberedAnswers | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._tool_calls = tool_calls
        self._control_tokens = ControlTokens(tokenizer, is_parsed=parse_special_tokens)
        self._chat_template = chat_template
        self._turns: Turns | None = None
        self._renders_tools: bool | None = None
        self._renders_calls: bool | None = None
        self._takes_parallel_calls: bool | None = None

    @property
    def turns(self) -> Turns:
        """How the template separates turns; probed on first use."""
        if self._turns is None:
            self._turns = find_turns(self._tokenizer, self._render)
        return self._turns

    @property
    def renders_tools(self) -> bool:
        """Whether the template renders tools; probed on first use."""
        if self._renders_tools is None:
            messages = [{"role": "user", "content": "x"}]
            try:
                self._renders_tools = SENTINEL in self._render(messages, True, [dict(PROBE_TOOL)])
            except RequestError:
                self._renders_tools = False
        return self._renders_tools

    @property
    def renders_calls(self) -> bool:
        """Whether the template renders earlier tool calls, or rejects the probe; probed on first use."""
        if self._renders_calls is None:
            text = self._with_calls(1)
            self._renders_calls = text is None or SENTINEL in text
        return self._renders_calls

    @property
    def takes_parallel_calls(self) -> bool:
        """Whether the template takes several tool calls in a message, or none at all; probed on first use."""
        if self._takes_parallel_calls is None:
            self._takes_parallel_calls = self._with_calls(2) is not None or self._with_calls(1) is None
        return self._takes_parallel_calls

    def _with_calls(self, num_calls: int) -> str | None:
        """Render a conversation with tool calls; return None if the template rejects it."""
        # Some templates render a call's id alone, which names the function.
        call = {"id": SENTINEL, "type": "function", "function": {"name": SENTINEL, "arguments": {}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}
        results = [{"role": "tool", "tool_call_id": "x", "content": "x"}] * num_calls
        with contextlib.suppress(RequestError):
            return self._render([{"role": "user", "content": "x"}, answer, *results], True)
        return None

    def render(
        self,
        messages: Iterable[Any],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        max_characters: int | None = None,
        salt: str = "",
    ) -> RenderedChat:
        """Return a conversation as a prompt.

        Args:
            max_characters: longer texts are rejected before tokenization.
            salt: answers to requests of another salt are not recalled.

        Raises:
            RequestError: messages or tools are malformed, or the template cannot render them.
        """
        if tools and not self.renders_tools:
            raise RequestError(
                "the model's chat template does not support tools; remove tools, or pass --chat-template",
                param="tools",
            )
        check_template_options(template_options or {})
        marked = self._with_written_calls(self._with_known_roles(_each_without_marks(messages)))
        plain = [entry.message for entry in marked]
        split, mark = self._control_tokens.split(check_messages(plain))
        self._check_roles(split)
        bare_tools = [{name: value for name, value in tool.items() if name != MARK} for tool in tools]

        def text_of(messages: Messages, tools: list[dict[str, Any]]) -> str:
            return self._render(messages, add_generation_prompt, tools, template_options)

        try:
            rendered = text_of(split, bare_tools)
        except RequestError as error:
            raise RequestError(f"{error}{_unparsed(split)}") from error
        check_length(rendered, max_characters)
        check_text(rendered)
        whole = self._encoded(rendered, mark, salt)
        text, token_ids, characters = whole.text, whole.token_ids, Characters(whole)
        starts = self.turns.positions(token_ids)
        before_last = starts[-2:-1] if add_generation_prompt else starts[-1:]
        marks = {start for start in before_last if start >= MIN_GAP_TOKENS}
        for other in _similar(plain, with_answer=add_generation_prompt):
            with contextlib.suppress(RequestError):  # a template may demand that roles alternate
                other_text = self._render(other, False, bare_tools, template_options)
                shared = common_length(other_text, text)
                position = start_before(characters.position(shared), starts) if shared < len(text) else 0
                marks |= {position} if position >= MIN_GAP_TOKENS else set()
        if tools and plain[0].get("role") in SYSTEM_ROLES:
            marks |= _tools_end(text, plain[0].get("content"), characters)
        _check_count(marked, tools)
        if any(entry.places for entry in marked):
            marked_text = text_of([_with_sentinels(entry) for entry in marked], bare_tools)
            ends = [place == len(_content(entry)) for entry in marked for place in entry.places]
            marks |= self._marked(_sentinel_positions(marked_text, text), ends, characters, token_ids)
        for index, tool in enumerate(tools):
            if _is_marked(tool):
                cut = text_of(plain, [*bare_tools[: index + 1], dict(PROBE_TOOL)])
                marks.add(characters.position(common_length(cut, text)))
        places = tuple(sorted(mark for mark in marks if 0 < mark < len(token_ids)))
        return RenderedChat(text, token_ids, places, self._recollection(whole, salt))

    def _encoded(self, rendered: str, mark: str, salt: str) -> SplitText:
        """Return a rendered text as tokens, with remembered answers as they were generated."""
        if self._answers is None:
            return SplitText(self._tokenizer, rendered, mark)
        return SplitText(self._tokenizer, rendered, mark, partial(self._answers.find, salt))

    def _recollection(self, whole: SplitText, salt: str) -> Recollection | None:
        if self._answers is None:
            return None
        num_tokens = sum(len(part.token_ids) for part in whole.recalled)
        return Recollection(self._answers.key(salt, whole.text), len(whole.recalled), num_tokens)

    def _check_roles(self, messages: Messages) -> None:
        """Raise a RequestError for a role that is neither among ``ROLES`` nor named in the template."""
        for role in (message["role"] for message in messages):
            if role not in ROLES and not self._names(role):
                raise RequestError(
                    f"a message's role must be one of {', '.join(ROLES)}, or another that the chat template names; "
                    f"got {role[:100]!r}",
                    param="messages",
                )

    def _with_known_roles(self, marked: list[_MarkedMessage]) -> list[_MarkedMessage]:
        """Return developers' messages as system prompts, unless the template names the role; join adjacent ones.

        Most templates leave out a message whose role they do not know.
        """
        if not any(_role(entry) == "developer" for entry in marked) or self._names("developer"):
            return marked
        found: list[_MarkedMessage] = []
        for entry in marked:
            is_system = _role(entry) in SYSTEM_ROLES
            if not (is_system and found and _role(found[-1]) == "system"):
                found.append(replace(entry, message={**entry.message, "role": "system"}) if is_system else entry)
                continue
            text = f"{_content(found[-1])}\n\n"
            content = text + _content(entry)
            places = [*found[-1].places, *(len(text) + place for place in entry.places)]
            found[-1] = _MarkedMessage({**found[-1].message, "content": content}, places)
        return found

    def _with_written_calls(self, marked: list[_MarkedMessage]) -> list[_MarkedMessage]:
        """Return messages with their calls at the end of their content, if the template leaves calls out."""
        if not any("tool_calls" in entry.message for entry in marked) or self.renders_calls:
            return marked
        name = self._tool_calls
        if name == "auto":
            name = find_tool_format(self._template_text(), frozenset(self._tokenizer.get_added_vocab()))
        return marked if name == "none" else [_with_text_of_calls(entry, tool_format(name)) for entry in marked]

    def _names(self, role: str) -> bool:
        """Return whether the template names a role."""
        return re.search(rf"""(["']){re.escape(role)}\1""", self._template_text()) is not None

    def _template_text(self) -> str:
        return template_text(self._tokenizer, self._chat_template)

    def _marked(
        self, places: Sequence[int], ends: Sequence[bool], characters: Characters, token_ids: list[int]
    ) -> set[int]:
        """Return the token positions of marked characters; a mark at a message's end moves to the next turn's start."""
        starts = self.turns.positions(token_ids)
        marks = set[int]()
        for place, is_end in zip(places, ends, strict=False):
            position = characters.position(place)
            marks.add((next_start(position, starts) if is_end else None) or position)
        return marks

    def _render(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        return render_chat(
            self._tokenizer,
            messages,
            self._chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            template_options=template_options,
        )


def _similar(messages: Messages, *, with_answer: bool) -> list[list[Mapping[str, Any]]]:
    """Return conversations that are likely to share a prefix with one: another with its system prompt, its next turn.

    Args:
        with_answer: the prompt ends with an answer's opening, which the next turn may render differently.
    """
    answer, question = ({"role": role, "content": SENTINEL} for role in ("assistant", "user"))
    system = [message for message in messages[:1] if message.get("role") in SYSTEM_ROLES]
    found: list[list[Mapping[str, Any]]] = [[*system, question]]
    if with_answer:
        found.append([*messages, answer, question])
        # An answer to a tool's result may drop less reasoning than the next question.
        if messages[-1].get("role") != "user":
            found.append([*messages, answer])
    return found


def _check_count(marked: Sequence[_MarkedMessage], tools: Sequence[Mapping[str, Any]]) -> None:
    num_marked = sum(len(entry.places) for entry in marked) + sum(_is_marked(tool) for tool in tools)
    if num_marked > MAX_MARKS:
        raise RequestError(f"at most {MAX_MARKS} {MARK} marks may be set, got {num_marked}", param=MARK)


def _is_marked(thing: Mapping[str, Any]) -> bool:
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


def _each_without_marks(messages: Iterable[Any]) -> list[_MarkedMessage]:
    """Return all messages without marks. Raises a RequestError that names the message at fault."""
    found = []
    for index, message in enumerate(messages):
        try:
            found.append(_without_marks(message))
        except RequestError as error:
            if error.param != "messages":
                raise
            raise RequestError(f"messages[{index}]: {error}", param=error.param) from error
    return found


def _without_marks(message: Any) -> _MarkedMessage:
    """Join a message's text parts by newlines, as vLLM does for text-only templates; remove the marks and nulls."""
    [message] = check_messages([message])
    # Clients send null for what a message has not; templates test whether a field is there.
    plain = {name: value for name, value in message.items() if name != MARK and value is not None}
    entry = _MarkedMessage(plain)
    content = message.get("content")
    if "content" in message:
        plain["content"] = content or ""
    if not plain.get("tool_calls", True):
        del plain["tool_calls"]
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if thought is not None:
        plain |= {name: thought for name in REASONING_FIELDS if name not in plain}
    if message.get("tool_calls"):
        plain["tool_calls"] = _parsed_calls(message["tool_calls"])
        plain["content"] = content or ""
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text:
                raise RequestError(
                    f"a message's content parts must be {{'type': 'text', 'text': …}}, got {part!r:.200}",
                    param="messages",
                )
            texts.append(part["text"])
            if _is_marked(part):
                entry.places.append(sum(map(len, texts)) + len(texts) - 1)
        plain["content"] = "\n".join(texts)
    elif not (content is None or isinstance(content, str)):
        raise RequestError(
            f"a message's content must be a string or a list of parts, got {content!r:.100}", param="messages"
        )
    if _is_marked(message) and len(_content(entry)) not in entry.places:
        entry.places.append(len(_content(entry)))
    return entry


def _parsed_calls(calls: Any) -> list[dict[str, Any]]:
    """Parse the arguments of earlier tool calls into objects, none into an empty one; leave anything else unchanged."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "a message's tool_calls must be a list of {'id': …, 'type': 'function', 'function': {'name': …, "
                f"'arguments': …}}}}, got {json.dumps(call, default=str)[:200]}",
                param="messages",
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str | None):
            with contextlib.suppress(ValueError):
                value = json.loads(arguments or "{}")
                arguments = {} if value is None else value if isinstance(value, dict) else arguments
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _unparsed(messages: Messages) -> str:
    """Return a note on the first call whose arguments are not an object, a likely reason why a template fails."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    names = [function["name"] for function in calls if not isinstance(function["arguments"], Mapping)]
    return f"; the arguments of a call of {names[0]:.100} are not a JSON object" if names else ""


def _with_text_of_calls(entry: _MarkedMessage, written: ToolFormat) -> _MarkedMessage:
    message, before = dict(entry.message), _content(entry)
    calls = message.pop("tool_calls", None)
    if not calls:
        return entry
    content = before + written.write(calls)
    places = [len(content) if place == len(before) else place for place in entry.places]
    return _MarkedMessage({**message, "content": content}, places)


def _role(entry: _MarkedMessage) -> object:
    return entry.message.get("role")


def _content(entry: _MarkedMessage) -> str:
    content: str = entry.message.get("content") or ""
    return content


def _with_sentinels(entry: _MarkedMessage) -> dict[str, Any]:
    """Return the message with a sentinel after every mark."""
    if not entry.places:
        return entry.message
    content = _content(entry)
    pieces = [content[start:end] for start, end in zip([0, *entry.places], [*entry.places, None], strict=True)]
    return {**entry.message, "content": SENTINEL.join(pieces)}


def _sentinel_positions(rendered: str, text: str) -> list[int]:
    """Return the positions in the plain text that correspond to the sentinels in the other rendering."""
    pieces = rendered.split(SENTINEL)
    return [common_length("".join(pieces[:count]), text) for count in range(1, len(pieces))]


def _tools_end(text: str, system: Any, characters: Characters) -> set[int]:
    """Return where a system prompt begins that follows the tools: other requests may share only the tools."""
    place = text.find(system.strip()) if isinstance(system, str) and system.strip() else -1
    position = characters.position(place) if place > 0 else 0
    return {position} if position >= MIN_TOOLS_TOKENS else set()
