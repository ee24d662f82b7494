"""Which JSON schemas bind one string to several patterns."""

from typing import Any

import pytest

from strandline.errors import RequestError
from strandline.text.schema_patterns import check_patterns

A: dict[str, Any] = {"type": "string", "pattern": "a+"}
B: dict[str, Any] = {"type": "string", "pattern": "b+"}
DATE: dict[str, Any] = {"format": "date"}
TIME: dict[str, Any] = {"format": "time"}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {"allOf": [DATE, TIME]},
        {"$defs": {"b": B}, **A, "$ref": "#/$defs/b"},
        {"$defs": {"b": {"$ref": "#/$defs/c~1d"}, "c/d": B}, **A, "$ref": "#/$defs/b"},
        {"allOf": [{"allOf": [{"allOf": [A]}]}, {"anyOf": [{"type": "null"}, B]}]},
        {**A, "anyOf": [B, {"type": "null"}]},
        {"anyOf": [A, B], "oneOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"anyOf": [A, B]}}},
        {"allOf": [of(p=A), of(p=B)]},
        {"$defs": {"base": of(p=A)}, "$ref": "#/$defs/base", **of(p=B)},
        {"allOf": [of(p=of(q=A)), of(p={"properties": {"q": {"anyOf": [B]}}})]},
        {"allOf": [of(p=A), {"additionalProperties": B}]},
        {"allOf": [{"patternProperties": {"^p": A}}, {"additionalProperties": B}]},
        {"allOf": [of(p=A), {**of(p={}), "patternProperties": {"^p": B}}]},
        {**of(p=A), "patternProperties": {"^p": B}},
        {"allOf": [{"items": A}, {"prefixItems": [{}, B]}]},
        {"allOf": [{"items": [A]}, {"additionalItems": B}]},
        {"items": {"properties": {"p": {"allOf": [A, B]}}}},
        {"$defs": {"list": {**of(next={"$ref": "#/$defs/list"}, p=A)}}, "allOf": [{"$ref": "#/$defs/list"}, of(p=B)]},
    ],
)
def test_two_patterns_for_one_string_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"binds one string to the (pattern|format)s"):
        check_patterns(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"anyOf": [A, B]},
        {"type": "string", "pattern": "a+", "format": "date", "maxLength": 9},
        {"allOf": [A, dict(A)], "minLength": 2},
        {"allOf": [of(p=A), of(q=B)]},
        {"$defs": {"base": of(id=DATE, at=TIME)}, "allOf": [{"$ref": "#/$defs/base"}, of(name=A, other=B)]},
        {"items": {"anyOf": [A, B]}, "prefixItems": [A, B]},
        {**of(p=A, q=B), "additionalProperties": DATE},
        {
            "$defs": {"tree": of(left={"$ref": "#/$defs/tree"}, leaf=A, other=B)},
            "$ref": "#/$defs/tree",
            "title": "Tree",
        },
        {"allOf": [A], "enum": ["a", "aa"], "examples": [B]},
        of(pattern=A, format=B, allOf=DATE),
        {"$id": "https://example.com/s", **of(p=A, q=B)},
    ],
)
def test_one_pattern_for_each_string_is_accepted(schema: Any) -> None:
    check_patterns(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": [A, {"$ref": "other.json"}], "properties": {"q": B}}, "must be '#' or begin with '#/'"),
        ({"allOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": {"$id": "x", **B}}}, r"may have an \$id"),
        (
            {"allOf": [of(**{f"p{i}": {} for i in range(9)}, **{f"q{j}": A}) for j in range(300)] + [of(r=B)]},
            "too many",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_patterns(schema)


def test_reference_to_nothing_is_left_to_the_compiler() -> None:
    check_patterns({"allOf": [A, {"$ref": "#/$defs/missing/9"}], "properties": {"q": B}})
