"""Closing of objects in a JSON schema that does not mention additional properties.

JSON Schema then allows any additional property, and small models invent some. An object with only the listed properties
also satisfies the schema, unless the schema combines others, each with its own properties: such a schema is not
changed.
"""

from typing import Any, Final

MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values map names to schemas."""
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties")
"""Keywords whose values are schemas or lists of them."""
COMBINED: Final = ("properties", "patternProperties", "$ref", "anyOf", "oneOf")
"""Two of these in a schema hold for the same object."""
SPOKEN_OF: Final = frozenset(
    {"additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties", "maxProperties"}
)
"""Keywords that concern additional properties."""


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have only the listed properties, unless it mentions additional ones."""
    try:
        return _closed(schema)
    except (_CombinedError, RecursionError):
        return schema


class _CombinedError(Exception):
    """The schema combines others."""


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    all_of = schema.get("allOf")
    if sum(name in schema for name in COMBINED) + (len(all_of) if isinstance(all_of, list) else 0) > 1:
        raise _CombinedError
    found = {name: _closed_part(name, value) for name, value in schema.items()}
    if _lists_all(schema.get("properties"), schema.get("required", [])) and SPOKEN_OF.isdisjoint(schema):
        found["additionalProperties"] = False
    return found


def _lists_all(properties: Any, required: Any) -> bool:
    """Return whether there are listed properties, and an object needs no others."""
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _closed_part(name: str, value: Any) -> Any:
    if name in MAPS and isinstance(value, dict):
        return {key: _closed(each) for key, each in value.items()}
    return _closed(value) if name in LISTS else value
