"""Which objects of a JSON schema are closed."""

from typing import Any

import pytest

from strandline.text.closed_objects import close_objects

OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED: dict[str, Any] = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"items": OPEN, "prefixItems": [OPEN]}, {"items": CLOSED, "prefixItems": [CLOSED]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"b": OPEN}, "$ref": "#/$defs/b"}, {"$defs": {"b": CLOSED}, "$ref": "#/$defs/b"}),
        ({"allOf": [OPEN], "description": "one"}, {"allOf": [CLOSED], "description": "one"}),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"type": "object", "additionalProperties": OPEN}, {"type": "object", "additionalProperties": CLOSED}),
    ],
)
def test_objects_without_a_word_of_others_are_closed(schema: Any, expected: Any) -> None:
    assert close_objects(schema) == expected


def nested(depth: int) -> Any:
    schema: Any = OPEN
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "unevaluatedProperties": {"type": "string"}},
        {**OPEN, "minProperties": 2},
        {**OPEN, "required": ["a", "b"]},
        {**OPEN, "required": [["a"]]},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"$defs": {"b": OPEN}, "$ref": "#/$defs/b", "properties": {"c": {}}},
        {**OPEN, "anyOf": [{"required": ["a"]}]},
        {**OPEN, "patternProperties": {"^x": {}}},
        {"items": {"allOf": [OPEN, OPEN]}, "prefixItems": [OPEN]},
        {"const": OPEN},
        {"enum": [OPEN]},
        nested(5000),
    ],
)
def test_other_schemas_are_left_as_they_are(schema: Any) -> None:
    assert close_objects(schema) is schema or close_objects(schema) == schema
