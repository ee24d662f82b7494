"""Middleware that checks API keys, and the size and the encoding of bodies."""

import hmac
from collections.abc import Mapping
from typing import Final

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strandline.server.engines.tenants import owner_digest
from strandline.server.http.error_responses import error_response

OPEN_PATHS: Final = frozenset({"/", "/health", "/version", "/metrics", "/load", "/cache"})
"""Paths without a key: the list of paths, health checks, metrics, the load, and the cache page, which prompts for the
key."""

MAX_SHOWN: Final = 100

KEY_SALT: Final = "strandline.key_salt"
"""The scope's field for the prefix of the key's salts."""
OWNER: Final = "strandline.owner"
"""The scope's field for a digest of the key."""


def salt_of(request: Request, given: str | None) -> str:
    """Return the salt of a request: the prefix of its key, followed by the request's own salt."""
    return str(request.scope.get(KEY_SALT, "")) + (given or "")


def owner_of(request: Request) -> str:
    """Return a digest of a request's API key; empty if the server has no keys."""
    return str(request.scope.get(OWNER, ""))


def own_name(request: Request, given: str) -> str:
    """Return the engine's name for a request that a client has named: clients with other API keys cannot name it."""
    owner = owner_of(request)
    return f"{owner}/{given}" if owner else given


class Gate:
    """ASGI middleware.

    Args:
        api_keys: valid keys, each with the prefix of its requests' salts; empty: no key is needed.
        max_body_bytes: larger bodies are rejected without being read to the end.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Mapping[str, str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = {key.encode(): (salt, owner_digest(key)) for key, salt in api_keys.items()}
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy may use the other of the two fields and so split requests differently (RFC 9112, 6.1).
            message = "a request has a Content-Length or a Transfer-Encoding, not both"
            await error_response(scope["path"], 400, message, headers={"Connection": "close"})(scope, receive, send)
            return
        found = self._find(headers) if self._keys and scope["path"] not in OPEN_PATHS else ("", "")
        if found is None:
            refusal = error_response(
                scope["path"],
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"the body has Content-Encoding: {encoding[:MAX_SHOWN]}; send it without an encoding"
            refusal = error_response(scope["path"], 415, message, headers={"Accept-Encoding": "identity"})
            await refusal(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            await error_response(scope["path"], 413, self._too_large())(scope, receive, send)
            return
        await self._app({**scope, KEY_SALT: found[0], OWNER: found[1]}, self._counted(receive), send)

    def _find(self, headers: Mapping[bytes, bytes]) -> tuple[str, str] | None:
        """Return the prefix of a key's salts and its digest; None if the key is missing, empty or not valid."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not key:
            return None
        # All keys are compared, each in constant time, so that the time reveals nothing about them.
        found = [value for known, value in self._keys.items() if hmac.compare_digest(key, known)]
        return found[0] if found else None

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes; raise --max-body-bytes"
