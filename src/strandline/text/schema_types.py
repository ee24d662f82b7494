"""Types that a parameter's JSON schema allows. Formats that write values without types need them."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

MAX_BRANCHES: Final = 256
"""Alternatives of a schema that are looked at; schemas come from clients."""
COMBINING: Final = ("anyOf", "oneOf", "allOf", "$ref")
NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ANY_BUT_TEXT: Final = frozenset({"null", *NAMES.values()}) - {"string"}

Schema = Mapping[str, Any]


def value_types(schema: Any, root: Schema) -> frozenset[str] | None:
    """Return the names of the allowed types; None if the schema says nothing about them.

    A schema that combines others in a way that is not understood allows all types but string.

    Args:
        root: has the definitions that the schema refers to.
    """
    if not isinstance(schema, Mapping):
        return None
    branches = _branches(schema, root)
    types = [_types(branch) for branch in branches or [{}]]
    if None in types:
        return ANY_BUT_TEXT if schema.keys() & set(COMBINING) else None
    return frozenset(name for names in types for name in names or ())


def literals(schema: Any, root: Schema) -> list[Any] | None:
    """Return all allowed values, if the schema lists them; else None."""
    values = [_values(branch) for branch in _branches(schema, root) or [{}]]
    return None if None in values else [value for listed in values for value in listed or ()]


def _branches(schema: Any, root: Schema) -> list[Schema] | None:
    """Return the alternatives that a schema combines; None if there are too many or one is not understood."""
    found: list[Schema] = []
    left = [schema]
    for _ in range(MAX_BRANCHES):
        if not left:
            return found
        branch = left.pop(0)
        if not isinstance(branch, Mapping):
            return None
        parts = _parts(branch, root)
        left += parts
        found += () if parts else (branch,)
    return None


def _parts(schema: Schema, root: Schema) -> list[Any]:
    """Return the alternatives that a schema lists; none if it says itself which values it allows."""
    if _types(schema) is not None:
        return []
    if "$ref" in schema:
        return [referred(schema["$ref"], root)]
    parts = schema.get("anyOf", schema.get("oneOf"))
    whole = schema.get("allOf")
    if not isinstance(parts, list) and isinstance(whole, list) and len(whole) == 1:
        return whole
    return parts if isinstance(parts, list) else []


def referred(reference: Any, root: Schema) -> Any:
    """Return the schema that a reference inside the document names; None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for part in reference[2:].split("/") if len(reference) > 1 else ():
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _types(schema: Schema) -> list[str] | None:
    kind, values = schema.get("type"), _listed(schema)
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [each for each in kind if isinstance(each, str)]
    return None if values is None else [NAMES.get(type(value), "null") for value in values]


def _values(schema: Schema) -> list[Any] | None:
    kind, values = schema.get("type"), _listed(schema)
    if values is None and kind in ("null", "boolean"):
        return [None] if kind == "null" else [True, False]
    return values


def _listed(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None
