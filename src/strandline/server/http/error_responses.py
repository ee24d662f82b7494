"""Error responses: a status, and ``{"error": {"message", "type", "param", "code"}}``.

On Anthropic's paths the error has Anthropic's types, and the body ``"type": "error"`` and ``"request_id"`` beside it.
"""

import logging
import sys
from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from strandline.errors import EngineError, OutOfMemoryError, PromptTooLongError, RequestError, cause_of
from strandline.server.engines.engine_client import PausedError, QueueFullError
from strandline.server.engines.engine_link import EngineDeadError, RequestTimeoutError
from strandline.server.engines.engine_weights import StaleWeightsError
from strandline.server.engines.jobs import NoTokenError, OutputFailedError
from strandline.server.engines.tenants import RateLimitError
from strandline.server.http.body_faults import fault_of
from strandline.server.http.request_ids import id_headers, request_id

LOGGER: Final = logging.getLogger("strandline.server")
MAX_MESSAGE: Final = 1000
MAX_PARTS: Final = 8
"""At most this many last parts of an unknown path are looked at."""
RETRY_AFTER_S: Final = 1
RATE_LIMITED: Final = "rate_limit_exceeded"
TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAIS: Final = "set the client up for OpenAI's API, with /v1 as its base URL"
_OLLAMAS: Final = f"Ollama's API is not served; {_OPENAIS}"
NOT_SERVED: Final[Mapping[str, str]] = {
    "/api/version": _OLLAMAS,
    "/v1/batches": "batches are not served; send each request by itself, and many at the same time",
    "/v1/conversations": "conversations are not stored; send previous_response_id, or the whole conversation as input",
    "/v1/files": "files are not stored; send their text in messages",
    "/v1/messages/batches": "batches are not served; send each request by itself, and many at the same time",
    "/v1/responses/compact": "conversations are not compacted here; ask for a summary, and send it as input",
}
"""Paths of the APIs of others that are not served, with those below them, and what to do instead."""
FOREIGN_APIS: Final[Mapping[str, str]] = {
    "/api": _OLLAMAS,
    "/v1beta": f"Google's API is not served; {_OPENAIS}",
    "/generate": f"SGLang's own API is not served; {_OPENAIS}, or send tokens to /inference/v1/generate",
}
"""Where other APIs begin, and what to do instead."""
ANTHROPIC_PATH: Final = "/v1/messages"
_TEXT: Final = {"type": "string"}
_TEXT_OR_NULL: Final = {"anyOf": [_TEXT, {"type": "null"}]}
_FIELDS: Final = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_SCHEMA: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}},
}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request is rejected", "content": {"application/json": {"schema": _SCHEMA}}},
    "5XX": {"description": "The engine cannot answer", "content": {"application/json": {"schema": _SCHEMA}}},
}
"""OpenAPI documentation of errors."""


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class UnknownResponseError(RequestError):
    """No such response is stored."""


class UnknownPreviousResponseError(RequestError):
    """The response to be continued, or one before it, is not stored."""


class ThreadError(RequestError):
    """A request's ``thread`` cannot be served: Anthropic's clients send the whole conversation instead.

    Args:
        error_code: Anthropic's, by which clients choose what to do.
    """

    def __init__(self, message: str, error_code: str) -> None:
        super().__init__(message, param="thread")
        self.error_code = error_code


class UnknownAdapterError(RequestError):
    """The request names a LoRA adapter that is not there."""


def error_body(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """Return an error in the shape that a path's clients expect."""
    is_anthropic = path.startswith(ANTHROPIC_PATH)
    kind = (ANTHROPIC_TYPES if is_anthropic else TYPES).get(status, "invalid_request_error")
    if status >= 500 and kind == "invalid_request_error":
        kind = "api_error" if is_anthropic else "server_error"
    text = message[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
    error = {"message": text, "type": kind, "param": param, "code": code, **({"details": details} if details else {})}
    if is_anthropic:
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id()})
    return msgspec.json.encode({"error": error})


