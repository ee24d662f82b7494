"""Rendering of conversations to prompts: text, tokens, and the positions where snapshots are worthwhile.

``cache_control`` on a message, on a part of one or on a tool marks its end. The template is rendered a second time
with a sentinel after every mark; the mark is where the two renderings diverge, for any template.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from strandline.errors import RequestError
from strandline.picture_config import PictureConfig
from strandline.records.pictures import Picture, PictureSpan, PlacedPicture, place_pictures
from strandline.text.chat_messages import (
    MARK,
    SENTINEL,
    SYSTEM_ROLES,
    MarkedMessage,
    MessageError,
    check_count,
    is_marked,
    read_messages,
    sentinel_positions,
)
from strandline.text.client_telemetry import TelemetryFilter
from strandline.text.continuation import continued_text, read_continued
from strandline.text.control_tokens import ROLE, ControlTokens, SplitText
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
from strandline.text.picture_placeholders import pictures_in, with_parts
from strandline.text.prompts import (
    check_length,
    check_messages,
    check_template_options,
    check_text,
    render_chat,
    template_text,
)
from strandline.text.remembered_answers import Recollection, RememberedAnswers
from strandline.text.template_repairs import TemplateTraits, object_arguments, repaired
from strandline.text.tool_formats import ToolFormat, find_tool_format, tool_format

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that any template may get; other roles must be named in it, as ``ipython`` is in some."""
TOOL_KEYS: Final = ("type", "function", "name", "description", "parameters")
"""Keys of tools and of their functions, in the order that models are trained on."""
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
    continued: str = ""
    """The content of the last message, if the output is to continue it."""
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedEndings:
    """Prompts that differ in the end of the last message."""

    head_ids: list[int]
    """Tokens that all share."""
    tails_ids: list[list[int]]
    """Tokens that follow them, for each ending."""
    closing: str
    """The template's text after the last message, with which every prompt ends."""


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        chat_template: replaces the tokenizer's own.
        parse_special_tokens: parse control tokens in user and tool messages.
        tool_calls: format of earlier calls, for templates that leave them out; ``auto``: detected; ``none``: they stay
            out.
        answers: remembered answers, which are encoded as they were generated; None: none are.
        telemetry: drops clients' telemetry from system messages; None: it stays.
        pictures: how the model reads pictures; None: it reads none.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        parse_special_tokens: bool = False,
        tool_calls: str = "auto",
        answers: RememberedAnswers | None = None,
        telemetry: TelemetryFilter | None = None,
        pictures: PictureConfig | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._answers = answers
        self._tool_calls = tool_calls
        self._pictures = pictures
        reserved = [] if pictures is None else filter(None, tokenizer.convert_ids_to_tokens(pictures.token_ids))
        self._control_tokens = ControlTokens(tokenizer, is_parsed=parse_special_tokens, reserved=frozenset(reserved))
        self._chat_template = chat_template
        self._traits = TemplateTraits(lambda messages: self._render(messages, True))
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
        """Whether the template renders earlier tool calls, or no probe with or without them; probed on first use."""
        if self._renders_calls is None:
            text = self._with_calls(1)
            self._renders_calls = self._with_calls(0) is None if text is None else SENTINEL in text
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
        answer: dict[str, Any] = {"role": "assistant", "content": "" if num_calls else "x"}
        if num_calls:
            answer["tool_calls"] = [call] * num_calls
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
        salt: str | None = "",
        continue_final_message: bool = False,
        pictures: Sequence[Picture] = (),
    ) -> RenderedChat:
        """Return a conversation as a prompt.

        Args:
            pictures: pictures that placeholders in the messages stand for (``PicturePlaceholders``).
            continue_final_message: end the prompt with the last message's content, so that the output continues it.
            max_characters: longer texts are rejected before tokenization.
            salt: answers to requests of another salt are not recalled. None: none are, nor is this one remembered.

        Raises:
            RequestError: messages or tools are malformed, or the template cannot render them.
        """
        if tools and not self.renders_tools:
            raise RequestError(
                "the model's chat template does not support tools; remove tools, or pass --chat-template",
                param="tools",
            )
        check_template_options(template_options or {})
        marked = self.read(messages)
        continued = ""
        if continue_final_message:
            marked, continued = read_continued(marked)
            add_generation_prompt = not continued
        marked = self._with_written_calls(repaired(self._with_known_roles(marked), self._traits))
        plain = [entry.message for entry in marked]
        split, mark = self._control_tokens.split(check_messages(plain))
        bare_tools = [_declared(tool) for tool in tools]

        def show(messages: Messages, is_open: bool, tools: list[dict[str, Any]]) -> str:
            shown = with_parts(messages) if pictures else messages
            return self._render(shown, is_open, tools, template_options)

        def text_of(messages: Messages, tools: list[dict[str, Any]]) -> str:
            if not continued:
                return show(messages, add_generation_prompt, tools)
            return continued_text(messages, continued, lambda part, is_open: show(part, is_open, tools))

        rendered = text_of(split, bare_tools)
        check_length(rendered, max_characters)
        check_text(rendered)
        whole = self._encoded(rendered, mark, salt)
        text, token_ids, characters = whole.text, whole.token_ids, Characters(whole)
        starts = self.turns.positions(token_ids)
        before_last = starts[-2:-1] if add_generation_prompt else starts[-1:]
        marks = {start for start in before_last if self._is_worth_marking(token_ids[:start])}
        for other in _similar(plain, with_answer=add_generation_prompt):
            with contextlib.suppress(RequestError):  # a template may demand that roles alternate
                other_text = show(other, False, bare_tools)
                shared = common_length(other_text, text)
                position = start_before(characters.position(shared), starts) if shared < len(text) else 0
                marks |= {position} if self._is_worth_marking(token_ids[:position]) else set()
        if tools and plain[0].get("role") in SYSTEM_ROLES:
            marks |= _tools_end(text, plain[0].get("content"), characters)
        check_count(marked, tools)
        if any(entry.marks for entry in marked):
            marked_text = text_of([entry.with_sentinels() for entry in marked], bare_tools)
            ends = [offset == len(entry.content) for entry in marked for offset in entry.marks]
            marks |= self._marked(sentinel_positions(marked_text, text), ends, characters, token_ids)
        for index, tool in enumerate(tools):
            if is_marked(tool):
                cut = text_of(plain, [*bare_tools[: index + 1], dict(PROBE_TOOL)])
                marks.add(characters.position(common_length(cut, text)))
        positions = tuple(sorted(mark for mark in marks if 0 < mark < len(token_ids)))
        chat = RenderedChat(text, token_ids, positions, self._recollection(whole, salt), continued)
        return self._with_pictures(chat, plain, pictures) if pictures else chat

    def render_endings(
        self,
        messages: Sequence[Mapping[str, Any]],
        endings: Sequence[str],
        *,
        template_options: Mapping[str, Any] | None = None,
        max_characters: int | None = None,
    ) -> RenderedEndings:
        """Return prompts that differ in the end of the last message alone.

        What they share is rendered and tokenized once, apart from the endings.

        Args:
            messages: the conversation without an ending of its last message, whose content is a text.

        Raises:
            RequestError: messages are malformed, or the template cannot render them or alters the last message.
        """
        check_template_options(template_options or {})

        def rendered(ending: str) -> tuple[str, str]:
            last = {**messages[-1], "content": str(messages[-1]["content"]) + ending}
            marked = repaired(self._with_known_roles(self.read([*messages[:-1], last])), self._traits)
            split, mark = self._control_tokens.split(check_messages([entry.message for entry in marked]))
            text = self._render(split, True, template_options=template_options)
            check_length(text, max_characters)
            check_text(text)
            return text, mark

        def tokens(text: str, mark: str) -> list[int]:
            return SplitText(self._tokenizer, text, mark).token_ids

        probe, mark = rendered(SENTINEL)
        head, _, closing = probe.partition(SENTINEL)
        tails = []
        for ending in endings:
            text, ending_mark = rendered(ending)
            own_head = head.replace(mark, ending_mark) if mark else head  # an ending may have the mark's character
            if not text.startswith(own_head):
                raise RequestError("the chat template renders what questions share in a way that depends on them")
            tails.append(tokens(text[len(head) :], ending_mark))
        return RenderedEndings(tokens(head, mark), tails, closing)

    def read(self, messages: Iterable[Any]) -> list[MarkedMessage]:
        """Return messages without marks and clients' telemetry. Raises as ``read_messages``, and for unknown roles."""
        marked = read_messages(messages)
        self._check_roles(marked)
        return marked if self._telemetry is None else self._telemetry.drop(marked)

    def _is_worth_marking(self, token_ids: Sequence[int]) -> bool:
        """Whether a prefix, in which a picture is still one token, is long enough to be marked."""
        has_picture = self._pictures is not None and self._pictures.image_token_id in token_ids
        return has_picture or len(token_ids) >= MIN_GAP_TOKENS

    def _with_pictures(self, chat: RenderedChat, messages: Messages, pictures: Sequence[Picture]) -> RenderedChat:
        """Return a prompt with as many tokens for each picture as it has.

        Raises:
            RequestError: the template leaves pictures out, or something else wrote the token that stands for them.
        """
        shown, config = pictures_in(messages), self._pictures
        num_found = chat.token_ids.count(config.image_token_id) if config is not None else 0
        if config is None or num_found != len(shown) or max(shown, default=0) >= len(pictures):
            raise RequestError(
                f"the prompt has {num_found} tokens that stand for pictures, and the messages have {len(shown)} "
                "pictures: the chat template leaves some out, or tools or template options contain such tokens",
                param="messages",
            )
        given = [pictures[number] for number in shown]
        token_ids, placed = place_pictures(chat.token_ids, config.image_token_id, given, config.token_side)
        moves = [(span.start - moved, span.num_tokens - 1) for moved, span in _moved(placed)]
        marks = tuple(mark + sum(more for start, more in moves if start < mark) for mark in chat.marks)
        return replace(chat, token_ids=token_ids, marks=marks, pictures=tuple(placed))

    def _encoded(self, rendered: str, mark: str, salt: str | None) -> SplitText:
        """Return a rendered text as tokens, with remembered answers as they were generated."""
        if self._answers is None or salt is None:
            return SplitText(self._tokenizer, rendered, mark)
        return SplitText(self._tokenizer, rendered, mark, partial(self._answers.find, salt))

    def _recollection(self, whole: SplitText, salt: str | None) -> Recollection | None:
        if self._answers is None or salt is None:
            return None
        num_tokens = sum(len(part.token_ids) for part in whole.recalled)
        return Recollection(self._answers.key(salt, whole.text), len(whole.recalled), num_tokens)

    def _check_roles(self, marked: Sequence[MarkedMessage]) -> None:
        """Raise a MessageError for a role that is no word, or neither among ``ROLES`` nor named in the template."""
        for index, entry in enumerate(marked):
            if not ROLE.fullmatch(entry.role):
                raise MessageError(f"a message's role must be a word such as 'user', got {entry.role[:100]!r}", index)
            if entry.role not in ROLES and not self._names(entry.role):
                raise MessageError(
                    f"a message's role must be one of {', '.join(ROLES)}, or another that the chat template names; "
                    f"got {entry.role[:100]!r}",
                    index,
                )

    def _with_known_roles(self, marked: list[MarkedMessage]) -> list[MarkedMessage]:
        """Return messages with roles that the template names.

        Developers' messages become system prompts, joined to adjacent ones, and functions' messages those of tools.
        Most templates leave out a message whose role they do not know.
        """
        roles = {entry.role for entry in marked}
        others: dict[str, str] = {}
        if "developer" in roles and not self._names("developer"):
            others["developer"] = "system"
        if "function" in roles and (self._names("tool") or not self._names("function")):
            others["function"] = "tool"
        found: list[MarkedMessage] = []
        for entry in marked:
            role = others.get(entry.role, entry.role)
            if "developer" in others and role == "system" and found and found[-1].role == "system":
                found[-1] = found[-1].joined(entry)
            else:
                found.append(entry if role == entry.role else _with_role(entry, role))
        return found

    def _with_written_calls(self, marked: list[MarkedMessage]) -> list[MarkedMessage]:
        """Return messages with their calls at the end of their content, if the template leaves calls out."""
        if not any("tool_calls" in entry.message for entry in marked) or self.renders_calls:
            return marked
        name = self._tool_calls
        if name == "auto":
            name = find_tool_format(self._template_text(), frozenset(self._tokenizer.get_added_vocab()))
        if name == "none" and self._with_calls(1) is None:
            name = "hermes"  # the template refuses calls, so they cannot stay where they are
        return marked if name == "none" else [_with_text_of_calls(entry, tool_format(name)) for entry in marked]

    def _names(self, role: str) -> bool:
        """Return whether the template names a role."""
        return re.search(rf"""(["']){re.escape(role)}\1""", self._template_text()) is not None

    def _template_text(self) -> str:
        return template_text(self._tokenizer, self._chat_template)

    def _marked(
        self, offsets: Sequence[int], ends: Sequence[bool], characters: Characters, token_ids: list[int]
    ) -> set[int]:
        """Return the token positions of marked characters; a mark at a message's end moves to the next turn's start."""
        starts = self.turns.positions(token_ids)
        marks = set[int]()
        for offset, is_end in zip(offsets, ends, strict=False):
            position = characters.position(offset)
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


