"""Timeout for clients that stop sending, since they hold connections and memory."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyTimeout:
    """Middleware that limits the time for a client to send each part of a body. A client that does not gets status 408.

    Args:
        timeout_s: None: no limit.
    """

    def __init__(self, app: ASGIApp, timeout_s: float | None) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_limit = scope["type"] == "http" and self._timeout_s is not None
        await self._app(scope, self._in_time(receive) if has_limit else receive, send)

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
