"""Errors as OpenAI's clients expect them: a status, and ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from strandline.errors import EngineError, RequestError
from strandline.server.client import EngineDeadError, QueueFullError, RequestTimeoutError

MAX_MESSAGE: Final = 1000
RETRY_AFTER_S: Final = 1
TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 429: "rate_limit_error"}


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error in OpenAI's shape."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    text = message[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an error as a response."""
    body = error_body(status, message, param=param, code=code)
    return Response(body, status, dict(headers or {}), media_type="application/json")


def status_of(error: RequestError | EngineError) -> tuple[int, str | None]:
    """Return the HTTP status and OpenAI's code of one of our errors."""
    match error:
        case QueueFullError():
            return 429, "queue_full"
        case UnknownModelError():
            return 404, "model_not_found"
        case RequestError():
            return 400, None
        case EngineDeadError():
            return 503, "engine_dead"
        case RequestTimeoutError():
            return 504, "timeout"
        case _:
            return 500, None


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of the application one in OpenAI's shape."""
    app.add_exception_handler(RequestError, _ours)
    app.add_exception_handler(EngineError, _ours)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineError)
    status, code = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
    return error_response(status, str(error), code=code, headers=headers)


async def _malformed(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place)[:100].encode(errors="backslashreplace").decode()
    is_json = first["type"] != "json_invalid"
    message = f"{field}: {first['msg']}" if is_json and field else f"the body is not valid: {first['msg']}"
    return error_response(400, message, param=field if is_json and field else None)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, headers=error.headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    return error_response(500, f"internal error: {type(error).__name__}; the server's log says more")
