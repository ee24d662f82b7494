"""Middleware that serves requests whose target is a whole URL, as clients of proxies send them.

A server must accept such targets, and ignore the ``Host`` field for the host that the target names (RFC 9112, 3.2.2).
"""

import re
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

ABSOLUTE: Final = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class AbsoluteTargets:
    """ASGI middleware: splits a URL into the path and the ``Host`` field."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (found := ABSOLUTE.fullmatch(scope.get("raw_path") or b"")):
            host, raw_path = found[1], found[2] or b"/"
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            path = {"path": unquote(raw_path.decode("ascii")), "raw_path": raw_path}
            scope = {**scope, **path, "headers": [(b"host", host), *headers]}
        await self._app(scope, receive, send)
