"""Endpoints for operators and trainers: pauses, aborts, the cache, sleep, and weights; names are vLLM's and SGLang's.

They are served with an API key, or if a flag says so. Web pages may not use them: a browser would send some of
these requests from any page without asking.
"""

from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from strandline.errors import RequestError
from strandline.server.admin.sglang_api import add_sglang
from strandline.server.admin.weights_api import add_weights
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import EngineControl, memories_of, pause_mode
from strandline.server.http.gate import own_name
from strandline.server.http.sse import json_response
from strandline.server.requests.request_bodies import Strings

EMPTY: Final = (b"", b"{}", b"null")
"""Bodies that say nothing."""


class AbortBody(BaseModel):
    """Body of ``/abort_requests``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: Strings | None = None
    """None or empty: all."""


def refuse_web_pages(request: Request) -> None:
    """Refuse what a browser sends on behalf of a page.

    Raises:
        HTTPException: the request names an origin.
    """
    if "origin" in request.headers:
        raise HTTPException(403, "web pages may not use administrative endpoints")


async def refuse_unread(request: Request) -> None:
    """Refuse what an endpoint does not read: parameters in the wrong place would change what it does.

    Raises:
        RequestError: there is a query parameter that it does not have, or a body where it reads query parameters alone.
    """
    dependant, path = request.scope["route"].dependant, request.scope["route"].path
    known = [param.alias for param in dependant.query_params]
    has = f"it has {', '.join(known)}" if known else "it has none"
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{path} has no query parameter {name[:100]!r}: {has}", param=name[:100])
    if known and not dependant.body_params and (await request.body()).strip() not in EMPTY:
        raise RequestError(f"{path} reads no body, only query parameters: {has}")


def add_admin(app: FastAPI, client: EngineClient, num_ranks: int) -> None:
    """Add the endpoints.

    Args:
        num_ranks: ranks of each engine.
    """
    control = EngineControl(client)
    guard = [Depends(refuse_web_pages), Depends(refuse_unread)]
    _add_pauses(app, client, control, guard)
    _add_memory(app, control, guard)
    add_weights(app, client, control, guard, num_ranks)
    add_sglang(app, client, control, guard)


def _add_pauses(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/pause", dependencies=guard)
    async def pause(mode: str = "abort", clear_cache: bool | None = None) -> Response:
        await control.pause(pause_mode(mode), clears=clear_cache)
        return json_response({"status": "paused"})

    @app.post("/resume", dependencies=guard)
    async def resume() -> Response:
        await control.resume()
        return json_response({"status": "sleeping" if control.is_sleeping else "resumed"})

    @app.get("/is_paused", dependencies=guard)
    async def is_paused() -> Response:
        return json_response({"is_paused": control.is_paused})

    @app.post("/abort_requests", dependencies=guard)
    async def abort_requests(request: Request, body: AbortBody | None = None) -> Response:
        given = None if body is None else body.request_ids
        names = None if not given else {*given, *(own_name(request, name) for name in given)}
        return json_response({"status": "aborted", "aborted": client.abort(names)})


def _add_memory(app: FastAPI, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/reset_prefix_cache", dependencies=guard)
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        return json_response({"success": await control.reset_cache(forced=reset_running_requests)})

    @app.post("/sleep", dependencies=guard)
    async def sleep(level: int = 1, mode: str = "abort") -> Response:
        if not 0 <= level <= 2:
            raise RequestError(f"level must be 0, 1 or 2, got {level}", param="level")
        await control.sleep(level, pause_mode(mode))
        return json_response({"status": "sleeping", "level": level})

    @app.post("/wake_up", dependencies=guard)
    async def wake_up(tags: Annotated[list[str], Query()] = []) -> Response:  # noqa: B006 - FastAPI copies it
        await control.wake_up(memories_of(tags))
        status = "sleeping" if control.is_sleeping else "awake"
        return json_response({"status": status, "tags": tags or None})

    @app.get("/is_sleeping", dependencies=guard)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": control.is_sleeping})
