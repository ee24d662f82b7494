"""Edge cases of server-sent events."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Message

from strandline.errors import EngineError
from strandline.server import launch
from strandline.server.http.sse import DONE, EventStream, named_events, plain_events


class WatchedJob:
    """Remembers whether it was left."""

    is_left = False

    def __enter__(self) -> "WatchedJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True


def test_client_disconnecting_before_first_event_ends_job() -> None:
    job = WatchedJob()

    async def bodies() -> AsyncIterator[Any]:
        yield await asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        await asyncio.get_running_loop().create_future()

    stream = EventStream(job, plain_events("/v1/completions", bodies()))  # type: ignore[arg-type]
    asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send))
    assert job.is_left


@pytest.mark.parametrize("encode", [plain_events, named_events])
def test_bodies_that_come_at_once_are_one_part(encode: Callable[..., AsyncIterator[bytes]]) -> None:
    async def bursts() -> AsyncIterator[list[Any]]:
        yield [{"type": "a"}, {"type": "b"}]
        yield []  # tokens without a text of their own
        yield [{"type": "c"}]

    async def collect() -> list[bytes]:
        return [part async for part in encode("/v1/completions", bursts()) if part != DONE]

    parts = asyncio.run(collect())
    assert [part.count(b"data: ") for part in parts] == [2, 1]
    assert [json.loads(line[6:])["type"] for line in b"".join(parts).splitlines() if line.startswith(b"data: ")] == [
        *"abc"
    ]


@pytest.mark.parametrize("encode", [plain_events, named_events])
def test_events_have_no_line_ends_of_unicode(encode: Callable[..., AsyncIterator[bytes]]) -> None:
    text = "a\u2028b\u2029c\x85d\u2027e"

    async def bodies() -> AsyncIterator[Any]:
        yield [{"type": text, "text": text} if encode is plain_events else {"type": "x", "text": text}]
        raise EngineError(text)

    async def collect() -> bytes:
        return b"".join([event async for event in encode("/v1/completions", bodies())])

    data = [line[6:] for line in asyncio.run(collect()).decode().splitlines() if line.startswith("data: ")]
    assert json.loads(data[0])["text"] == text
    assert json.loads(data[1])["error"]["message"] == text


def test_listener_turns_off_nagles_algorithm() -> None:
    async def nagle_is_off() -> bool:
        asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            asked.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        listener = launch.listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asked

    assert asyncio.run(nagle_is_off())
