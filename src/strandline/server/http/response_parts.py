"""Large bodies in parts, so that a limit on the time to read applies to each, not to all that has come at once."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_PART_BYTES: Final = 2**16
"""As much as asyncio's transports buffer before they ask for a pause."""


class ResponseParts:
    """Middleware that sends bodies in parts; uvicorn writes each when the client has read most of those before."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_parts(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= MAX_PART_BYTES:
                await send(message)
                return
            last = (len(body) - 1) // MAX_PART_BYTES * MAX_PART_BYTES
            for start in range(0, last, MAX_PART_BYTES):
                await send({**message, "body": body[start : start + MAX_PART_BYTES], "more_body": True})
            await send({**message, "body": body[last:]})

        await self._app(scope, receive, send_in_parts)
