"""HTTP connections: uvicorn's, with a time limit on what a client sends outside of a request's body."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpProtocol(H11Protocol):
    """A connection that is aborted when the head of a request, or the end of a response, takes too long.

    The limit holds for a connection's first head, sent or not, for every later one from its first byte on, and for a
    client that leaves the rest of a complete response unread. Between requests uvicorn's limit for idle connections
    holds. ``SlowClientTimeout`` limits the rest: bodies, and responses while they are generated.

    Args:
        client_timeout_s: None: no limit.
    """

    def __init__(self, *, client_timeout_s: float | None, **options: Any) -> None:
        super().__init__(**options)
        self._client_timeout_s = client_timeout_s
        self._abort_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._abort_later()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:
            self._abort_later()  # the connection was idle
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._cancel_abort()  # the head is complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else a request that was sent with the last one runs
            self._abort_later(idle_s=self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_abort()
        super().connection_lost(exc)

    def _abort_later(self, idle_s: float = 0) -> None:
        self._cancel_abort()
        if self._client_timeout_s is not None:
            self._abort_timer = self.loop.call_later(idle_s + self._client_timeout_s, self.transport.abort)

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None
