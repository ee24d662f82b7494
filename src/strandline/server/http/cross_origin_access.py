"""Middleware for web pages of other origins (CORS).

Browsers let a page read what another origin's server answers only if the answer allows the page's origin. The cache
page and its data allow none: they may show the texts of prompts to this machine's user.
"""

from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from strandline.server.http.cross_origin import CrossOrigin
from strandline.server.http.request_ids import HEADERS

CACHE_PAGE: Final = "/cache"


class CrossOriginAccess:
    """ASGI middleware. Answers preflight requests, which have no API key, and lets allowed origins read responses."""

    def __init__(self, app: ASGIApp, *, allowed: CrossOrigin) -> None:
        self._app = app
        self._open = CORSMiddleware(
            app,
            allow_origins=allowed.origins,
            allow_methods=allowed.methods,
            allow_headers=allowed.headers,
            allow_credentials=allowed.with_credentials,
            expose_headers=HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_private = path == CACHE_PAGE or path.startswith(CACHE_PAGE + "/")
        await (self._app if is_private else self._open)(scope, receive, send)
