"""Middleware that writes to event streams which have nothing to send, while they wait in the queue or for a prefill.

Clients and proxies end connections that are silent for a minute or more, and retries then wait for as long again. A
ping also reveals a client whose connection is lost: what cannot be delivered ends the connection, and the request.
"""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strandline.server.http.error_responses import ANTHROPIC_PATH
from strandline.server.http.stream_writer import STREAM_WRITER, StreamWriter

COMMENT: Final = b": ping\n\n"
"""A comment, which every reader of server-sent events skips."""
ANTHROPIC_EVENT: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


class StreamPings:
    """ASGI middleware.

    Args:
        interval_s: silence after which a stream gets a ping; 0: none.
    """

    def __init__(self, app: ASGIApp, *, interval_s: float) -> None:
        self._app = app
        self._interval_s = interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._interval_s:
            await self._app(scope, receive, send)
            return
        ping = ANTHROPIC_EVENT if scope["path"].startswith(ANTHROPIC_PATH) else COMMENT
        response = _PingedResponse(send, ping, self._interval_s, scope.get(STREAM_WRITER))
        try:
            await self._app(scope, receive, response.send)
        finally:
            response.stop()


class _PingedResponse:
    """A response that gets pings between its parts if it is an event stream. Each part holds whole events.

    Args:
        writer: writes parts that are not sent; None: all are sent.
    """

    def __init__(self, send: Send, ping: bytes, interval_s: float, writer: StreamWriter | None) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._ping = ping
        self._interval_s = interval_s
        self._writer = writer
        self._is_sending = False
        self._last_s = 0.0
        self._pinging: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.stop()
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending = False
            self._last_s = self._loop.time()
        if message["type"] == "http.response.start" and _is_event_stream(message):
            self._pinging = asyncio.ensure_future(self._ping_when_silent())

    def stop(self) -> None:
        """Send no more pings."""
        if self._pinging is not None:
            self._pinging.cancel()

    async def _ping_when_silent(self) -> None:
        while True:
            written_s = 0.0 if self._writer is None else self._writer.last_s
            silent_s = self._loop.time() - max(self._last_s, written_s)
            if self._is_sending:  # a client that does not read gets no pings in addition
                await asyncio.sleep(self._interval_s)
            elif silent_s < self._interval_s:
                await asyncio.sleep(self._interval_s - silent_s)
            else:
                try:
                    await self._send({"type": "http.response.body", "body": self._ping, "more_body": True})
                except OSError:  # the client has left, as the response's own next part will find
                    return
                self._last_s = self._loop.time()


def _is_event_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
    )
