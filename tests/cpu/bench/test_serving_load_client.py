"""One request of the load generator: what it counts as a token, when the clock is read, what is an error."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import httpx
import pytest

from strandline.bench.serving.load_client import ServerUnderLoad
from strandline.bench.serving.options import target_of
from strandline.bench.serving.session import Answer, Ask
from tests.cpu.bench.conftest import serve_options


class Chunks(httpx.AsyncByteStream):
    """A body that comes in pieces."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def ticking() -> Callable[[], float]:
    """Return a clock that goes one second further at every look."""
    ticks = count()
    return lambda: float(next(ticks))


def ask_of(chunks: list[bytes], *flags: str, status: int = 200) -> Answer:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Chunks(chunks)))

    async def send() -> Answer:
        async with ServerUnderLoad(target_of(serve_options(*flags), None, None), ticking(), transport) as server:
            return await server.send(Ask([1, 2, 3], 4))

    return asyncio.run(send())


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
DONE = b"data: [DONE]\n\n"


def test_times_come_from_chunks_and_counts_from_usage() -> None:
    end = event({"text": "", "finish_reason": "length"})
    answer = ask_of([event({"text": "a"}), event({"text": "b"}), end, event(usage=USAGE), DONE])
    assert (answer.text, answer.error) == ("ab", "")
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (3, 2, 1)
    # The clock is read at the start (0), at each of five events (1 to 5) and at the end (6).
    assert (answer.start_s, answer.ttft_s, answer.gaps_s, answer.latency_s) == (0.0, 1.0, [1.0], 6.0)
    assert answer.tpot_s == 5.0


def test_events_may_be_torn_anywhere_and_come_many_at_once() -> None:
    body = (
        b": hello\n\n" + event({"text": "ä"}).replace(b"\n", b"\r\n") + event({"text": "b"}) + event(usage=USAGE) + DONE
    )
    for size in (1, 7, len(body)):
        answer = ask_of([body[start : start + size] for start in range(0, len(body), size)])
        assert (answer.text, answer.error, len(answer.gaps_s)) == ("äb", "", 1)


def test_the_event_that_names_the_role_is_no_first_token() -> None:
    role = event({"delta": {"role": "assistant", "content": ""}})
    said = event({"delta": {"content": "hi"}})
    end = event({"delta": {}, "finish_reason": "stop"})
    answer = ask_of([role, said, end, DONE], "--backend", "openai-chat")
    assert (answer.text, answer.ttft_s, answer.gaps_s, answer.output_tokens) == ("hi", 2.0, [], 1)


def test_a_completions_piece_without_text_is_a_token() -> None:
    answer = ask_of([event({"text": ""}), event({"text": "é"}), event({"text": "", "finish_reason": "stop"}), DONE])
    assert (answer.ttft_s, answer.gaps_s) == (1.0, [1.0])


def test_token_ids_are_taken_where_the_server_gives_them() -> None:
    answer = ask_of([event({"text": "ab", "token_ids": [5, 6]}), event({"text": "", "token_ids": [7]}), DONE])
    assert (answer.token_ids, answer.output_tokens) == ([5, 6, 7], 3)


@pytest.mark.parametrize(
    ("chunks", "status", "message"),
    [
        ([b'{"error": {"message": "busy"}}'], 429, "HTTP 429"),
        ([event({"text": "a"}), b'data: {"error": {"message": "gone"}}\n\n', DONE], 200, "gone"),
        ([event({"text": "a"})], 200, "the stream ended before the answer did"),
        ([b"data: {no json}\n\n"], 200, "no piece of an answer"),
    ],
    ids=["status", "event", "torn", "garbage"],
)
def test_what_goes_wrong_is_the_answers_error(chunks: list[bytes], status: int, message: str) -> None:
    assert message in ask_of(chunks, status=status).error


def test_a_request_carries_what_the_flags_say() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=Chunks([DONE]))

    flags = ["--base-url", "http://there/v1/", "--ignore-eos", "--top-k", "3", "--header", "x-a=b=c", "--logprobs", "2"]
    target = target_of(serve_options(*flags, "--extra-body", '{"min_tokens": 4}'), "key", "salt")

    async def send() -> None:
        async with ServerUnderLoad(target, transport=httpx.MockTransport(answer)) as server:
            await server.send(Ask([1, 2], 9, body={"return_token_ids": True}))

    asyncio.run(send())
    [request] = seen
    assert str(request.url) == "http://there/v1/completions"
    assert (request.headers["authorization"], request.headers["x-a"]) == ("Bearer key", "b=c")
    assert json.loads(request.content) == {
        "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "top_k": 3, "ignore_eos": True, "logprobs": 2, "cache_salt": "salt", "min_tokens": 4,
        "return_token_ids": True,
    }  # fmt: skip


def test_chat_is_sent_to_the_chat_path_as_messages() -> None:
    target = target_of(serve_options("--backend", "openai-chat", "--logprobs", "2"), None, None)
    body = json.loads(ServerUnderLoad(target).body(Ask([{"role": "user", "content": "x"}], 5)))
    assert target.url == "http://127.0.0.1:8000/v1/chat/completions"
    assert (body["messages"], body["max_completion_tokens"]) == ([{"role": "user", "content": "x"}], 5)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
