"""uvicorn's HTTP connections, with a time limit on everything that a client sends outside of a request's body."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from strandline.server.http.stream_writer import STREAM_WRITER, StreamWriter

LOGGER: Final = logging.getLogger("strandline.server")


class HttpProtocol(H11Protocol):
    """A connection that is aborted when the head of a request takes too long, or the client does not read.

    The limit applies to a connection's first head from the start of the connection, to every later head from its first
    byte, to a client that reads nothing of a response while the write buffer is full, which ends its request, and to
    one that does not read the end of a complete response. Between requests, uvicorn's limit for idle connections
    applies. ``BodyTimeout`` limits bodies of requests, and ``ResponseParts`` lets a client read large responses slowly.

    Args:
        client_timeout_s: None: no limit.
    """

    def __init__(self, *, client_timeout_s: float | None, **options: Any) -> None:
        super().__init__(**options)
        self._client_timeout_s = client_timeout_s
        self._served, self.app = self.app, self._serve
        self._abort_timer: asyncio.TimerHandle | None = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
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
        super().data_received(data)
        if self.cycle is not cycle:
            self._cancel_abort()  # the head is complete
            if self.flow.write_paused:
                self._abort_later(self._abort_unread)

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
