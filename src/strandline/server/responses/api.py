"""``/v1/responses``: OpenAI's Responses API."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from strandline.errors import EngineError, RequestError
from strandline.records.outputs import OutputDelta
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.error_responses import UnknownPreviousResponseError, UnknownResponseError, status_of
from strandline.server.http.gate import owner_of
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import EventStream, json_response, named_events
from strandline.server.requests.rendered import Rendered
from strandline.server.requests.request_bodies import (
    Count,
    Objects,
    SamplingFields,
    Strings,
    Whole,
    check_extra,
    check_foreign,
    check_unicode,
    effort_options,
    sent_as,
)
from strandline.server.requests.response_store import ResponseStore
from strandline.server.requests.service import Salt, Service
from strandline.server.requests.structured_fields import structure_of
from strandline.server.requests.text_logprobs import TextLogprobs
from strandline.server.requests.usage_and_logprobs import Json, cache_account, draft_counts
from strandline.server.responses.diagnostics import CacheOptions, Comparison
from strandline.server.responses.history import COMPACTIONS, History
from strandline.server.responses.input_items import read_items, with_ids
from strandline.server.responses.items import Items
from strandline.server.responses.reasoning_seal import ReasoningSeal
from strandline.server.responses.tools import DeclaredTools
from strandline.text.frontend import CheckedParams
from strandline.text.picture_placeholders import PicturePlaceholders
from strandline.text.segments import merge_segments
from strandline.text.thinking import ReasoningCount

NOT_SERVED: Final[Mapping[str, str]] = {
    "background": "a response is generated while its request is open",
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "no prompts are stored; send the prompt as instructions and input",
}
"""Fields that are not served, and why or what to send instead."""
FOREIGN: Final[Mapping[str, Sequence[str]]] = {
    "max_completion_tokens": ["max_output_tokens"],
    "max_tokens": ["max_output_tokens"],
    "messages": ["input"],
    "reasoning_effort": ["reasoning.effort"],
    "response_format": ["text.format"],
    "stop_sequences": ["stop"],
    "system": ["instructions"],
}
"""Fields of other APIs, and what this one has instead: as in ``check_foreign``."""
TEXT_FORMAT: Final = "text.format"
EFFORT: Final = "reasoning.effort"
LOGPROBS: Final = "message.output_text.logprobs"
"""Value of ``include`` that requests log-probabilities."""
SEALED: Final = "reasoning.encrypted_content"
"""Value of ``include`` that requests reasoning in a form that clients send back."""
INCOMPLETE: Final = {"length": "max_output_tokens", "abort": "abort"}
"""Finish reasons of outputs that are not complete, and what the response says about them."""
REPEATED: Final = ("instructions", "metadata", "text", "tool_choice", "tools")
"""Fields that the response repeats."""
LABELS: Final = ("prompt_cache_key", "safety_identifier", "user")
"""Fields without effect that the response repeats."""

WITHOUT_RESULT: Final = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of ``include`` that request what no response has."""


class ResponsesBody(SamplingFields):
    """Body of ``/v1/responses``."""

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    n: Whole | None = None
    stream: bool | None = False
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None
    include: Strings | None = None
    top_logprobs: Count | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    include_cache_account: bool = False
    return_token_ids: bool | None = False

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters: the model's defaults, overridden by the body's fields.

        Raises:
            RequestError: a value is out of range, or the body asks for what is not supported.
        """
        check_foreign(self, FOREIGN)
        check_extra(self.model_extra)
        for name, why in NOT_SERVED.items():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: {why}", param=name)
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1 for /v1/responses, got {self.n}", param="n")
        for value in self.include or ():
            if value not in (LOGPROBS, SEALED, *WITHOUT_RESULT):
                known = ", ".join((LOGPROBS, SEALED, *WITHOUT_RESULT))
                raise RequestError(f"include must be among {known}; got {value!r:.100}", param="include")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        wanted = {"structured_outputs": self.structured_outputs, TEXT_FORMAT: (self.text or {}).get("format")}
        with sent_as({"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}):
            return SamplingParams(
                **{**defaults, **self.given()},
                max_tokens=0 if self.cache_options.prewarm else self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
                structured_outputs=structure_of(wanted, TEXT_FORMAT),
            )

    @property
    def effort(self) -> Any:
        """Effort of reasoning; None: the chat template's default."""
        return (self.reasoning or {}).get("effort")

    @property
    def cache_options(self) -> CacheOptions:
        """Raises ``RequestError``: they are malformed."""
        return CacheOptions.read(self.prompt_cache_options)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


