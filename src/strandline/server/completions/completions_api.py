"""``/v1/completions``."""

import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from strandline.errors import RequestError
from strandline.records.outputs import OutputDelta, RequestDelta
from strandline.records.transfer_params import TransferParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import EventStream, json_response, plain_events
from strandline.server.requests.request_bodies import CompletionBody, Truncation
from strandline.server.requests.routed_experts import routed_experts
from strandline.server.requests.service import Salt, Service, truncated_ids
from strandline.server.requests.usage_and_logprobs import (
    Entry,
    Json,
    ScoredToken,
    completion_logprobs,
    handed_over,
    id_name,
    most_likely,
    num_prompt_top,
    prompt_logprobs,
    text_name,
    usage,
    usage_so_far,
)
from strandline.text.frontend import CheckedParams


@dataclass(slots=True)
class _Shown:
    """The part of one output that has been sent to the client."""

    is_empty: bool = True
    end: int = 0
    """The end of the characters, in the output's text, of the tokens whose log-probabilities were sent."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids that have not been sent yet."""


class Completion:
    """A request and its response."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        params: CheckedParams,
        salt: Salt,
        *,
        is_batch: bool,
        transfer: TransferParams | None = None,
    ) -> None:
        self._body = body
        self._service = service
        self._is_batch = is_batch
        self._name = f"cmpl-{unique_id()}"
        self._head = {
            "id": self._name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name_of(body.model),
        }
        self._num_outputs = params.params.n
        self._reports_usage = body.wants_continuous_usage()
        self._num_prompt_top = num_prompt_top(body.prompt_logprobs, service.client.frontend.limits.vocab_size)
        self.job = service.submit(self._name, prompts, params, salt, transfer)

    async def answer(self) -> Json:
        """Return the complete response."""
        with self.job:
            deltas = await self.job.whole()
        choices = [self._choice(index, output) for index, delta in enumerate(deltas) for output in delta.outputs]
        return {**self._head, "choices": choices, "usage": self._usage(), **handed_over(self.job.streams)}

    async def chunks(self) -> AsyncIterator[list[Json]]:
        """Yield the response as it is generated: the chunks of what has come at once."""
        shown = [[_Shown() for _ in range(self._num_outputs)] for _ in self.job.streams]
        async for burst in self.job.bursts():
            yield [
                self._chunk(part, prompt_index, delta, output)
                for prompt_index, delta in burst
                for output in delta.outputs
                for part in self._next_parts(prompt_index, output, shown[prompt_index][output.index])
            ]
        if self._body.wants_usage():
            yield [{**self._head, "choices": [], "usage": self._usage()}]

    def _next_parts(self, prompt_index: int, output: OutputDelta, state: _Shown) -> list[Json]:
        """Return what is new of an output as a choice; nothing if there is nothing to show."""
        state.token_ids += output.token_ids
        if not output.is_visible:
            return []
        part = self._part(prompt_index, output, state)
        if self._body.return_token_ids:
            part["prompt_token_ids"] = list(self.job.streams[prompt_index].prompt_ids) if state.is_empty else None
            part["token_ids"] = state.token_ids
        state.is_empty, state.token_ids = False, []
        return [part]

    def _choice(self, prompt_index: int, output: OutputDelta) -> Json:
        choice = self._part(prompt_index, output, _Shown())
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.job.streams[prompt_index], self._num_prompt_top)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self.job.streams[prompt_index].prompt_ids)
            choice["token_ids"] = output.token_ids
        if (shape := self._service.routing_shape) is not None:
            first = self._body.routed_experts_prompt_start
            choice["routed_experts"] = routed_experts(shape, self.job.streams[prompt_index], output.index, first)
        return choice

    def _part(self, prompt_index: int, output: OutputDelta, shown: _Shown) -> Json:
        """Return one choice, or a part of it.

        Args:
            shown: the parts before it; ``end`` is advanced.
        """
        prompt = self.job.streams[prompt_index].prompt or "" if self._body.echo else ""
        logprobs = None
        if (num_top := self._body.logprobs) is not None:
            name = id_name if self._body.return_tokens_as_token_ids else text_name
            before = self._prompt_tokens(prompt_index, prompt, num_top) if self._body.echo and shown.is_empty else []
            logprobs = completion_logprobs([*before, *_output_tokens(output, len(prompt), shown)], name=name)
        return {
            "index": prompt_index * self._num_outputs + output.index,
            "text": prompt + output.text if shown.is_empty else output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _prompt_tokens(self, prompt_index: int, prompt: str, num_top: int) -> list[ScoredToken]:
        stream = self.job.streams[prompt_index]
        tokens, offset, decoder = list[ScoredToken](), 0, getincrementaldecoder("utf-8")("replace")
        for token, entry in zip(stream.prompt_ids, stream.prompt_logprobs or (), strict=False):
            text = _text(entry) if entry else self._service.tokenizer.decode([token])
            tokens.append(ScoredToken(text, min(offset, len(prompt)), entry and most_likely(entry, num_top)))
            known = stream.token_bytes[token] if stream.token_bytes is not None else None
            offset += len(decoder.decode(text.encode() if known is None else known))
        return tokens

    def _chunk(self, part: Json, prompt_index: int, delta: RequestDelta, output: OutputDelta) -> Json:
        chunk: Json = {**self._head, "choices": [part]}
        if self._reports_usage:
            chunk["usage"] = usage_so_far(self.job.streams[prompt_index], delta, output)
        return chunk

    def _usage(self) -> Json:
        with_account = self._body.include_cache_account
        return usage(self.job.streams, is_batch=self._is_batch, with_account=with_account)


def _num_prompt_logprobs(body: CompletionBody) -> int | None:
    """Return the number of log-probabilities per prompt token. A prompt that is only echoed is also run for them."""
    wanted = body.prompt_logprobs
    if not body.echo or wanted == -1:
        return wanted
    is_only_echoed = body.max_tokens is not None and body.max_tokens < 1
    echoed = 0 if is_only_echoed and body.logprobs is None else body.logprobs
    return max((count for count in (wanted, echoed) if count is not None), default=None)


def _output_tokens(output: OutputDelta, start: int, shown: _Shown) -> Iterator[ScoredToken]:
    """Yield an output's new tokens with log-probabilities; advance ``shown.end``.

    Args:
        start: characters before the output's text.
    """
    for entry, span in zip(output.logprobs or (), output.token_spans, strict=True):
        first, shown.end = span or (shown.end, shown.end)
        yield ScoredToken(_text(entry), start + first, entry)


def _text(entry: Entry) -> str:
    return next(iter(entry.values())).decoded_token or ""


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Handle a request."""
    service.require_model(body.model)
    num_logprobs = _num_prompt_logprobs(body)
    params = body.sampling_params(
        service.defaults,
        max_tokens=body.max_tokens,
        prompt_logprobs=num_logprobs,
        returns_routed_experts=service.routing_shape is not None and not body.stream,
    )
    given, is_batch = _given(body)
    transfer = service.transfer_params(body.kv_transfer_params, len(given))
    with service.client.expect(len(given) * params.n):
        truncation = body.truncation(service.client.frontend.limits.max_model_len)
        prompts = [await _prompt(service, body, each, truncation) for each in given]
        checked = await service.check(params)
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    completion = Completion(service, body, prompts, checked, salt, is_batch=is_batch, transfer=transfer)
    if body.stream:
        return EventStream(completion.job, plain_events(request.url.path, completion.chunks()))
    return json_response(await completion.answer())


def _given(body: CompletionBody) -> tuple[list[str | list[int]], bool]:
    """Return the prompts as they were given, and whether they came in a list."""
    given: Any = body.prompt
    if not given:
        raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    return given if is_batch else [given], is_batch


async def _prompt(
    service: Service, body: CompletionBody, given: str | list[int], truncation: Truncation | None
) -> Prompt:
    if isinstance(given, str):
        return await service.encode(given, add_special_tokens=body.add_special_tokens, truncation=truncation)
    if truncation is not None:
        given = truncated_ids(given, truncation)
    return Prompt(given, await service.decode(given)) if body.echo else Prompt(given)
