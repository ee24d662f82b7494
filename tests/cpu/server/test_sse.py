"""Edge cases of server-sent events."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from strandline.server import launch
from strandline.server.sse import EventStream, plain_events


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
