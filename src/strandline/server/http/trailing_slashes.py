"""Middleware that serves paths with a slash at the end as the same paths without.

A redirect would name this server's scheme and host; behind a proxy, clients reach it by others.
"""

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashes:
    """ASGI middleware: removes a slash at the end of a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"] != "/":
            scope = {**scope, "path": scope["path"][:-1]}
        await self._app(scope, receive, send)