def error_response(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    details: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an error as a response."""
    body = error_body(path, status, message, param=param, code=code, details=details)
    return Response(body, status, dict(headers or {}), media_type="application/json")


def rate_limited(path: str, error: RateLimitError) -> Response:
    """Return the response to a request that exceeds a limit of its key."""
    headers = {"Retry-After": str(max(ceil(error.retry_after_s), RETRY_AFTER_S))}
    return error_response(path, 429, str(error), code=RATE_LIMITED, headers=headers)


def status_of(error: RequestError | EngineError) -> tuple[int, str | None]:
    """Return the HTTP status and OpenAI's code of an error."""
    match error:
        case QueueFullError():
            return 429, "queue_full"
        case RateLimitError():
            return 429, RATE_LIMITED
        case UnknownModelError():
            return 404, "model_not_found"
        case UnknownAdapterError() | UnknownResponseError():
            return 404, None
        case UnknownPreviousResponseError():
            return 400, "previous_response_not_found"
        case ThreadError():
            return (404 if error.error_code == "thread_not_found" else 400), error.error_code
        case PromptTooLongError():
            return 400, "context_length_exceeded"
        case RequestError():
            return 400, None
        case PausedError():
            return 503, "paused"
        case StaleWeightsError():
            return 503, "stale_weights"
        case OutOfMemoryError():
            return 503, "out_of_memory"
        case EngineDeadError():
            return 503, "engine_dead"
        case NoTokenError():
            return 500, "no_token"
        case OutputFailedError():
            return 500, "output_failed"
        case RequestTimeoutError():
            return 504, "timeout"
        case _:
            return 500, None


def add_error_handlers(app: FastAPI, flags: Mapping[str, str] | None = None) -> None:
    """Respond to every error of the application in the shape that clients expect.

    Args:
        flags: paths that are not served without a flag, and the flag.
    """
    app.state.flags_of_paths = flags or {}
    app.add_exception_handler(RequestError, _ours)
    app.add_exception_handler(EngineError, _ours)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineError)
    if isinstance(error, RateLimitError):
        return rate_limited(request.url.path, error)
    status, code = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    param = error.param if isinstance(error, RequestError) else None
    path, message = request.url.path, str(error)
    if path.startswith(ANTHROPIC_PATH) and isinstance(error, PromptTooLongError) and error.num_tokens is not None:
        # Anthropic's wording: clients read the numbers, to shorten the conversation by as much as is needed.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    details = {"error_code": error.error_code} if isinstance(error, ThreadError) else None
    return error_response(path, status, message, param=param, code=code, details=details, headers=headers)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, field = fault_of(error, request.headers.get("content-type"))
    return error_response(request.url.path, 400, message, param=field)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status, message = request.url.path, error.status_code, error.detail
    if status == 404:
        message = _no_path(request.app, path)
    elif status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed for {path[:200]}; use {allowed}"
    elif status == 400 and isinstance(error.__cause__, Exception):
        message = f"the body cannot be parsed: {_unparsed(error.__cause__)}"
    return error_response(path, status, message, headers=error.headers)


def _no_path(app: FastAPI, path: str) -> str:
    """Return why there is no such path, or which one a client with another base URL means."""
    if (flag := app.state.flags_of_paths.get(path)) is not None:
        return f"{path} is served only with {flag}"
    if (instead := _below(path, NOT_SERVED)) is not None:
        return f"there is no path {path[:200]}: {instead}"
    parts = [part.lower() for part in path.split("/") if part][-MAX_PARTS:]
    if parts == ["v1"]:
        return f"there is no path {path[:200]}: /v1 is the base URL of OpenAI's clients, which add a path to it"
    known = {route.path for route in app.routes if isinstance(route, Route)} - {"/"}
    ends = ("/" + "/".join(parts[first:]) for first in range(len(parts)))
    meant = next((each for end in ends for each in (end, f"/v1{end}") if each in known), None)
    if meant is not None:
        return f"there is no path {path[:200]}; did you mean {meant}? Check the client's base URL"
    if (instead := _below(path, FOREIGN_APIS)) is not None:
        return f"there is no path {path[:200]}: {instead}"
    return f"there is no path {path[:200]}; GET /openapi.json describes all paths"


def _below(path: str, texts: Mapping[str, str]) -> str | None:
    """Return the text of a path, or of the first one above it."""
    return next((text for each, text in texts.items() if f"{path}/".startswith(f"{each}/")), None)


def _unparsed(cause: Exception) -> str:
    match cause:
        case RecursionError():
            return "it is nested too deeply"
        case ValueError() if not isinstance(cause, UnicodeError):
            return f"a number has more than {sys.get_int_max_str_digits()} digits"
        case _:
            return cause_of(cause)


async def _unexpected(request: Request, error: Exception) -> Response:
    path = request.url.path
    LOGGER.error("request %s to %.200r failed unexpectedly", request_id(), path)
    # This response passes no middleware.
    message = f"internal error: {type(error).__name__}; see the server's log"
    return error_response(path, 500, message, headers=id_headers())
