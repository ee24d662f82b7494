"""Endpoints for those who operate a server: whether it works, what it does, and how it is configured."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from strandline.server.http.error_responses import error_response
from strandline.server.http.sse import json_response
from strandline.server.requests.service import Service
from strandline.version import VERSION, find_commit

WELCOME: Final = """This is Strandline, a server of language models.

  /v1            OpenAI's API: base_url of its clients
  /              Anthropic's API: base_url of its clients
  /cache         what is cached and why requests missed, unless --cache-page is off
  /openapi.json  description of all paths
"""


def add_operation(app: FastAPI, service: Service, flags: Mapping[str, Any]) -> None:
    """Add the endpoints.

    Args:
        flags: what ``/server_info`` shows of the configuration.
    """

    @app.get("/", include_in_schema=False)
    @app.head("/", include_in_schema=False)  # Claude Code asks whether the server is there
    async def welcome() -> Response:
        return PlainTextResponse(WELCOME)

    @app.get("/health")
    async def health(request: Request) -> Response:
        path = request.url.path
        for engine in service.client.engines:
            if engine.failure is not None:
                return error_response(path, 503, f"{engine.name} has stopped: {engine.failure}", code="engine_dead")
        for engine in service.client.engines:
            if (hang := engine.find_hang()) is not None:
                return error_response(path, 503, f"{engine.name} hangs: {hang}", code="engine_hung")
        return json_response({"status": "ok"})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": service.client.num_unfinished})

    shown = {"version": VERSION, "commit": find_commit()}

    @app.get("/version")
    async def show_version() -> Response:
        return json_response(shown)

    @app.get("/server_info")
    async def server_info() -> Response:
        engines = [
            {
                "number": engine.number,
                "max_model_len": engine.limits.max_model_len,
                "vocab_size": engine.limits.vocab_size,
                "failure": engine.failure,
                "hang": engine.find_hang(),
                "weight_version": service.client.weights.versions[engine.number],
                "has_current_weights": service.client.weights.is_current(engine.number),
            }
            for engine in service.client.engines
        ]
        names = [*service.model_names, *(adapter.name for adapter in service.adapters)]
        of_vllm = {"weight_transfer_config": flags.get("weight_transfer_config")}  # which TRL asks for
        return json_response({**shown, "models": names, "engines": engines, "flags": flags, "vllm_config": of_vllm})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        stats = await service.client.ask_stats()
        return Response(service.client.metrics.expose(stats), media_type=CONTENT_TYPE_LATEST)
