"""A proxy in front of two engines, one for prompts and one for answers, that follows vLLM's protocol.

It knows nothing of Strandline: what the first engine returns as ``kv_transfer_params`` goes to the second as it is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body for the engine that computes the prompt: one token, not streamed."""
    changed = {**body, "kv_transfer_params": ASKED, "stream": False, "max_tokens": 1}
    changed.pop("stream_options", None)
    if "max_completion_tokens" in body:
        changed["max_completion_tokens"] = 1
    if "min_tokens" in body:
        changed["min_tokens"] = min(body["min_tokens"], 1)
    return changed


def build_proxy(prefill_url: str, decode_url: str, timeout_s: float) -> Starlette:
    """Return the proxy as an ASGI application."""
    client = httpx.AsyncClient(timeout=timeout_s)

    async def complete(request: Request) -> Response:
        body, headers = await request.json(), {"X-Request-Id": uuid4().hex}
        try:
            first = await client.post(prefill_url + request.url.path, json=prefill_body(body), headers=headers)
            params = first.json().get("kv_transfer_params") if first.is_success else None
        except httpx.HTTPError:
            params = None
        if params:
            body = {**body, "kv_transfer_params": params}
        second = client.build_request("POST", decode_url + request.url.path, json=body, headers=headers)
        answer = await client.send(second, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer.aiter_bytes():
                yield part
            await answer.aclose()

        return StreamingResponse(parts(), answer.status_code, media_type=answer.headers["content-type"])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, complete, methods=["POST"]) for path in paths], lifespan=lifespan)
