"""Timeouts for clients that stop reading or sending, since they hold connections, requests and memory."""

import asyncio
import logging
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER: Final = logging.getLogger("strandline.server")


class SlowClientTimeout:
    """Middleware that limits the time for a client to read each part of a response, or to send each part of a body.

    A client that does not read has its connection aborted, which ends the request as if the client had disconnected. A
    client that does not send gets status 408.

    Args:
        timeout_s: None: no limit.
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
                LOGGER.warning("a client has read nothing for %g s: its request is aborted", self._timeout_s)
                _abort(send)

        await self._app(scope, self._in_time(receive), send_in_time)

    def _in_time(self, receive: Receive) -> Receive:
        is_complete = False

        async def receive_in_time() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()  # returns when the client disconnects
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408,
                    f"the rest of the body has not arrived for {self._timeout_s:g} s; see --client-timeout-s",
                    {"Connection": "close"},
                ) from error
            is_complete = not message.get("more_body", False)
            return message

        return receive_in_time


def _abort(send: Any) -> None:
    """Abort the connection behind uvicorn's ``send``, which drops what is sent afterwards."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionAbortedError("the client has stopped reading")
    transport.abort()
