"""Streams at their edges."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from strandline.server.streams import EventStream, plain_events


class WatchedJob:
    """Remembers whether it was left."""

    is_left = False

    def __enter__(self) -> "WatchedJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True


def test_a_client_that_goes_before_the_first_event_ends_the_job() -> None:
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