def _declared(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the template gets it: without its mark, its keys in one order.

    Clients write keys in different orders, some in another one each time they start. The prompt depends on none, so
    that it hits the same prefixes. Keys that models are not trained on follow in alphabetical order.
    """
    plain = {name: value for name, value in tool.items() if name != MARK}
    function = plain.get("function")
    if isinstance(function, Mapping):
        plain = {"type": "function", **plain, "function": _ordered(function)}
    return _ordered(plain)


def _ordered(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in TOOL_KEYS if name in fields} | dict(sorted(fields.items()))


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


def _moved(placed: Sequence[PlacedPicture]) -> Iterator[tuple[int, PictureSpan]]:
    """Yield each picture's tokens, and by how many tokens those before it have moved them."""
    moved = 0
    for span, _ in placed:
        yield moved, span
        moved += span.num_tokens - 1


def _with_role(entry: MarkedMessage, role: str) -> MarkedMessage:
    of_tool = {"tool_call_id": f"call_{entry.message.get('name')}"} if role == "tool" else {}
    return replace(entry, message={**of_tool, **entry.message, "role": role})


def _with_text_of_calls(entry: MarkedMessage, written: ToolFormat) -> MarkedMessage:
    if not entry.message.get("tool_calls"):
        return entry
    message = object_arguments(entry.message)
    calls = message.pop("tool_calls")
    return replace(entry, message=message).with_content(after=written.write(calls))


def _tools_end(text: str, system: Any, characters: Characters) -> set[int]:
    """Return where a system prompt begins that follows the tools: other requests may share only the tools."""
    offset = text.find(system.strip()) if isinstance(system, str) and system.strip() else -1
    position = characters.position(offset) if offset > 0 else 0
    return {position} if position >= MIN_TOOLS_TOKENS else set()
