"""``/inference/v1/generate``: tokens in, tokens out, with vLLM's body and answer.

Sampling parameters are those of the request alone, not the model's recommended ones: what trains a model must know how
it was sampled.
"""

import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any, Final

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.errors import RequestError
from strandline.records.outputs import OutputDelta
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.gate import own_name
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import EventStream, json_response, plain_events
from strandline.server.requests.request_bodies import (
    Count,
    SamplingFields,
    StreamOptions,
    Strings,
    Tokens,
    Whole,
    check_extra,
    check_unicode,
)
from strandline.server.requests.routed_experts import routed_experts
from strandline.server.requests.service import Salt, Service
from strandline.server.requests.structured_fields import structure_of
from strandline.server.requests.usage_and_logprobs import (
    Json,
    handed_over,
    num_prompt_top,
    prompt_logprobs,
    token_logprobs,
    usage,
    usage_so_far,
)
from strandline.text.frontend import CheckedParams

NOT_SERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "content_parts": ([],),
    "features": ({},),
    "output_mode": ("tokens",),
    "parse_context": (),
}
"""Fields of the body that change the answer, and the values (besides null) that do not."""
NOT_SAMPLED: Final[Mapping[str, tuple[Any, ...]]] = {
    "extra_args": ({},),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "repetition_detection": (),
}
"""The same, of the sampling parameters."""
WITHOUT_EFFECT: Final = frozenset(
    {"flat_logprobs", "output_kind", "reasoning_ended", "return_token_ids", "skip_clone", "skip_reading_prefix_cache"}
)
MAX_ID_CHARACTERS: Final = 256


class GenerateParams(SamplingFields):
    """The sampling parameters of a request."""

    n: Whole | None = None
    max_tokens: Whole | None = 16
    logprobs: Count | None = None
    logprob_token_ids: Tokens | None = None
    prompt_logprobs: Whole | None = None
    detokenize: bool = True
    """No effect: no text is returned, and stop strings are always found."""
    structured_outputs: dict[str, Any] | None = None
    routed_experts_prompt_start: Count = 0
    """Tokens of the prompt whose experts are left out."""


class GenerateBody(BaseModel):
    """Body of ``/inference/v1/generate``."""

    model_config = ConfigDict(strict=True, extra="allow")

    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: GenerateParams = Field(default_factory=GenerateParams)
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)] | None = None
    priority: Whole | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    include_cache_account: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    def params(self, *, records_routing: bool) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            records_routing: whether the engine records the experts of tokens.

        Raises:
            RequestError: a value is out of range, or the body asks for what is not supported.
        """
        given = self.sampling_params
        check_extra(self.model_extra, NOT_SERVED, WITHOUT_EFFECT)
        check_extra(given.model_extra, NOT_SAMPLED, WITHOUT_EFFECT)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if given.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")
        priority = {} if self.priority is None else {"priority": self.priority}
        structure = structure_of({"structured_outputs": given.structured_outputs})
        values = {**given.given(), "max_tokens": given.max_tokens, "detokenize": bool(given.stop), **priority}
        values["returns_routed_experts"] = records_routing
        return SamplingParams(structured_outputs=structure, **values)


class Generation:
    """A request and its response."""

    def __init__(
        self, service: Service, body: GenerateBody, params: CheckedParams, salt: Salt, *, name: str | None
    ) -> None:
        self._body, self._service = body, service
        self._num_prompt_top = num_prompt_top(
            body.sampling_params.prompt_logprobs, service.client.frontend.limits.vocab_size
        )
        name = name or f"generate-{unique_id()}"
        self._head: Json = {
            "request_id": body.request_id or name,
            "model": service.name_of(body.model),
            "created": int(time.time()),
            "output_mode": "tokens",
        }
        transfer = service.transfer_params(body.kv_transfer_params)
        self.job = service.submit(name, [Prompt(body.token_ids)], params, salt, transfer)

    async def answer(self) -> Json:
        """Return the complete response."""
        with self.job:
            [delta] = await self.job.whole()
            [stream] = self.job.streams
            version = self._service.client.version_of(stream)
        wants_prompt = self._body.sampling_params.prompt_logprobs is not None
        return {
            **self._head,
            "choices": [self._choice(output) for output in delta.outputs],
            "usage": self._usage(),
            "prompt_logprobs": prompt_logprobs(stream, self._num_prompt_top) if wants_prompt else None,
            "prompt_token_ids": list(stream.prompt_ids),
            "weight_version": version,
            **handed_over(self.job.streams),
        }

    async def chunks(self) -> AsyncIterator[list[Json]]:
        """Yield the response as it is generated: the chunks of what has come at once."""
        [stream] = self.job.streams
        options = self._body.stream_options or StreamOptions()
        async for [(_, delta)] in self.job.bursts():
            chunks = []
            for output in delta.outputs:
                if output.token_ids or output.finish_reason is not None:
                    so_far = {"usage": usage_so_far(stream, delta, output)} if options.continuous_usage_stats else {}
                    chunks.append({**self._head, "choices": [self._choice(output)], **so_far})
            yield chunks
        if options.include_usage or self._body.include_cache_account:
            yield [{**self._head, "choices": [], "usage": self._usage()}]

    def _choice(self, output: OutputDelta) -> Json:
        wants_logprobs = self._body.sampling_params.logprobs is not None or self._wants_given
        num_top = None if self._wants_given else self._body.sampling_params.logprobs
        return {
            "index": output.index,
            "token_ids": output.token_ids,
            "logprobs": token_logprobs(output.logprobs or (), num_top) if wants_logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "routed_experts": None if output.finish_reason is None else self._routed_experts(output.index),
        }

    def _routed_experts(self, index: int) -> str | None:
        """Return the experts of an output that has ended, and of the prompt; None: the engine does not record them."""
        shape = self._service.routing_shape
        first = self._body.sampling_params.routed_experts_prompt_start
        return routed_experts(shape, self.job.streams[0], index, first)

    @property
    def _wants_given(self) -> bool:
        """Whether the log-probabilities of given tokens are wanted, rather than those of the most likely ones."""
        return self._body.sampling_params.logprob_token_ids is not None

    def _usage(self) -> Json:
        return usage(self.job.streams, is_batch=False, with_account=self._body.include_cache_account)


class AbortBody(BaseModel):
    """Body of ``/inference/v1/abort_requests``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: Strings


def abort(service: Service, body: AbortBody, request: Request) -> Response:
    """End requests with what they have generated. Names that were given with other API keys name nothing."""
    service.client.abort({*body.request_ids, *(own_name(request, name) for name in body.request_ids)})
    return Response()


async def generate(service: Service, body: GenerateBody, request: Request) -> Response:
    """Handle a request."""
    service.require_model(body.model)
    check_unicode({"request_id": body.request_id})
    params = body.params(records_routing=service.routing_shape is not None)
    with service.client.expect(params.n):
        checked = await service.check(params)
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    name = None if body.request_id is None else own_name(request, body.request_id)
    generation = Generation(service, body, checked, salt, name=name)
    if body.stream:
        return EventStream(generation.job, plain_events(request.url.path, generation.chunks()))
    return json_response(await generation.answer())
