"""SGLang's names for pauses, aborts, the cache, and memory that is given back."""

import asyncio
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import RequestError
from strandline.records.control import MEMORIES
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import EngineControl, memories_of
from strandline.server.http.gate import own_name
from strandline.server.http.sse import json_response
from strandline.server.requests.request_bodies import Strings, check_extra

GRAPHS: Final = "cuda_graph"
"""A tag of memory that comes and goes with the others here."""
RETRY_S: Final = 0.1
"""How often to look whether the cache can be flushed."""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class PauseBody(Body):
    """Body of ``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """What becomes of unfinished requests: they are ended, computed anew, or go on from their states."""


class ContinueBody(Body):
    """Body of ``/continue_generation``."""


class MemoryBody(Body):
    """Body of ``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: Strings | None = None
    """None: all."""


class AbortBody(Body):
    """Body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


def add_sglang(app: FastAPI, client: EngineClient, control: EngineControl, guard: list[Any]) -> None:
    """Add the endpoints.

    Args:
        guard: what each request has to pass.
    """

    @app.post("/pause_generation", dependencies=guard)
    async def pause_generation(body: PauseBody | None = None) -> Response:
        body = body or PauseBody()
        _check(body)
        await control.pause("abort" if body.mode == "abort" else "keep", clears=body.mode == "retract")
        return json_response({"status": "ok", "message": "Generation paused successfully."})

    @app.post("/continue_generation", dependencies=guard)
    async def continue_generation(body: ContinueBody | None = None) -> Response:
        _check(body)
        await control.resume()
        return json_response({"status": "ok", "message": "Generation continued successfully."})

    @app.post("/abort_request", dependencies=guard)
    async def abort_request(request: Request, body: AbortBody) -> Response:
        _check(body)
        if not (body.rid or body.abort_all):
            raise RequestError("rid must name a request, unless abort_all is true", param="rid")
        client.abort(None if body.abort_all else {body.rid, own_name(request, body.rid)})
        return Response()

    @app.api_route("/flush_cache", methods=["GET", "POST"], dependencies=guard)
    async def flush_cache(timeout: Annotated[float, Query(ge=0)] = 0) -> Response:
        given_up_s = SYSTEM_CLOCK() + timeout
        while not await control.reset_cache(forced=False):
            if SYSTEM_CLOCK() >= given_up_s:
                raise RequestError(
                    "the cache is not flushed while requests run; timeout is how many seconds to wait for them"
                )
            await asyncio.sleep(RETRY_S)
        return json_response({"success": True, "message": "Cache flushed."})

    _add_memory(app, control, guard)


def _add_memory(app: FastAPI, control: EngineControl, guard: list[Any]) -> None:
    @app.post("/release_memory_occupation", dependencies=guard)
    async def release_memory_occupation(body: MemoryBody | None = None) -> Response:
        tags = _known(body)
        if tags and set(memories_of(tags)) != set(MEMORIES):
            raise RequestError(f"memory is released as a whole: {', '.join(MEMORIES)}", param="tags")
        await control.sleep(1, "keep")
        return json_response(None)

    @app.post("/resume_memory_occupation", dependencies=guard)
    async def resume_memory_occupation(body: MemoryBody | None = None) -> Response:
        tags = _known(body)
        if body is None or not body.tags or tags:
            await control.wake_up(memories_of(tags))
        return json_response(None)


def _known(body: MemoryBody | None) -> list[str]:
    """Return the tags of a body, without that of graphs."""
    _check(body)
    return [tag for tag in (body and body.tags) or () if tag != GRAPHS]


def _check(body: Body | None) -> None:
    """Log fields that are unknown."""
    if body is not None:
        check_extra(body.model_extra, {}, ())
