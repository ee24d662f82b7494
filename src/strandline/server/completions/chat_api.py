"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncIterator
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from strandline.errors import RequestError
from strandline.records.outputs import OutputDelta, RequestDelta
from strandline.records.transfer_params import TransferParams
from strandline.server.engines.prompt import Prompt
from strandline.server.http.request_ids import unique_id
from strandline.server.http.sse import EventStream, json_response, plain_events
from strandline.server.requests.output_parser import OutputParser, chat_deltas, chat_finish_reason, chat_message
from strandline.server.requests.request_bodies import ChatBody, sent_as
from strandline.server.requests.routed_experts import routed_experts
from strandline.server.requests.service import Salt, Service
from strandline.server.requests.text_logprobs import TextLogprobs
from strandline.server.requests.tools import Toolbox, toolbox
from strandline.server.requests.usage_and_logprobs import (
    Json,
    chat_logprobs,
    handed_over,
    id_name,
    num_prompt_top,
    prompt_logprobs,
    text_name,
    usage,
    usage_so_far,
)
from strandline.text.frontend import CheckedParams
from strandline.text.segments import Segment, merge_segments


class Chat:
    """A request and its response."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        prompt: Prompt,
        params: CheckedParams,
        box: Toolbox,
        salt: Salt,
        transfer: TransferParams | None = None,
    ) -> None:
        self._body = body
        self._routing_shape = service.routing_shape
        self._num_top = (body.top_logprobs or 0) if body.logprob_token_ids is None else None
        self._token_name = id_name if body.return_tokens_as_token_ids else text_name
        self._num_prompt_top = num_prompt_top(body.prompt_logprobs, service.client.frontend.limits.vocab_size)
        self._reasoning_fields = service.reasoning_fields if body.include_reasoning else ()
        self._reports_usage = body.wants_continuous_usage()
        self._head = {
            "id": f"chatcmpl-{unique_id()}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.name_of(body.model),
        }
        self._echo = prompt.continued if body.echo else ""
        given = ("", box.schemas) if self._echo else (prompt.text or "", box.schemas, prompt.continued)
        self._parsers = [service.output_format.parser(*given) for _ in range(params.params.n)]
        self._is_echoed = [not self._echo for _ in self._parsers]
        self._shown_logprobs = [TextLogprobs(self._num_top, self._token_name) for _ in self._parsers]
        self._token_ids: list[list[int]] = [[] for _ in self._parsers]
        """Token ids of each output that have not been sent yet."""
        self.job = service.submit(str(self._head["id"]), [prompt], params, salt, transfer)

    async def answer(self) -> Json:
        """Return the complete response."""
        with self.job:
            [delta] = await self.job.whole()
        choices = []
        for output, parser in zip(delta.outputs, self._parsers, strict=True):
            self._feed(output, parser)
            parser.finish()
            choices.append(
                {
                    "index": output.index,
                    "message": chat_message(parser, self._reasoning_fields),
                    "logprobs": self._logprobs(output, parser),
                    "finish_reason": chat_finish_reason(parser, output.finish_reason),
                    "stop_reason": output.stop_reason,
                    **({"token_ids": output.token_ids} if self._body.return_token_ids else {}),
                    **self._routed_experts(output.index),
                }
            )
        tail = {**self._prompt_ids(), **handed_over(self.job.streams)}
        if self._body.prompt_logprobs is not None:
            tail["prompt_logprobs"] = prompt_logprobs(self.job.streams[0], self._num_prompt_top)
        return {**self._head, "choices": choices, "usage": self._usage(), **tail}

    async def chunks(self) -> AsyncIterator[list[Json]]:
        """Yield the response as it is generated: the chunks of what has come at once."""
        is_begun = False
        async for [(_, delta)] in self.job.bursts():
            # Not before the first token: load generators measure the time to the first event.
            opening = [] if is_begun else self._opening(delta)
            is_begun = True
            yield opening + [
                self._chunk(choice, delta, output)
                for output, parser in zip(delta.outputs, self._parsers, strict=True)
                for choice in self._choices(output, parser)
            ]
        if self._body.wants_usage():
            yield [{**self._head, "choices": [], "usage": self._usage()}]

    def _opening(self, delta: RequestDelta) -> list[Json]:
        """Return the first chunk of each output, with the role."""
        chunks = []
        for output in delta.outputs:
            opening = {"role": "assistant", "content": ""}
            choice = {"index": output.index, "delta": opening, "logprobs": None, "finish_reason": None}
            chunks.append({**self._chunk(choice, delta, output), **self._prompt_ids()})
        return chunks

    def _choices(self, output: OutputDelta, parser: OutputParser) -> list[Json]:
        """Return a delta of one output as choices, one per part; the last has the finish reason, if any."""
        token_ids = self._token_ids[output.index]
        token_ids += output.token_ids
        if not output.is_visible:
            return []
        is_end = output.finish_reason is not None
        segments = self._feed(output, parser)
        segments = merge_segments([*segments, *parser.finish()] if is_end else segments)
        found = chat_deltas(parser, segments, self._reasoning_fields)
        wants_ids = bool(self._body.return_token_ids)
        logprobs = self._logprobs(output, parser)
        has_logprobs = logprobs is not None and bool(logprobs["content"])
        if not found:
            if not (is_end or has_logprobs or wants_ids):
                return []
            found = [{"content": ""} if has_logprobs else {}]
        choices: list[Json] = [
            {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for delta in found
        ]
        choices[0]["logprobs"] = logprobs if has_logprobs else None
        choices[-1]["finish_reason"] = chat_finish_reason(parser, output.finish_reason)
        choices[-1]["stop_reason"] = output.stop_reason
        if wants_ids:
            choices[0]["token_ids"] = list(token_ids)
        token_ids.clear()
        return choices

    def _feed(self, output: OutputDelta, parser: OutputParser) -> list[Segment]:
        """Parse what is new of an output, after the beginning of its message if that is to be returned too."""
        segments: list[Segment] = []
        if not self._is_echoed[output.index]:
            self._is_echoed[output.index] = True
            segments += parser.feed(self._echo)
        return segments + parser.feed(output.text, output.call_marks)

    def _logprobs(self, output: OutputDelta, parser: OutputParser) -> Json | None:
        """Return the log-probabilities of an output's new tokens, but not of reasoning that the client does not get."""
        if not self._body.logprobs:
            return None
        if self._body.include_reasoning:
            return chat_logprobs(output.logprobs or [], self._num_top, name=self._token_name)
        shown = self._shown_logprobs[output.index]
        shown.add(output)
        spans, parser.shown = parser.shown, []
        offset = len(self._echo)
        return {"content": shown.take([(start - offset, end - offset) for start, end in spans]), "refusal": None}

    def _routed_experts(self, index: int) -> Json:
        if self._routing_shape is None:
            return {}
        first = self._body.routed_experts_prompt_start
        return {"routed_experts": routed_experts(self._routing_shape, self.job.streams[0], index, first)}

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": list(self.job.streams[0].prompt_ids)} if self._body.return_token_ids else {}

    def _chunk(self, choice: Json, delta: RequestDelta, output: OutputDelta) -> Json:
        chunk: Json = {**self._head, "choices": [choice]}
        if self._reports_usage:
            chunk["usage"] = usage_so_far(self.job.streams[0], delta, output)
        return chunk

    def _usage(self) -> Json:
        return usage(self.job.streams, is_batch=False, with_account=self._body.include_cache_account)


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Handle a request."""
    service.require_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    box = toolbox(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
    transfer = service.transfer_params(body.kv_transfer_params)
    max_tokens, sent = body.max_tokens, {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        max_tokens, sent["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    with sent_as(sent):
        params = body.sampling_params(
            service.defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            returns_routed_experts=service.routing_shape is not None and not body.stream,
        )
    salt = partial(service.salt_of, request, body.cache_salt, body.model)
    with service.client.expect(params.n):
        prompt = await service.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            tools=box.tools,
            template_options=body.template_options(),
            salt=salt() if transfer is None else None,  # two engines must encode it alike
            continue_final_message=body.continues(),
            truncation=body.truncation(service.client.frontend.limits.max_model_len),
        )
        checked = await service.bind(params, box, prompt)
    started = Chat(service, body, prompt, checked, box, salt, transfer)
    if body.stream:
        return EventStream(started.job, plain_events(request.url.path, started.chunks()))
    return json_response(await started.answer())
