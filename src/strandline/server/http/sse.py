"""Server-sent events, and disconnecting clients."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from strandline.errors import EngineError, RequestError
from strandline.server.engines.jobs import Job
from strandline.server.http.error_responses import error_body, status_of
from strandline.server.http.stream_writer import STREAM_WRITER, StreamWriter

DONE: Final = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST: Final = 499
"""Status of a request whose client has disconnected. It is never sent."""

_JSON: Final = msgspec.json.Encoder()
_LINE_ENDS: Final = (("\x85".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))
"""Characters that end a line in Unicode but not in server-sent events, and their JSON escapes."""


def json_response(body: Any) -> Response:
    """Return a body as JSON."""
    return Response(_JSON.encode(body), media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events. The job ends with the response, also if the client disconnects before the first event."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._job = job
        self._events = events
        self._writer: StreamWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get(STREAM_WRITER)
        with self._job:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the response, of its parts those directly that can be."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            if self._writer is None or not self._writer.write(part):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _data(body: bytes) -> bytes:
    """Return JSON as an event's data, in one line also for clients that split lines as Unicode does."""
    if not body.isascii():
        for character, escape in _LINE_ENDS:
            body = body.replace(character, escape)
    return b"data: " + body + b"\n\n"


async def plain_events(path: str, bursts: AsyncIterator[list[Any]]) -> AsyncIterator[bytes]:
    """Yield bodies as OpenAI's events, those that come at once together, followed by ``[DONE]``."""
    try:
        async for bodies in bursts:
            if bodies:
                yield b"".join([_data(_JSON.encode(body)) for body in bodies])
    except (RequestError, EngineError) as error:
        # The status has been sent: the error is an event, which OpenAI's clients raise.
        status, code = status_of(error)
        yield _data(error_body(path, status, str(error), code=code))
    yield DONE


async def named_events(path: str, bursts: AsyncIterator[list[Any]]) -> AsyncIterator[bytes]:
    """Yield bodies as events named by their types, in Anthropic's format, those that come at once together."""
    try:
        async for bodies in bursts:
            if bodies:
                yield b"".join([_named(body["type"], _data(_JSON.encode(body))) for body in bodies])
    except (RequestError, EngineError) as error:
        status, code = status_of(error)
        yield _named("error", _data(error_body(path, status, str(error), code=code)))


def _named(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\n" + data


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Await work and return its response; if the client disconnects first, cancel the work."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