class Conversation:
    """What a request asks, in the server's terms.

    Args:
        owner: the client, whose stored responses the request may name.
        placeholders: take the pictures' place; None: the model reads none.

    Raises:
        RequestError: an item or a tool is malformed, the choice of a tool cannot be served, or something that the
            request names is not stored.
    """

    def __init__(
        self, body: ResponsesBody, owner: str, store: ResponseStore, placeholders: PicturePlaceholders | None = None
    ) -> None:
        self.is_stored = store.is_on and body.store is not False
        repeated = (*REPEATED, "input") if self.is_stored else REPEATED
        check_unicode({**(body.model_extra or {}), **{name: getattr(body, name) for name in repeated}})
        self._seal = ReasoningSeal(owner)
        self.tools = DeclaredTools()
        self.tools.add(body.tools or (), "tools")
        earlier = store.conversation(owner, body.previous_response_id) if body.previous_response_id else ()
        self._own_items = read_items(body.input, lambda item_id: store.item(owner, item_id))
        items: Sequence[Any] = self._own_items
        if placeholders is not None:
            earlier, items = placeholders.insert(earlier, "previous_response_id"), placeholders.insert(items, "input")
        history = History(self.tools, self._seal.unseal)
        self.messages = history.read(body.instructions, items, earlier)
        self._updates = history.updates
        self.box = self.tools.toolbox(body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
        self.placeholders = placeholders
        self._wants_sealed = SEALED in (body.include or ())
        self._store, self._owner = store, owner

    def updated(self, body: ResponsesBody) -> ResponsesBody:
        """Return a body with what items of the conversation replace in it."""
        changed = {name: {**(getattr(body, name) or {}), **value} for name, value in self._updates.items() if value}
        return body.model_copy(update=changed) if changed else body

    @property
    def is_compacted(self) -> bool:
        """Whether an item of the request's own stands for several earlier ones."""
        return any(item.get("type") in COMPACTIONS for item in self._own_items)

    def rendered(self, service: Service, body: ResponsesBody) -> Rendered:
        """Return what the prompt is rendered from."""
        pictures = self.placeholders.references if self.placeholders is not None else ()
        messages = [entry.message for entry in service.renderer.read(self.messages)]
        return Rendered(service.name_of(body.model), self.box.tools, messages, pictures, body.effort)

    def keep(self, response: Json) -> None:
        """Store a finished response if the request asks for that, which is the default."""
        if self.is_stored:
            self._store.add(self._owner, response, with_ids(self._own_items))

    def items(self, logprobs: TextLogprobs) -> Items:
        """Return the response's items, whose messages take log-probabilities of their tokens."""
        return Items(self.tools.tool, logprobs, self._seal.seal if self._wants_sealed else None)


class ModelResponse:
    """A request and its response."""

    def __init__(
        self,
        service: Service,
        body: ResponsesBody,
        conversation: Conversation,
        prompt: Prompt,
        checked: CheckedParams,
        salt: Salt,
        comparison: Comparison | None = None,
    ) -> None:
        params = checked.params
        self._body = body
        self._comparison = comparison
        self._conversation = conversation
        self._head: Json = {
            "id": f"resp_{unique_id()}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "background": False,
            "model": service.name_of(body.model),
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": conversation.is_stored,
            "temperature": params.temperature,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "service_tier": "default",
            **{name: (body.model_extra or {}).get(name) for name in LABELS},
            **body.cache_options.repeated(),
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }
        self._parser = service.output_format.parser(prompt.text or "", conversation.box.schemas)
        self._logprobs = TextLogprobs(body.top_logprobs or 0)
        self._items = conversation.items(self._logprobs)
        self._token_ids: list[int] = []
        rules, tokenizer = checked.reasoning, service.tokenizer
        self._reasoning = None if rules is None else ReasoningCount(tokenizer, rules, checked.hidden_ids)
        self.job = service.submit(self._head["id"], [prompt], checked, salt)

    async def answer(self) -> Json:
        """Return the complete response."""
        with self.job:
            [delta] = await self.job.whole()
        [output] = delta.outputs
        self._note_tokens(output)
        segments = merge_segments([*self._parser.feed(output.text, output.call_marks), *self._parser.finish()])
        self._items.append(segments)
        self._end_items(output)
        return self._finish(output)

    async def events(self) -> AsyncIterator[list[Json]]:
        """Yield the response as it is generated: the events of what has come at once."""
        numbers = count()
        try:
            async for events in self._events():
                yield [{**event, "sequence_number": next(numbers)} for event in events]
        except (RequestError, EngineError) as error:
            fault = {"code": status_of(error)[1] or "server_error", "message": str(error)}
            failed = {**self._head, "status": "failed", "error": fault, "incomplete_details": None, "usage": None}
            event = {"type": "response.failed", "response": {**failed, "output": self._items.items}}
            yield [{**event, "sequence_number": next(numbers)}]
            raise

    async def _events(self) -> AsyncIterator[list[Json]]:
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        async for [(_, delta)] in self.job.bursts():
            [output] = delta.outputs
            self._note_tokens(output)
            events = self._items.append(self._parser.feed(output.text, output.call_marks))
            if delta.finished:
                events += self._items.append(self._parser.finish()) + self._end_items(output)
                events.append({"type": f"response.{self._status(output)}", "response": self._finish(output)})
            yield events

    def _incomplete_reason(self, last: OutputDelta) -> str | None:
        """Return why the response is incomplete; None: it is complete."""
        is_computed = last.finish_reason == "length" and self._body.cache_options.prewarm
        return None if is_computed else INCOMPLETE.get(last.finish_reason or "")

    def _status(self, last: OutputDelta) -> str:
        return "completed" if self._incomplete_reason(last) is None else "incomplete"

    def _end_items(self, last: OutputDelta) -> list[Json]:
        """Close the last item and return its events; a prompt that is computed in advance has no item."""
        return [] if self._body.cache_options.prewarm else self._items.finish(self._status(last))

    def _finish(self, last: OutputDelta) -> Json:
        """Store the response, as the request asks, and return it."""
        status, reason = self._status(last), self._incomplete_reason(last)
        response = {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._items.items,
            "usage": self._usage(),
        }
        if self._body.return_token_ids:
            response |= {"prompt_token_ids": list(self.job.streams[0].prompt_ids), "token_ids": self._token_ids}
        if self._comparison is not None:
            response["prompt_cache_diagnostics"] = self._comparison.diagnostics(self._num_cached_tokens)
        self._conversation.keep(response)
        return response

    @property
    def _num_cached_tokens(self) -> int:
        [stream] = self.job.streams
        return stream.account.hit if stream.account is not None else 0

    def _usage(self) -> Json:
        [stream] = self.job.streams
        num_prompt, num_output = len(stream.prompt_ids), stream.num_output_tokens
        usage: Json = {
            "input_tokens": num_prompt,
            # OpenAI charges for writing to its cache; here these tokens are ordinary ones.
            "input_tokens_details": {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {
                "reasoning_tokens": self._reasoning.num_tokens if self._reasoning is not None else 0,
                **draft_counts(stream.speculation),
            },
            "total_tokens": num_prompt + num_output,
        }
        if self._body.include_cache_account:
            usage["cache"] = cache_account(stream)
        return usage

    def _note_tokens(self, output: OutputDelta) -> None:
        self._logprobs.add(output)
        self._token_ids += output.token_ids
        if self._reasoning is not None:
            for token in output.token_ids:
                self._reasoning.append(token)


async def create_response(service: Service, body: ResponsesBody, request: Request) -> Response:
    """Handle a request."""
    service.require_model(body.model)
    body.sampling_params(service.defaults)
    placeholders = service.picture_placeholders()
    conversation = Conversation(body, owner_of(request), service.responses, placeholders)
    body = conversation.updated(body)
    params = body.sampling_params(service.defaults)
    box = conversation.box
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    with service.client.expect(params.n):
        prompt = await _render(service, body, conversation, placeholders, salt())
        checked = await service.bind(params, box, prompt)
    comparison = _compared(service, body, conversation, owner_of(request))
    response = ModelResponse(service, body, conversation, prompt, checked, salt, comparison)
    if body.stream:
        return EventStream(response.job, named_events(request.url.path, response.events()))
    return json_response(await response.answer())


def _compared(service: Service, body: ResponsesBody, conversation: Conversation, owner: str) -> Comparison | None:
    """Compare a request's prompt, once it is rendered, with that of the response that it names; None: it names none."""
    response_id, store = body.cache_options.comparison_id, service.responses
    if response_id is None:
        return None
    if not store.is_on:
        return Comparison("unavailable")
    try:
        response, items = store.response(owner, response_id), store.input_items(owner, response_id)
    except (UnknownResponseError, UnknownPreviousResponseError):
        return Comparison("comparison_response_not_found")
    fields = {name: response[name] for name in ("model", "instructions", "tools", "reasoning")}
    try:
        earlier_body = ResponsesBody(input=items, **fields)
        earlier = Conversation(earlier_body, owner, store, service.picture_placeholders())
        prompts = (conversation.rendered(service, body), earlier.rendered(service, earlier_body))
    except RequestError:
        return Comparison("unavailable")  # it was made for an adapter or a template that is gone
    is_compacted = conversation.is_compacted and not earlier.is_compacted
    return Comparison.of(*prompts, response["usage"]["input_tokens"], is_compacted=is_compacted)


async def count_input_tokens(service: Service, body: ResponsesBody, request: Request) -> Response:
    """Count the tokens of a request's prompt."""
    service.require_model(body.model)
    body.sampling_params(service.defaults)
    placeholders = service.picture_placeholders()
    conversation = Conversation(body, owner_of(request), service.responses, placeholders)
    body = conversation.updated(body)
    salt = service.salt_of(request, body.cache_salt, body.model)
    prompt = await _render(service, body, conversation, placeholders, salt)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def _render(
    service: Service,
    body: ResponsesBody,
    conversation: Conversation,
    placeholders: PicturePlaceholders | None,
    salt: str,
) -> Prompt:
    with sent_as({"messages": "input"}):
        return await service.render(
            conversation.messages,
            tools=conversation.box.tools,
            template_options=effort_options(body.effort, EFFORT),
            salt=salt,
            placeholders=placeholders,
        )
