"""Parameters of administrative endpoints, which trainers send in the query or in a body."""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from strandline.errors import RequestError
from strandline.server.http.request_log import warn_once

NEARNESS: Final = 0.8
"""Least similarity of an unknown name to a parameter's at which the name is taken for a misspelling."""
UNKNOWN: Final = "parameter %s is unknown and ignored"

P = TypeVar("P", bound=BaseModel)


async def check_query(request: Request) -> None:
    """Log unknown parameters of the query, which vLLM and SGLang ignore.

    Raises:
        RequestError: the name is nearly that of a parameter, or the endpoint reads its parameters from a body.
    """
    route, query = request.scope["route"], request.query_params
    if route.dependant.body_params and query:
        raise RequestError(
            f"{route.path} reads parameters from the body, not from the query", param=next(iter(query))[:100]
        )
    known = list(_names(route.dependant.query_params))
    for name in query:
        if name in known:
            continue
        if nearest := get_close_matches(name, known, n=1, cutoff=NEARNESS):
            raise RequestError(
                f"{route.path} has no parameter {name[:100]!r}; did you mean {nearest[0]!r}?", param=name[:100]
            )
        warn_once(UNKNOWN, name)


def _names(parameters: list[Any]) -> Iterator[str]:
    """Yield the names of an endpoint's parameters, also of those in a model."""
    for each in parameters:
        kind = each.field_info.annotation
        yield from kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else (each.alias,)


async def with_body(request: Request, given: P) -> P:
    """Return the parameters of the query, and of the fields of a JSON body those that the query does not have.

    vLLM ignores such fields, although its clients send them: if ``mode`` was ignored, requests that were to be kept
    would end. Unknown fields are logged.

    Raises:
        RequestError: the body is not a JSON object.
        RequestValidationError: a field has a wrong value.
    """
    body = await _object_in(request)
    for name in body.keys() - type(given).model_fields.keys():
        warn_once(UNKNOWN, name)
    values = {name: value for name, value in body.items() if value is not None}
    try:
        return type(given).model_validate(values | given.model_dump(exclude_unset=True))
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults) from error


async def _object_in(request: Request) -> Mapping[str, Any]:
    """Return the JSON object in a body; without a body, an empty one."""
    data = await request.body()
    try:
        body = json.loads(data) if data.strip() else None
    except (ValueError, RecursionError):
        body = data
    if not isinstance(body, dict | None):
        raise RequestError("the body must be a JSON object: parameters are read from the query, or from its fields")
    return body or {}
