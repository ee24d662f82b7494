"""Messages about bodies that are not JSON, or have fields of wrong types: what is expected, and what was found."""

import json
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any, Final

from fastapi.exceptions import RequestValidationError

MAX_SHOWN: Final = 100

EXPECTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
    "string_unicode": "a string of valid Unicode",
}
"""What a field must be, by pydantic's type of error."""

_CONTAINERS: Final = Repr()
_CONTAINERS.maxdict = _CONTAINERS.maxlist = 4
_CONTAINERS.maxlevel = 3
_CONTAINERS.maxstring = _CONTAINERS.maxother = _CONTAINERS.maxlong = MAX_SHOWN


def fault_of(error: RequestValidationError, content_type: str | None) -> tuple[str, str | None]:
    """Return a message about the first fault of a body, and the field at fault; None: the whole body.

    Parameters in the path and the query are fields, too.

    Args:
        content_type: the request's header.
    """
    faults = error.errors()
    first: Mapping[str, Any] = faults[0]
    place = _place(first, error.body)
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if not place and isinstance(first.get("input"), bytes):
        sent = (content_type or "none")[:MAX_SHOWN]
        return f"the body must be sent with Content-Type: application/json, got {sent}", None
    name = ".".join(place)[:MAX_SHOWN].encode(errors="backslashreplace").decode()
    if first["type"] == "missing":
        return f"{name or 'the body'} is missing", name or None
    wanted = " or ".join(dict.fromkeys(_expected(fault) for fault in faults if _place(fault, error.body) == place))
    return f"{name or 'the body'} must be {wanted}, got {_shown(first.get('input'))}", name or None


def _place(fault: Mapping[str, Any], body: Any) -> Sequence[str]:
    """Return the path of the field at fault, without pydantic's names for the alternatives of a union."""
    if fault["loc"][0] != "body":
        return [str(part) for part in fault["loc"][1:]]
    place, value = [], body
    for part in fault["loc"][1:]:
        is_there = part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)
        if is_there:
            value = value[part]
        if is_there or (fault["type"] == "missing" and isinstance(value, Mapping)):
            place.append(str(part))
    return place


def _expected(fault: Mapping[str, Any]) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "value_error":
            return str(context["error"]).removeprefix("must be ")
        case "literal_error":
            return str(context["expected"])
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "too_short":
            return f"a list of at least {context['min_length']} item"
        case kind:
            return EXPECTED.get(kind) or f"valid ({fault['msg']})"


def _shown(value: Any) -> str:
    """Return the beginning of a value, at a cost that does not depend on its size."""
    if isinstance(value, str):
        return json.dumps(value[:MAX_SHOWN])
    return json.dumps(value) if value is None or isinstance(value, bool | float) else _CONTAINERS.repr(value)
