"""Middleware that rejects requests to foreign host names.

A web page can resolve its own host name to this machine (DNS rebinding). Browsers then send requests to that name
without the restrictions of cross-site requests, and only the name distinguishes them from the user's own.
"""

from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from strandline.server.http.error_responses import error_response
from strandline.server.http.host_names import is_local, parse_host

MAX_SHOWN: Final = 200


def host_of(scope: Scope) -> str | None:
    """Return the request's host name; None unless it has exactly one well-formed ``Host`` field."""
    fields = _host_fields(scope)
    return parse_host(fields[0]) if len(fields) == 1 else None


class HostCheck:
    """ASGI middleware. Requests with a local name always pass; others get status 403 unless their name is allowed.

    Args:
        allowed: names in lower case; ``*.example.com`` matches all subdomains, ``*`` any name.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(allowed)
        self._suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._passes(host_of(scope)):
            await self._app(scope, receive, send)
            return
        shown = ", ".join(repr(field.decode("latin-1")) for field in _host_fields(scope))[:MAX_SHOWN]
        message = (
            f"requests for the host {shown or '(none given)'} are rejected: this server accepts localhost, loopback "
            "addresses and the names in --allowed-hosts"
        )
        await error_response(scope["path"], 403, message, code="host_not_allowed")(scope, receive, send)

    def _passes(self, name: str | None) -> bool:
        if "*" in self._names:
            return True
        return name is not None and (is_local(name) or name in self._names or name.endswith(self._suffixes))


def _host_fields(scope: Scope) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == b"host"]
