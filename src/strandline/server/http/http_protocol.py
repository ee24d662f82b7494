"""uvicorn's HTTP connections, with a time limit on everything that a client sends outside of a request's body."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from strandline.server.http.malformed_requests import FIRST_BYTES, MalformedRequests
from strandline.server.http.stream_writer import STREAM_WRITER, StreamWriter

LOGGER: Final = logging.getLogger("strandline.server")


class HttpProtocol(H11Protocol):
    """A connection that is aborted when the head of a request takes too long, or the client does not read.

    The limit applies to a connection's first head from the start of the connection, to every later head from its first
    byte, to a client that reads nothing of a response while the write buffer is full, which ends its request, and to
    one that does not read the end of a complete response. Between requests, uvicorn's limit for idle connections
    applies. ``BodyTimeout`` limits bodies of requests, and ``ResponseParts`` lets a client read large responses slowly.

    ``HEAD`` has the response to ``GET`` without its body.

    Args:
        client_timeout_s: None: no limit.
        malformed: answers and logs what is not an HTTP request.
    """

    def __init__(self, *, client_timeout_s: float | None, malformed: MalformedRequests, **options: Any) -> None:
        super().__init__(**options)
        self._client_timeout_s = client_timeout_s
        self._malformed = malformed
        self._first_bytes = b""
        self._served, self.app = self.app, self._serve
        self._abort_timer: asyncio.TimerHandle | None = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body by its own copy of the scope
        elif scope["http_version"] == "1.1":
            scope[STREAM_WRITER] = self._writer
        await self._served(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._writer = StreamWriter(transport.write)
        self._abort_later(self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:
            self._abort_later(self.transport.abort)  # the connection was idle
        cycle = self.cycle
        self._first_bytes = self._first_bytes or data[:FIRST_BYTES]
        super().data_received(data)
        if self.cycle is not cycle:
            self._cancel_abort()  # the head is complete
            if self.flow.write_paused:
                self._abort_later(self._abort_unread)

    def send_400_response(self, msg: str) -> None:
        """Close the connection, after an error response if the request has none yet."""
        response = self._malformed.response_to(self._first_bytes, None if self.client is None else self.client[0])
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in response:
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # what its application sends from now on is dropped
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.is_ready = False
        self._abort_later(self._abort_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writer.is_ready = True
        if not self.cycle.response_complete:
            self._cancel_abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise a pipelined request is running
            self._abort_later(self.transport.abort, idle_s=self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_abort()
        self._writer.is_ready = False
        super().connection_lost(exc)

    def _abort_unread(self) -> None:
        text = "a client has read nothing for %g s: its request is aborted"
        LOGGER.warning(text, self._client_timeout_s)
        self.transport.abort()

    def _abort_later(self, abort: Callable[[], None], idle_s: float = 0) -> None:
        self._cancel_abort()
        if self._client_timeout_s is not None:
            self._abort_timer = self.loop.call_later(idle_s + self._client_timeout_s, abort)

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
