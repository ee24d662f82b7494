"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncIterator
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from strandline.errors import RequestError
from strandline.records.outputs import CompletionOutput, RequestOutput
from strandline.records.sampling_params import SamplingParams
from strandline.server.answers import Growth, Json, chat_logprobs, usage, usage_so_far
from strandline.server.bodies import ChatBody
from strandline.server.client import Prompt
from strandline.server.gate import salt_of
from strandline.server.pieces import joined
from strandline.server.replies import Reply, deltas, finish_reason, message
from strandline.server.service import Service
from strandline.server.streams import CLIENT_CLOSED_REQUEST, EventStream, json_response, plain_events, while_connected
from strandline.server.tools import Toolbox, toolbox


class Chat:
    """One request and its answer."""

    def __init__(
        self, service: Service, body: ChatBody, prompt: Prompt, params: SamplingParams, box: Toolbox, salt: str
    ) -> None:
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_names[0],
        }
        self._replies = [service.reply_format.reply(prompt.text or "", box.schemas) for _ in range(params.n)]
        self.job = service.client.submit(str(self._head["id"]), [prompt], params, salt)

    async def answer(self) -> Json:
        """Return the whole answer."""
        with self.job:
            [output] = await self.job.outputs()
        choices = []
        for completion, reply in zip(output.outputs, self._replies, strict=True):
            reply.feed(completion.text)
            reply.finish()
            logprobs = chat_logprobs(completion.logprobs or [], self._num_top) if self._body.logprobs else None
            choices.append(
                {
                    "index": completion.index,
                    "message": message(reply),
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(reply, completion.finish_reason),
                    "stop_reason": completion.stop_reason,
                    **({"token_ids": completion.token_ids} if self._body.return_token_ids else {}),
                }
            )
        return {**self._head, "choices": choices, "usage": self._usage(output), **self._prompt_ids(output)}

    async def chunks(self) -> AsyncIterator[Json]:
        """Yield the answer as it grows."""
        growths = [Growth() for _ in self._replies]
        is_begun = False
        async for _, output in self.job.updates():
            # Not before the first token: load generators take the first event for it.
            for index in () if is_begun else range(len(self._replies)):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield {
                    **self._head,
                    "choices": [choice],
                    **self._prompt_ids(output),
                    **self._usage_so_far(output, index),
                }
            is_begun = True
            for completion, growth, reply in zip(output.outputs, growths, self._replies, strict=True):
                for choice in self._choices(completion, growth, reply):
                    yield {**self._head, "choices": [choice], **self._usage_so_far(output, completion.index)}
        if self._body.wants_usage():
            yield {**self._head, "choices": [], "usage": self._usage(self.job.collectors[0].output())}

    def _choices(self, completion: CompletionOutput, growth: Growth, reply: Reply) -> list[Json]:
        """Return what is new of one output, a delta each; the last says why it ended, if it did."""
        text, entries, has_news = growth.take(completion)
        if not has_news:
            return []
        is_end = completion.finish_reason is not None
        pieces = reply.feed(text)
        found = deltas(reply, joined([*pieces, *reply.finish()] if is_end else pieces))
        wants_ids = bool(self._body.return_token_ids)
        if not found:
            if not (is_end or entries or wants_ids):
                return []
            found = [{"content": ""} if entries else {}]
        choices: list[Json] = [
            {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in found
        ]
        choices[0]["logprobs"] = chat_logprobs(entries, self._num_top) if entries else None
        choices[-1]["finish_reason"] = finish_reason(reply, completion.finish_reason)
        choices[-1]["stop_reason"] = completion.stop_reason
        if wants_ids:
            choices[0]["token_ids"] = growth.take_token_ids(completion)
        return choices

    def _prompt_ids(self, output: RequestOutput) -> Json:
        return {"prompt_token_ids": list(output.prompt_token_ids)} if self._body.return_token_ids else {}

    def _usage_so_far(self, output: RequestOutput, index: int) -> Json:
        return {"usage": usage_so_far(output, output.outputs[index])} if self._body.wants_continuous_usage() else {}

    def _usage(self, output: RequestOutput) -> Json:
        return usage([output], is_batch=False, with_account=self._body.include_cache_account)


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a request."""
    service.require_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    box = toolbox(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(service.defaults, max_tokens=max_tokens, logprobs=logprobs)
    with service.client.expect(params.n):
        prompt = await service.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            tools=box.tools,
            template_options=body.chat_template_kwargs,
        )
        params = await service.bind(params, box, prompt.text or "")
    started = Chat(service, body, prompt, params, box, salt_of(request, body.cache_salt))
    if body.stream:
        return EventStream(started.job, plain_events(request.url.path, started.chunks()))
    answer = await while_connected(request, started.answer())
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else json_response(answer)
