"""What stands before the application: the API key, and the limit on bodies."""

import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strandline.server.faults import error_response

OPEN_PATHS: Final = frozenset({"/health", "/version", "/metrics", "/cache"})
"""What needs no key: what orchestrators and Prometheus ask for, and a page that asks for the key itself."""


class Gate:
    """ASGI middleware.

    Args:
        api_keys: any of which lets in; none: everybody may.
        max_body_bytes: larger bodies are refused, without being read to the end.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"] not in OPEN_PATHS and not self._is_known(headers):
            refusal = error_response(
                scope["path"],
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            await error_response(scope["path"], 413, self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _is_known(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # All keys are compared, each in constant time, so that the time taken says nothing about them.
        found = [hmac.compare_digest(key, known) for known in self._keys]
        return any(found)

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
