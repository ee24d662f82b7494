"""Endpoints for operators and trainers: pauses, aborts, the cache, sleep, and weights; names are vLLM's and SGLang's.

They are served with an API key, or if a flag says so. Web pages may not use them: a browser would send some of
these requests from any page without asking.
"""

from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from strandline.errors import RequestError
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import EngineControl, memories_of, pause_mode
from strandline.server.http.gate import own_name
from strandline.server.http.sse import json_response
from strandline.server.requests.request_bodies import Strings, check_extra

VERSION_CHARACTERS = 256


class AbortBody(BaseModel):
    """Body of ``/abort_requests``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    request_ids: Strings | None = None
    """None: all."""


class WeightsBody(BaseModel):
    """Body of ``/update_weights_from_disk``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model_path: str
    weight_version: Annotated[str, Field(min_length=1, max_length=VERSION_CHARACTERS)] | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    """Run no step until ``/resume``."""
    flush_cache: bool = True


class VersionBody(BaseModel):
    """Body of ``/update_weight_version``."""

    model_config = ConfigDict(strict=True, extra="allow")

    new_version: Annotated[str, Field(min_length=1, max_length=VERSION_CHARACTERS)]


WEIGHTS_WITHOUT_EFFECT = frozenset({"load_format", "is_async", "torch_empty_cache", "recapture_cuda_graph"})


def refuse_web_pages(request: Request) -> None:
    """Refuse what a browser sends on behalf of a page.

    Raises:
        HTTPException: the request names an origin.
    """
    if "origin" in request.headers:
        raise HTTPException(403, "web pages may not use administrative endpoints")


def add_admin(app: FastAPI, client: EngineClient) -> None:
    """Add the endpoints."""
    control = EngineControl(client)
    guard = [Depends(refuse_web_pages)]
    _add_pauses(app, client, control, guard)
    _add_memory(app, control, guard)
    _add_weights(app, client, control, guard)


def _add_pauses(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/pause", dependencies=guard)
    async def pause(mode: str = "abort", clear_cache: bool = True) -> Response:
        await control.pause(pause_mode(mode), clears=clear_cache)
        return json_response({"status": "paused"})

    @app.post("/resume", dependencies=guard)
    async def resume() -> Response:
        await control.resume()
        return json_response({"status": "resumed"})

    @app.get("/is_paused", dependencies=guard)
    async def is_paused() -> Response:
        return json_response({"is_paused": control.is_paused})

    @app.post("/abort_requests", dependencies=guard)
    async def abort_requests(request: Request, body: AbortBody | None = None) -> Response:
        given = None if body is None else body.request_ids
        names = None if given is None else {*given, *(own_name(request, name) for name in given)}
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
        return json_response({"status": "asleep", "level": level})

    @app.post("/wake_up", dependencies=guard)
    async def wake_up(tags: Annotated[list[str], Query()] = []) -> Response:  # noqa: B006 - FastAPI copies it
        await control.wake_up(memories_of(tags))
        return json_response({"status": "awake" if not control.is_sleeping else "asleep"})

    @app.get("/is_sleeping", dependencies=guard)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": control.is_sleeping})


def _add_weights(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/update_weights_from_disk", dependencies=guard)
    async def update_weights_from_disk(body: WeightsBody) -> Response:
        check_extra(body.model_extra, {}, WEIGHTS_WITHOUT_EFFECT)
        if not body.flush_cache:
            raise RequestError("flush_cache must be true: entries of other weights are never hit", param="flush_cache")
        path = Path(body.model_path)
        if "\0" in body.model_path or not path.is_dir():
            raise RequestError(f"there is no directory {body.model_path[:200]!r}", param="model_path")
        version = body.weight_version or control.weight_version
        resolved, aborts = str(path.resolve()), body.abort_all_requests
        number = await control.update_weights(resolved, version, aborts=aborts, stays_paused=body.keep_pause)
        return json_response({"success": True, "message": f"the weights are {resolved}", "num_paused_requests": number})

    @app.post("/update_weight_version", dependencies=guard)
    async def update_weight_version(body: VersionBody) -> Response:
        client.name_weights(body.new_version)
        return json_response({"success": True, "weight_version": control.weight_version})

    @app.get("/weight_info", dependencies=guard)
    async def weight_info() -> Response:
        return json_response({"weight_version": control.weight_version})
