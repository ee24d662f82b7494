"""Streams that wait get pings, in the form that each API's clients skip."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Final

import anthropic
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from strandline.server.http.stream_pings import ANTHROPIC_EVENT, COMMENT, StreamPings
from strandline.server.http.stream_writer import STREAM_WRITER
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_stream, running_server

START: Final[Message] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
ENDLESS: Final = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Client:
    """Notes what an application sends; wakes the application after a number of messages.

    Args:
        delay: runs before each message is taken.
    """

    def __init__(self, delay: Callable[[], Any] | None = None) -> None:
        self.sent: list[bytes] = []
        self.changed = asyncio.Event()
        self._delay = delay

    async def send(self, message: Message) -> None:
        if self._delay is not None:
            await self._delay()
        self.sent.append(message.get("body", b"HEAD"))
        self.changed.set()

    async def has(self, count: int) -> None:
        while len(self.sent) < count:
            self.changed.clear()
            await self.changed.wait()


async def run(app: Any, client: Client, *, path: str = "/v1/completions", interval_s: float = 0.001) -> None:
    async def receive() -> Message:
        return {"type": "http.request"}

    await StreamPings(app, interval_s=interval_s)({"type": "http", "path": path}, receive, client.send)


@pytest.mark.parametrize(("path", "ping"), [("/v1/completions", COMMENT), ("/v1/messages", ANTHROPIC_EVENT)])
def test_silent_stream_gets_pings_between_head_and_end(path: str, ping: bytes) -> None:
    async def check() -> None:
        client = Client()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await asyncio.sleep(0.01)  # the status is not known yet
            await send(START)
            await client.has(4)
            await send(part(b"a"))
            await client.has(6)
            await send(part(b"", more=False))

        await run(app, client, path=path)
        await asyncio.sleep(0.01)
        first = client.sent.index(b"a")
        assert client.sent[0] == b"HEAD"
        assert first >= 4
        assert set(client.sent[1:first] + client.sent[first + 1 : -1]) == {ping}
        assert client.sent[-1] == b""

    asyncio.run(check())


def test_stream_that_is_not_silent_gets_no_ping() -> None:
    async def check() -> None:
        client = Client()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send(START)
            for _ in range(100):
                await asyncio.sleep(0.0001)
                await send(part(b"a"))
            await send(part(b"", more=False))

        await run(app, client, interval_s=60)
        assert client.sent == [b"HEAD", *[b"a"] * 100, b""]

    asyncio.run(check())


def test_stream_whose_parts_are_written_gets_no_ping() -> None:
    class Writer:
        last_s = 0.0

    async def check() -> None:
        client, writer = Client(), Writer()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send(START)
            writer.last_s = asyncio.get_running_loop().time() + 3600
            await asyncio.sleep(0.01)
            await send(part(b"", more=False))

        async def receive() -> Message:
            return {"type": "http.request"}

        scope: Scope = {"type": "http", "path": "/v1/completions", STREAM_WRITER: writer}
        await StreamPings(app, interval_s=0.001)(scope, receive, client.send)
        assert client.sent == [b"HEAD", b""]

    asyncio.run(check())


def test_whole_response_gets_no_ping() -> None:
    async def check() -> None:
        client = Client()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send({**START, "headers": [(b"content-type", b"application/json")]})
            await asyncio.sleep(0.01)
            await send(part(b"{}", more=False))

        await run(app, client)
        assert client.sent == [b"HEAD", b"{}"]

    asyncio.run(check())


def test_client_that_does_not_read_gets_no_further_pings() -> None:
    async def check() -> None:
        reads = asyncio.Event()
        reads.set()
        client = Client(reads.wait)

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send(START)
            reads.clear()
            sending = asyncio.ensure_future(send(part(b"a")))
            await asyncio.sleep(0.02)
            reads.set()
            await sending
            await send(part(b"", more=False))

        await run(app, client)
        assert [body for body in client.sent if body != COMMENT] == [b"HEAD", b"a", b""]
        assert client.sent.index(b"a") <= 2  # at most the one that was being sent

    asyncio.run(check())


def test_lost_client_ends_pings_without_an_error() -> None:
    async def check() -> None:
        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send(START)
            await asyncio.sleep(0.02)

        client = Client()
        taken = client.send

        async def send(message: Message) -> None:
            await taken(message)
            if message.get("body") == COMMENT:
                raise ConnectionResetError

        client.send = send  # type: ignore[method-assign]
        await run(app, client)
        assert client.sent == [b"HEAD", COMMENT]

    asyncio.run(check())


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_interval_must_be_a_time(value: float) -> None:
    with pytest.raises(ConfigError, match="--stream-ping-interval-s must be at least 0"):
        ServerConfig(stream_ping_interval_s=value)


@pytest.fixture(scope="module")
def one_at_a_time(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("pings") / "log"
    with running_server(bytes_dir, log, "--max-num-seqs", "1", "--stream-ping-interval-s", "0.05") as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_queued_stream_gets_pings_until_its_first_event(one_at_a_time: ServerProcess, path: str) -> None:
    server = one_at_a_time
    with ExitStack() as running:
        first = running.enter_context(server.stream(**ENDLESS))
        next(first)
        with http_stream("POST", server.url + path, json={**BODIES[path], "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            early = list(islice(lines, 8))
            running.close()
            late = list(lines)
    if path == "/v1/messages":
        pairs = list(zip(early[::2], early[1::2], strict=True))
        assert set(pairs) == {("event: ping", 'data: {"type": "ping"}')}
        assert "event: message_stop" in late
        return
    pings = [line for line in early if line.startswith(":")]
    assert set(pings) == {": ping"}
    assert len(pings) >= 2
    assert not any(line.startswith("data:") for line in early) or path == "/v1/responses"
    assert any(re.search(r"\[DONE\]|response\.incomplete", line) for line in late)


def test_official_clients_skip_pings(one_at_a_time: ServerProcess) -> None:
    url = one_at_a_time.url
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    with chat, ExitStack() as running:
        first = running.enter_context(one_at_a_time.stream(**ENDLESS))
        next(first)
        stream = chat.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True)
        running.close()
        assert list(stream)[-1].choices[0].finish_reason == "length"
    talk = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S)
    with talk, ExitStack() as running:
        first = running.enter_context(one_at_a_time.stream(**ENDLESS))
        next(first)
        with talk.messages.stream(model="tiny", **BODIES["/v1/messages"]) as said:
            running.close()
            assert said.get_final_message().stop_reason == "max_tokens"


def test_waiting_stream_whose_client_leaves_is_aborted(one_at_a_time: ServerProcess) -> None:
    server = one_at_a_time
    with server.stream(**ENDLESS) as running:
        next(running)
        with http_stream("POST", f"{server.url}/v1/completions", json={**BODIES["/v1/completions"], "stream": True}):
            server.wait_until(lambda: server.metric("num_requests_waiting") == 1)
        server.wait_until(lambda: server.metric("num_requests_waiting") == 0)
        assert json.loads(next(running))["choices"]
