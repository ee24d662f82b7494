"""``/v1/messages``: Anthropic's API for text, reasoning and client tools."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Self

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.records.outputs import OutputDelta, RequestDelta
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.gate import owner_of
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import (
    EventStream,
    json_response,
    named_events,
)
from strandline.server.messages.blocks import Blocks
from strandline.server.messages.content import BlockTexts
from strandline.server.messages.diagnostics import Diagnosis, read_previous_id
from strandline.server.messages.history import History, read_history
from strandline.server.messages.threads import Thread, read_thread
from strandline.server.messages.tools import read_tools
from strandline.server.requests.rendered import Rendered
from strandline.server.requests.request_bodies import (
    Objects,
    Strings,
    Whole,
    check_extra,
    check_foreign,
    effort_options,
    sent_as,
    whole,
)
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.service import Salt, Service
from strandline.server.requests.structured_fields import structure_of
from strandline.server.requests.tools import Toolbox
from strandline.server.requests.usage_and_logprobs import Json, cache_account
from strandline.text.chat_messages import MessageError
from strandline.text.frontend import CheckedParams
from strandline.text.picture_placeholders import PicturePlaceholders
from strandline.text.segments import merge_segments

THINKING: Mapping[str, dict[str, Any]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},  # the template's default
}
"""Types of ``thinking``, and the template's options."""
FOREIGN: Final[Mapping[str, Sequence[str]]] = {
    "instructions": ["system"],
    "reasoning_effort": ["output_config.effort"],
    "response_format": ["output_config.format"],
    "stop": ["stop_sequences"],
}
"""Fields of other APIs, and what this one has instead: as in ``check_foreign``."""
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class Conversation(NamedTuple):
    """A request's conversation and tools, in OpenAI's form."""

    history: History
    box: Toolbox
    placeholders: PicturePlaceholders | None = None
    """Those of the pictures in its messages; None: the model reads none."""


class CountBody(BaseModel):
    """Body of ``/v1/messages/count_tokens``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_salt: str | None = None
    thread: dict[str, Any] | None = None

    def in_thread(self, store: ResponseStore, owner: str) -> tuple[Self, Thread]:
        """Return the request with its thread's system prompt and tools, and the thread. Raises as ``read_thread``."""
        fields = {"system": self.system, "tools": self.tools}
        thread = read_thread(self.thread, fields, self.messages, store, owner)
        return self.model_copy(update=thread.head), thread

    def conversation(self, placeholders: PicturePlaceholders | None, earlier: Sequence[Json] = ()) -> "Conversation":
        """Return the conversation and its tools.

        Args:
            placeholders: take the pictures' place; None: the model reads none.
            earlier: messages of the conversation before the request's.

        Raises: as ``PicturePlaceholders.insert``, ``read_tools``, ``read_history`` and ``toolbox``.
        """
        system: Any = self.system
        messages: Sequence[Any] = self.messages
        if placeholders is not None:
            system, earlier = placeholders.insert(system, "system"), placeholders.insert(earlier, "thread.messages")
            messages = placeholders.insert(messages, "messages")
        tools = read_tools(self.tools)
        texts = BlockTexts(tools.definitions)
        history = read_history(system, messages, texts, earlier)
        return Conversation(history, tools.toolbox(self.tool_choice, texts.added), placeholders)

    def continues(self, history: History) -> bool:
        """Return whether the output continues the last message, because it is an answer.

        Raises:
            RequestError: Anthropic's API would not continue it either.
        """
        last = history.messages[-1]
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return False
        content = last.get("content") or ""
        text = "".join(part["text"] for part in content) if isinstance(content, list) else str(content)
        if text != text.rstrip():
            raise RequestError(
                f"{history.paths[-1]}: final assistant content cannot end with trailing whitespace", param="messages"
            )
        if (self.thinking or {}).get("type") == "enabled":
            raise RequestError(
                f"{history.paths[-1]}: with thinking enabled, an answer cannot be continued; end the messages with a "
                "question, or disable thinking",
                param="messages",
            )
        return True

    def template_options(self) -> dict[str, Any]:
        """Return the chat template's options: the effort and whether to think, if the body sets them.

        Raises:
            RequestError: the effort, or the type of ``thinking``, is unknown.
        """
        effort = effort_options((self.output_config or {}).get("effort"), "output_config.effort")
        effort.pop("enable_thinking", None)  # without thinking, an effort is that of the answer
        if self.thinking is None:
            return effort
        kind = self.thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKING:
            raise RequestError(
                f"thinking.type must be one of {', '.join(THINKING)}; got {kind!r:.100}", param="thinking.type"
            )
        return effort | THINKING[kind]


