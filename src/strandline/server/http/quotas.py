"""Middleware that holds requests to the limits of their API keys."""

from collections.abc import Mapping
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from strandline.server.engines.tenants import CURRENT_TENANT, KEYLESS, RateLimitError, Tenant
from strandline.server.http.error_responses import rate_limited
from strandline.server.http.gate import OWNER

LIMITED_PATHS: Final = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
"""Paths whose requests use the engine."""


class Quotas:
    """ASGI middleware: finds the tenant of each request, and refuses what exceeds its limits.

    Args:
        tenants: by digest of their keys, as ``Gate`` finds it; empty: that of a server without keys.
    """

    def __init__(self, app: ASGIApp, tenants: Mapping[str, Tenant]) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in LIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._tenants.get(scope.get(OWNER, ""), KEYLESS)
        try:
            tenant.begin_request()
        except RateLimitError as error:
            await rate_limited(scope["path"], error)(scope, receive, send)
            return
        token = CURRENT_TENANT.set(tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            CURRENT_TENANT.reset(token)
            tenant.end_request()
