"""Ids of HTTP requests: headers of all responses, and parts of the names that the engine's requests have.

OpenAI's and Anthropic's clients report them, and logs and traces contain them in the name of the request.
"""

import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Final, NamedTuple
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

GIVEN: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
"""Ids that clients may give: they are parts of headers, log lines and paths as they are."""
UNIQUE_DIGITS: Final = 16
OPENAI_HEADER: Final = "x-request-id"
ANTHROPIC_HEADER: Final = "request-id"
HEADERS: Final = (OPENAI_HEADER, ANTHROPIC_HEADER)


class _RequestId(NamedTuple):
    shown: str
    unique: str
    """Begins with ``shown``, which several requests can have if clients give it."""
    headers: Mapping[str, str]
    """Those that show the id."""


_CURRENT: Final[ContextVar[_RequestId | None]] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """Return the id of the HTTP request that is being answered; None: there is none."""
    current = _CURRENT.get()
    return None if current is None else current.shown


def unique_id() -> str:
    """Return an id that no other HTTP request has; it begins with ``request_id``."""
    current = _CURRENT.get()
    return uuid4().hex if current is None else current.unique


def id_headers() -> Mapping[str, str]:
    """Return the headers of a response that show its request's id."""
    current = _CURRENT.get()
    return {} if current is None else current.headers


class RequestIds:
    """ASGI middleware: names each request as its header ``X-Request-Id`` does, or at random.

    Args:
        headers: those of responses that show the id.
    """

    def __init__(self, app: ASGIApp, *, headers: Collection[str] = HEADERS) -> None:
        self._app = app
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        shown, unique = _ids(next((value for name, value in scope["headers"] if name == b"x-request-id"), b""))
        # Never reset: the response to an unexpected error is made after this call, in the same task.
        _CURRENT.set(_RequestId(shown, unique, dict.fromkeys(self._headers, shown)))
        headers = [(name.encode(), shown.encode()) for name in self._headers]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await self._app(scope, receive, send_named)


def _ids(given: bytes) -> tuple[str, str]:
    """Return the id that a request's response shows, and one that no other request has."""
    name = uuid4().hex
    if not GIVEN.fullmatch(given):
        return name, name
    shown = given.decode()
    return shown, f"{shown}-{name[:UNIQUE_DIGITS]}"