class MessagesBody(CountBody):
    """Body of ``/v1/messages``."""

    max_tokens: Whole
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    stop_sequences: Strings | None = None
    stream: bool = False
    output_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    include_cache_account: bool = False
    diagnostics: dict[str, Any] | None = None

    def sampling_params(self, defaults: Mapping[str, Any], *, has_budgets: bool) -> SamplingParams:
        """Return the sampling parameters: the model's defaults, overridden by the body's fields.

        Args:
            has_budgets: budgets of reasoning can be enforced; others are ignored, since clients send them always.

        Raises:
            RequestError: a value is out of range, or the body asks for what is not supported.
        """
        check_foreign(self, FOREIGN)
        check_extra(self.model_extra)
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in sampling.items() if value is not None}
        name, wanted = "output_format", self.output_format
        if not wanted:
            name, wanted = "output_config.format", (self.output_config or {}).get("format")
        structure = structure_of({"structured_outputs": self.structured_outputs, name: wanted}, name)
        with sent_as({"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}):
            return SamplingParams(
                **{**defaults, **given},
                max_tokens=self.max_tokens,
                stop=self.stop_sequences,
                structured_outputs=structure,
                thinking_token_budget=self._budget() if has_budgets else None,
            )

    def _budget(self) -> Any:
        """Return the budget of reasoning; None: the request sets no limit."""
        thinking = self.thinking or {}
        return whole(thinking.get("budget_tokens")) if thinking.get("type") == "enabled" else None


class Stored(NamedTuple):
    """What later requests need of a request and its response."""

    thread: Thread
    diagnosis: Diagnosis


class Message:
    """A request and its response."""

    def __init__(
        self,
        service: Service,
        body: MessagesBody,
        box: Toolbox,
        prompt: Prompt,
        params: CheckedParams,
        salt: Salt,
        stored: Stored,
    ) -> None:
        self._thread, self._diagnosis = stored
        self._head = {
            "id": f"msg_{unique_id()}",
            "type": "message",
            "role": "assistant",
            "model": service.name_of(body.model),
        }
        self._parser = service.output_format.parser(prompt.text or "", box.schemas, prompt.continued)
        self._blocks = Blocks()
        self._returns_token_ids = bool(body.return_token_ids)
        self._with_account = body.include_cache_account
        self._token_ids: list[int] = []
        self.job = service.submit(self._head["id"], [prompt], params, salt)
        self._diagnosis.keep(self._head["id"], len(prompt.token_ids))

    async def answer(self) -> Json:
        """Return the complete response."""
        with self.job:
            [delta] = await self.job.whole()
        [output] = delta.outputs
        self._blocks.append(
            merge_segments([*self._parser.feed(output.text, output.call_marks), *self._parser.finish()])
        )
        self._blocks.finish()
        self._thread.keep(self._head["id"], self._blocks.blocks)
        self._token_ids += output.token_ids
        end = {**self._end(output), "usage": self._usage(delta), **self._prompt_ids(), **self._output_ids()}
        diagnostics = self._diagnosis.result(delta.num_cached_tokens)
        return {**self._head, "content": self._blocks.blocks, **end, **diagnostics}

    async def events(self) -> AsyncIterator[list[Json]]:
        """Yield the response as it is generated: the events of what has come at once."""
        is_started = False
        async for [(_, delta)] in self.job.bursts():
            [output] = delta.outputs
            self._token_ids += output.token_ids
            events: list[Json] = []
            if not is_started:
                is_started = True
                empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, **self._prompt_ids()}
                empty |= self._diagnosis.result(delta.num_cached_tokens)
                events.append(
                    {"type": "message_start", "message": {**self._head, **empty, "usage": self._usage(delta)}}
                )
            events += self._blocks.append(self._parser.feed(output.text, output.call_marks))
            if delta.finished:
                events += self._blocks.append(self._parser.finish()) + self._blocks.finish()
                self._thread.keep(self._head["id"], self._blocks.blocks)
                end = {"delta": self._end(output), "usage": self._usage(delta), **self._output_ids()}
                events += [{"type": "message_delta", **end}, {"type": "message_stop"}]
            yield events

    def _prompt_ids(self) -> Json:
        """Return the prompt's tokens, if they are asked for."""
        return {"prompt_token_ids": list(self.job.streams[0].prompt_ids)} if self._returns_token_ids else {}

    def _output_ids(self) -> Json:
        """Return the answer's tokens, if they are asked for."""
        return {"token_ids": self._token_ids} if self._returns_token_ids else {}

    def _end(self, last: OutputDelta) -> Json:
        """Return why the answer ended, in Anthropic's terms."""
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = STOP_REASONS.get(last.finish_reason or "")
        is_call = last.finish_reason == "stop" and self._blocks.has_calls
        return {"stop_reason": "tool_use" if is_call else reason, "stop_sequence": None}

    def _usage(self, delta: RequestDelta) -> Json:
        """Count tokens up to a delta; cached tokens are counted separately, as in Anthropic's API."""
        [stream] = self.job.streams
        usage: Json = {
            "input_tokens": len(stream.prompt_ids) - delta.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": delta.num_cached_tokens,
            "output_tokens": sum(output.num_tokens for output in delta.outputs),
        }
        return {**usage, "cache": cache_account(stream)} if self._with_account else usage


async def create_message(service: Service, body: MessagesBody, request: Request) -> Response:
    """Handle a request."""
    service.require_model(body.model)
    params = body.sampling_params(service.defaults, has_budgets=service.client.frontend.has_thinking_end)
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    body, thread = body.in_thread(service.responses, owner_of(request))
    if body.max_tokens == 0:
        thread = replace(thread, is_kept=False)  # there is no answer to continue
    conversation = body.conversation(service.picture_placeholders(), thread.earlier)
    with service.client.expect(params.n):
        prompt = await render(service, body, conversation, salt())
        checked = await service.bind(params, conversation.box, prompt)
    stored = Stored(thread, diagnosis_of(service, body, conversation, owner_of(request), salt()))
    message = Message(service, body, conversation.box, prompt, checked, salt, stored)
    if body.stream:
        return EventStream(message.job, named_events(request.url.path, message.events()))
    return json_response(await message.answer())


def diagnosis_of(service: Service, body: MessagesBody, conversation: Conversation, owner: str, salt: str) -> Diagnosis:
    """Return the comparison that a request asks for, once its prompt is rendered. Raises as ``read_previous_id``."""
    owner = f"{owner}/diagnostics"  # not found below /v1/responses
    if body.diagnostics is None:
        return Diagnosis(service.responses, owner)
    history, box, placeholders = conversation
    rendered = Rendered(
        service.name_of(body.model),
        box.tools,
        [entry.message for entry in service.renderer.read(history.messages)],
        placeholders.references if placeholders is not None else (),
        [body.template_options(), salt],
    )
    return Diagnosis(service.responses, owner, rendered, read_previous_id(body.diagnostics))


async def count_tokens(service: Service, body: CountBody, request: Request) -> Response:
    """Count the tokens of a request's prompt."""
    service.require_model(body.model)
    body, thread = body.in_thread(service.responses, owner_of(request))
    conversation = body.conversation(service.picture_placeholders(), thread.earlier)
    prompt = await render(service, body, conversation, service.salt_of(request, body.cache_salt, body.model))
    return json_response({"input_tokens": len(prompt.token_ids)})


async def render(service: Service, body: CountBody, conversation: Conversation, salt: str) -> Prompt:
    """Return a request's prompt under a salt.

    Raises:
        RequestError: the conversation cannot be rendered; the error has the path of the message at fault.
    """
    history, box, placeholders = conversation
    try:
        return await service.render(
            history.messages,
            tools=box.tools,
            template_options=body.template_options(),
            salt=salt,
            continue_final_message=body.continues(history),
            placeholders=placeholders,
        )
    except MessageError as error:
        raise RequestError(f"{history.paths[error.index]}: {error.reason}", param=error.param) from error
