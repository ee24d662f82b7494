"""Middleware that continues the traces of clients; imported only if traces are exported."""

from opentelemetry.context import attach, detach
from opentelemetry.propagate import extract
from starlette.types import ASGIApp, Receive, Scope, Send


class TraceContext:
    """ASGI middleware: reads the W3C trace context in a request's headers, and makes it the current one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        token = attach(extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)
