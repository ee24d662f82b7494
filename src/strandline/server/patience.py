"""Ending connections whose client has stopped reading: what waits to be sent to it holds a request and its memory."""

import asyncio
import logging
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER: Final = logging.getLogger("strandline.server")


class Patience:
    """Waits a limited time for each piece of an answer to be taken; then it cuts the connection.

    The server's own transport is cut, which ends the request as if the client had gone.

    Args:
        timeout_s: None: wait for ever.
    """

    def __init__(self, app: ASGIApp, timeout_s: float | None) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._timeout_s is None:
            await self._app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                LOGGER.warning("a client has read nothing for %g s: its request ends", self._timeout_s)
                _cut(send)

        await self._app(scope, receive, send_in_time)


def _cut(send: Any) -> None:
    """Cut the connection behind uvicorn's ``send``. What is sent afterwards is dropped there."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionAbortedError("the client has stopped reading")
    transport.abort()
