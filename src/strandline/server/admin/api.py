"""Endpoints for operators and trainers: pauses, aborts, the cache, sleep, and weights; names are vLLM's and SGLang's.

They are served with an API key, or if a flag says so. Web pages may not use them: a browser would send some of
these requests from any page without asking.
"""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from strandline.server.admin.parameters import check_query, with_body
from strandline.server.admin.sglang_api import add_sglang
from strandline.server.admin.weights_api import add_weights
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import EngineControl, memories_of, pause_mode
from strandline.server.http.gate import own_name
from strandline.server.http.sse import json_response
from strandline.server.requests.request_bodies import Strings


class PauseParameters(BaseModel):
    """Parameters of ``/pause``."""

    mode: str = "abort"
    clear_cache: bool | None = None
    """None: clear it if the engines can."""
    wait_for_inflight_requests: bool = False
    """An earlier name in vLLM for ``mode=wait``."""


class ResetParameters(BaseModel):
    """Parameters of ``/reset_prefix_cache``."""

    reset_running_requests: bool = False
    reset_external: bool = False
    """Without effect: every tier is reset."""


class SleepParameters(BaseModel):
    """Parameters of ``/sleep``."""

    level: Annotated[int, Field(ge=0, le=2)] = 1
    mode: str = "abort"


class WakeUpParameters(BaseModel):
    """Parameters of ``/wake_up``."""

    tags: list[str] = []
    """What to take again; empty: all."""


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


def add_admin(app: FastAPI, client: EngineClient, num_ranks: int) -> None:
    """Add the endpoints.

    Args:
        num_ranks: ranks of each engine.
    """
    control = EngineControl(client)
    guard = [Depends(refuse_web_pages), Depends(check_query)]
    _add_pauses(app, client, control, guard)
    _add_memory(app, control, guard)
    add_weights(app, client, control, guard, num_ranks)
    add_sglang(app, client, control, guard)


def _add_pauses(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/pause", dependencies=guard)
    async def pause(request: Request, query: Annotated[PauseParameters, Query()]) -> Response:
        asked = await with_body(request, query)
        mode = pause_mode(asked.mode)
        await control.pause("wait" if asked.wait_for_inflight_requests else mode, clears=asked.clear_cache)
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
    async def reset_prefix_cache(request: Request, query: Annotated[ResetParameters, Query()]) -> Response:
        asked = await with_body(request, query)
        return json_response({"success": await control.reset_cache(forced=asked.reset_running_requests)})

    @app.post("/sleep", dependencies=guard)
    async def sleep(request: Request, query: Annotated[SleepParameters, Query()]) -> Response:
        asked = await with_body(request, query)
        await control.sleep(asked.level, pause_mode(asked.mode))
        return json_response({"status": "sleeping", "level": asked.level})

    @app.post("/wake_up", dependencies=guard)
    async def wake_up(request: Request, query: Annotated[WakeUpParameters, Query()]) -> Response:
        asked = await with_body(request, query)
        await control.wake_up(memories_of(asked.tags))
        status = "sleeping" if control.is_sleeping else "awake"
        return json_response({"status": status, "tags": asked.tags or None})

    @app.get("/is_sleeping", dependencies=guard)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": control.is_sleeping})
