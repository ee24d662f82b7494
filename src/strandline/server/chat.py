"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncIterator
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from strandline.engine.outputs import CompletionOutput, RequestOutput
from strandline.errors import RequestError
from strandline.server.answers import Growth, Json, chat_logprobs, usage
from strandline.server.bodies import ChatBody
from strandline.server.client import Prompt
from strandline.server.service import Service
from strandline.server.streams import CLIENT_CLOSED_REQUEST, EventStream, json_response, plain_events, while_connected


class Chat:
    """One request and its answer."""

    def __init__(self, service: Service, body: ChatBody, prompt: Prompt) -> None:
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_names[0],
        }
        if self._num_top and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = body.sampling_params(
            service.defaults, max_tokens=max_tokens, logprobs=self._num_top if body.logprobs else None
        )
        self._num_outputs = params.n
        self.job = service.client.submit(str(self._head["id"]), [prompt], params, body.cache_salt or "")

    async def answer(self) -> Json:
        """Return the whole answer."""
        with self.job:
            [output] = await self.job.outputs()
        choices = [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": chat_logprobs(completion.logprobs or [], self._num_top) if self._body.logprobs else None,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": self._usage(output)}

    async def chunks(self) -> AsyncIterator[Json]:
        """Yield the answer as it grows."""
        growths = [Growth() for _ in range(self._num_outputs)]
        for index in range(self._num_outputs):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._head, "choices": [choice]}
        async for _, output in self.job.updates():
            for completion, growth in zip(output.outputs, growths, strict=True):
                chunk = self._chunk(completion, growth)
                if chunk is not None:
                    yield {**self._head, "choices": [chunk]}
        if self._body.wants_usage():
            yield {**self._head, "choices": [], "usage": self._usage(self.job.collectors[0].output())}

    def _chunk(self, completion: CompletionOutput, growth: Growth) -> Json | None:
        text, entries, has_news = growth.take(completion)
        if not has_news:
            return None
        return {
            "index": completion.index,
            "delta": {"content": text} if text or entries else {},
            "logprobs": chat_logprobs(entries, self._num_top) if entries else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _usage(self, output: RequestOutput) -> Json:
        return usage([output], is_batch=False, with_account=self._body.include_cache_account)


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a request."""
    service.require_model(body.model)
    prompt = await service.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template_options=body.chat_template_kwargs,
    )
    started = Chat(service, body, prompt)
    if body.stream:
        return EventStream(started.job, plain_events(started.chunks()))
    answer = await while_connected(request, started.answer())
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else json_response(answer)
