"""Closes the objects of a JSON schema that says nothing of other properties.

JSON Schema then allows any other property, which small models go on to invent. An object with the listed properties
alone fulfils the schema as well. Where schemas are combined it may not, as each part lists properties of its own: such
a schema is left open.
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
"""Keywords that say something of other properties."""


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it lists, unless it says something of others."""
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
