"""``/v1/messages``: Anthropic's API, as far as it concerns text."""

from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strandline.engine.outputs import CompletionOutput, RequestOutput
from strandline.engine.sampling_params import SamplingParams
from strandline.server.answers import Growth, Json
from strandline.server.bodies import check_extra
from strandline.server.client import Prompt
from strandline.server.service import Service
from strandline.server.streams import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    json_response,
    named_events,
    while_connected,
)

STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesBody(BaseModel):
    """Of ``/v1/messages``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    cache_salt: str | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters: the model's defaults, and what the body says."""
        check_extra(self.model_extra)
        wishes = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in wishes.items() if value is not None}
        return SamplingParams(**{**defaults, **given}, max_tokens=self.max_tokens, stop=self.stop_sequences)


class Message:
    """One request and its answer."""

    def __init__(self, service: Service, body: MessagesBody, prompt: Prompt) -> None:
        self._head = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.model_names[0],
        }
        params = body.sampling_params(dict(service.defaults))
        self.job = service.client.submit(self._head["id"], [prompt], params, body.cache_salt or "")

    async def answer(self) -> Json:
        """Return the whole answer."""
        with self.job:
            [output] = await self.job.outputs()
        [completion] = output.outputs
        content = [{"type": "text", "text": completion.text}]
        return {**self._head, "content": content, **_end(completion), "usage": _usage(output)}

    async def events(self) -> AsyncIterator[Json]:
        """Yield the answer as it grows."""
        growth, is_started = Growth(), False
        async for _, output in self.job.updates():
            [completion] = output.outputs
            if not is_started:
                is_started = True
                empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
                yield {"type": "message_start", "message": {**self._head, **empty, "usage": _usage(output)}}
                yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            text, _, _ = growth.take(completion)
            if text:
                delta = {"type": "text_delta", "text": text}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}
            if output.finished:
                yield {"type": "content_block_stop", "index": 0}
                yield {"type": "message_delta", "delta": _end(completion), "usage": _usage(output)}
                yield {"type": "message_stop"}


def _end(completion: CompletionOutput) -> Json:
    """Say why it ended, in Anthropic's words."""
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": STOP_REASONS.get(completion.finish_reason or ""), "stop_sequence": None}


def _usage(output: RequestOutput) -> Json:
    """Count tokens; those from the cache are counted apart from the others, as Anthropic does."""
    cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(completion.token_ids) for completion in output.outputs),
    }


async def create_message(service: Service, body: MessagesBody, request: Request) -> Response:
    """Answer a request."""
    service.require_model(body.model)
    system = [{"role": "system", "content": body.system}] if body.system else []
    prompt = await service.render([*system, *body.messages])
    message = Message(service, body, prompt)
    if body.stream:
        return EventStream(message.job, named_events(message.events()))
    answer = await while_connected(request, message.answer())
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else json_response(answer)
