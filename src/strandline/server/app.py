"""The HTTP application and its routes."""

from datetime import UTC, datetime
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from strandline.errors import RequestError
from strandline.server.admin.api import add_admin
from strandline.server.app_options import AppOptions
from strandline.server.cache_page import add_cache_page
from strandline.server.completions.chat_api import chat
from strandline.server.completions.completions_api import complete
from strandline.server.generate.api import AbortBody, GenerateBody, abort, generate
from strandline.server.http.absolute_targets import AbsoluteTargets
from strandline.server.http.cross_origin_access import CrossOriginAccess
from strandline.server.http.error_responses import ERRORS, add_error_handlers
from strandline.server.http.gate import Gate
from strandline.server.http.host_check import HostCheck
from strandline.server.http.quotas import Quotas
from strandline.server.http.request_ids import RequestIds
from strandline.server.http.sse import json_response, while_connected
from strandline.server.http.stream_pings import StreamPings
from strandline.server.http.trailing_slashes import TrailingSlashes
from strandline.server.labels.decisions_api import DecisionsBody, decide
from strandline.server.labels.scoring_api import (
    GenerativeBody,
    RerankBody,
    ScoreBody,
    rerank,
    score,
    score_generatively,
)
from strandline.server.labels.systemone_api import SystemOneBody, decide_state
from strandline.server.messages.api import CountBody, MessagesBody, count_tokens, create_message
from strandline.server.operation import add_operation
from strandline.server.pooling.api import EmbeddingsBody, PoolingBody, embed, pool
from strandline.server.requests.adapters import ADAPTER_PATHS, add_adapters
from strandline.server.requests.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    chat_options,
    check_continuation,
    check_extra,
)
from strandline.server.requests.service import Service
from strandline.server.requests.tools import toolbox
from strandline.server.responses.api import ResponsesBody, count_input_tokens, create_response
from strandline.server.responses.stored_responses import add_stored_responses
from strandline.version import VERSION

STREAMED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/event-stream": {}}}}
"""OpenAPI documentation of responses that may be streamed."""
ADMIN_FLAGS: Final = "--enable-admin-endpoints, or with --api-key and without --salt-per-key"
"""What adds the administrative endpoints."""


def build_app(service: Service, options: AppOptions | None = None) -> FastAPI:
    """Return the application that serves a model."""
    options = options or AppOptions()
    app = FastAPI(
        title="Strandline",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    _add_generation(app, service)
    _add_label_reads(app, service)
    add_stored_responses(app, service)
    _add_models(app, service)
    add_adapters(app, service.adapters)
    _add_tokenizer(app, service)
    add_operation(app, service, options.flags)
    add_cache_page(app, service, options.cache_page)
    if options.has_admin:
        add_admin(app, service.client, options.num_ranks)
    add_error_handlers(app, _flags_of_paths(service, options) if options.names_flags else {})
    # What is added last comes first.
    app.add_middleware(StreamPings, interval_s=options.ping_interval_s)
    app.add_middleware(Quotas, tenants=options.tenants)
    app.add_middleware(Gate, api_keys=options.api_keys, max_body_bytes=options.max_body_bytes)
    if options.cross_origin is not None:
        app.add_middleware(CrossOriginAccess, allowed=options.cross_origin)
    if options.continues_traces:
        from strandline.server.http.trace_context import TraceContext  # imports OpenTelemetry

        app.add_middleware(TraceContext)
    app.add_middleware(HostCheck, allowed=options.allowed_hosts)
    app.add_middleware(TrailingSlashes)
    app.add_middleware(AbsoluteTargets)
    app.add_middleware(RequestIds, headers=options.id_headers)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await while_connected(request, complete(service, body, request))

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await while_connected(request, chat(service, body, request))

    @app.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await while_connected(request, create_response(service, body, request))

    @app.post("/v1/messages", responses=STREAMED)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await while_connected(request, create_message(service, body, request))

    @app.post("/inference/v1/generate", responses=STREAMED)
    async def generate_tokens(body: GenerateBody, request: Request) -> Response:
        return await while_connected(request, generate(service, body, request))

    @app.post("/inference/v1/abort_requests", response_class=Response)
    async def abort_own(body: AbortBody, request: Request) -> Response:
        return abort(service, body, request)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody, request: Request) -> Response:
        return await count_input_tokens(service, body, request)

    @app.post("/v1/messages/count_tokens")
    async def message_tokens(body: CountBody, request: Request) -> Response:
        return await count_tokens(service, body, request)


def _flags_of_paths(service: Service, options: AppOptions) -> dict[str, str]:
    """Return the paths that are not served without a flag that is not given, and the flag."""
    flags: dict[str, str] = {}
    if not options.has_admin:
        admin = FastAPI(openapi_url=None)
        add_admin(admin, service.client, options.num_ranks)
        flags |= {route.path: ADMIN_FLAGS for route in admin.routes if isinstance(route, APIRoute)}
    if service.adapters.directory is None:
        flags |= dict.fromkeys(ADAPTER_PATHS, "--enable-lora and --allow-runtime-lora")
    return flags


def _add_label_reads(app: FastAPI, service: Service) -> None:
    @app.post("/v1/decisions")
    async def decisions(body: DecisionsBody, request: Request) -> Response:
        return await while_connected(request, decide(service, body, request))

    @app.post("/v1/systemone")
    async def systemone(body: SystemOneBody, request: Request) -> Response:
        return await while_connected(request, decide_state(service, body, request))

    @app.post("/generative_scoring")
    async def generative_scoring(body: GenerativeBody, request: Request) -> Response:
        return await while_connected(request, score_generatively(service, body, request))

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        return await while_connected(request, embed(service, body, request))

    @app.post("/pooling")
    async def pooling(body: PoolingBody, request: Request) -> Response:
        return await while_connected(request, pool(service, body, request))

    @app.post("/score")
    @app.post("/v1/score")
    async def scores(body: ScoreBody, request: Request) -> Response:
        return await while_connected(request, score(service, body, request))

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def reranked(body: RerankBody, request: Request) -> Response:
        return await while_connected(request, rerank(service, body, request))


def _add_models(app: FastAPI, service: Service) -> None:
    max_model_len = service.client.frontend.limits.max_model_len

    def card(name: str) -> dict[str, Any]:
        adapter = service.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "strandline",
            "root": service.model_names[0] if adapter is None else adapter.path,
            "parent": None if adapter is None else service.model_names[0],
            "max_model_len": max_model_len,
            "type": "model",  # this and the following are Anthropic's fields
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created_s, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": max_model_len - 1,
            "max_tokens": max_model_len - 1,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = (*service.model_names, *(adapter.name for adapter in service.adapters))
        anthropic = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [card(name) for name in names], **anthropic})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(card(name))


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        service.require_model(body.model)
        check_extra(body.model_extra)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages")
        if body.prompt is not None:
            prompt = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            prompt = await service.render(
                body.messages or [],
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=check_continuation(body.continue_final_message, body.add_generation_prompt),
                tools=toolbox(body.tools, None).tools,
                template_options=chat_options(body.reasoning_effort, body.chat_template_kwargs),
                salt=service.salt_of(request, body.cache_salt, body.model),
            )
        max_model_len = service.client.frontend.limits.max_model_len
        tokens = prompt.token_ids
        texts = service.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts}
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.require_model(body.model)
        return json_response({"prompt": await service.decode(body.tokens)})
