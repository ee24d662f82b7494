"""``/v1/completions``."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from strandline.errors import RequestError
from strandline.records.outputs import CompletionOutput, RequestOutput
from strandline.records.sampling_params import SamplingParams
from strandline.server.answers import Entry, Growth, Json, completion_logprobs, usage, usage_so_far
from strandline.server.bodies import CompletionBody
from strandline.server.client import Prompt
from strandline.server.gate import salt_of
from strandline.server.service import Service
from strandline.server.streams import CLIENT_CLOSED_REQUEST, EventStream, json_response, plain_events, while_connected


class Completion:
    """One request and its answer."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        salt: str,
        *,
        is_batch: bool,
    ) -> None:
        self._body = body
        self._service = service
        self._is_batch = is_batch
        self._name = f"cmpl-{uuid4().hex}"
        self._head = {
            "id": self._name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_names[0],
        }
        self._num_outputs = params.n
        self.job = service.client.submit(self._name, prompts, params, salt)

    async def answer(self) -> Json:
        """Return the whole answer."""
        with self.job:
            outputs = await self.job.outputs()
        choices = [
            self._choice(place, output, completion)
            for place, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": self._usage(outputs)}

    async def chunks(self) -> AsyncIterator[Json]:
        """Yield the answer as it grows."""
        growths = [[Growth() for _ in range(self._num_outputs)] for _ in self.job.collectors]
        is_new = [[self._body.echo] * self._num_outputs for _ in growths]
        is_first = [[True] * self._num_outputs for _ in growths]
        async for place, output in self.job.updates():
            for completion, growth in zip(output.outputs, growths[place], strict=True):
                offset = growth.num_characters
                text, entries, has_news = growth.take(completion)
                if not has_news:
                    continue
                echo, is_new[place][completion.index] = is_new[place][completion.index], False
                part = self._part(place, output, completion, text, entries, echo, offset)
                if self._body.return_token_ids:
                    first, is_first[place][completion.index] = is_first[place][completion.index], False
                    part["prompt_token_ids"] = list(output.prompt_token_ids) if first else None
                    part["token_ids"] = growth.take_token_ids(completion)
                yield {**self._head, "choices": [part], **self._usage_so_far(output, completion)}
        if self._body.wants_usage():
            outputs = [collector.output() for collector in self.job.collectors]
            yield {**self._head, "choices": [], "usage": self._usage(outputs)}

    def _choice(self, place: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        text, entries = completion.text, completion.logprobs or []
        choice = self._part(place, output, completion, text, entries, self._body.echo, 0)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choice["token_ids"] = completion.token_ids
        return choice

    def _part(
        self,
        place: int,
        output: RequestOutput,
        completion: CompletionOutput,
        text: str,
        entries: Sequence[Entry],
        echo: bool,
        offset: int,
    ) -> Json:
        """Return one choice, or a piece of it.

        Args:
            echo: begin with the prompt.
            offset: characters of the output before this piece.
        """
        prompt = output.prompt or "" if self._body.echo else ""
        logprobs = None
        if self._body.logprobs is not None:
            pairs = [(_text(entry), entry) for entry in entries]
            before = self._prompt_pairs(output) if echo else []
            logprobs = completion_logprobs([*before, *pairs], 0 if echo else len(prompt) + offset)
        return {
            "index": place * self._num_outputs + completion.index,
            "text": prompt + text if echo else text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _prompt_pairs(self, output: RequestOutput) -> list[tuple[str, Entry | None]]:
        entries = output.prompt_logprobs or []
        first = self._service.tokenizer.decode([output.prompt_token_ids[0]]) if entries else ""
        return [(first if entry is None else _text(entry), entry) for entry in entries]

    def _usage_so_far(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        return {"usage": usage_so_far(output, completion)} if self._body.wants_continuous_usage() else {}

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        with_account = self._body.include_cache_account
        return usage(outputs, is_batch=self._is_batch, with_account=with_account)


def _num_prompt_logprobs(body: CompletionBody) -> int | None:
    """Return how many log-probabilities the prompt's tokens need. A prompt that is only echoed is run for them."""
    if not body.echo:
        return None
    return 0 if body.max_tokens == 0 and body.logprobs is None else body.logprobs


def _text(entry: Entry) -> str:
    return next(iter(entry.values())).decoded_token or ""


async def complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """Answer a request."""
    service.require_model(body.model)
    num_logprobs = _num_prompt_logprobs(body)
    params = body.sampling_params(service.defaults, max_tokens=body.max_tokens, prompt_logprobs=num_logprobs)
    given, is_batch = _given(body)
    with service.client.expect(len(given) * params.n):
        prompts = [await _prompt(service, body, each) for each in given]
        await service.check(params.structured_outputs)
    salt = salt_of(request, body.cache_salt)
    completion = Completion(service, body, prompts, params, salt, is_batch=is_batch)
    if body.stream:
        return EventStream(completion.job, plain_events(request.url.path, completion.chunks()))
    answer = await while_connected(request, completion.answer())
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else json_response(answer)


def _given(body: CompletionBody) -> tuple[list[str | list[int]], bool]:
    """Return the prompts as they were given, and whether they came in a list."""
    given: Any = body.prompt
    if not given:
        raise RequestError("the prompt is empty; at least one token is needed")
    is_batch = isinstance(given, list) and not isinstance(given[0], int)
    return given if is_batch else [given], is_batch


async def _prompt(service: Service, body: CompletionBody, given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        return await service.encode(given, add_special_tokens=body.add_special_tokens)
    return Prompt(given, await service.decode(given)) if body.echo else Prompt(given)
