"""Schemas that combine others, and references, in formats that write each parameter by itself."""

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from strandline.records.sampling_params import StructuredOutputsParams
from strandline.text.parameter_sets import MAX_SETS, parameter_sets, parameter_types, self_contained
from strandline.text.segments import SegmentKind
from strandline.text.structured import Grammars
from strandline.text.tool_formats import tool_format
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.text.calls_grammar import calls_grammar

GRAMMARS: Final = Grammars(lambda: (byte_tokenizer(), frozenset({0})), 256)
INTEGER: Final = {"type": "integer"}
TEXT: Final = {"type": "string"}
TREE: Final = {
    "type": "object",
    "properties": {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value"],
}
LATER: Final = {
    "type": "object",
    "properties": {"first": {"type": "object", "properties": {"n": INTEGER}}, "second": {"$ref": "#/properties/first"}},
    "required": ["second"],
}
EITHER: Final = {
    "type": "object",
    "properties": {"id": INTEGER, "name": TEXT},
    "anyOf": [{"required": ["id"]}, {"required": ["name"]}],
}
KINDS: Final = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}, "n": INTEGER}, "required": ["kind", "n"]},
        {"type": "object", "properties": {"kind": {"const": "b"}, "flag": {"type": "boolean"}}, "required": ["kind"]},
        {"type": "null"},
    ]
}
BASED: Final = {
    "$defs": {"base": {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}},
    "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"limit": {"type": "integer", "maximum": 9}}}],
}
ROOT: Final = {"$ref": "#/definitions/args", "definitions": {"args": {**TREE, "required": ["value", "children"]}}}
MAP: Final = {"type": "object", "additionalProperties": INTEGER}
CASES: Final[list[tuple[Mapping[str, Any], list[Any], list[Any]]]] = [
    (
        TREE,
        [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}],
        [{}, {"value": 1, "children": [3]}],
    ),
    (LATER, [{"second": {"n": 1}}, {"first": {}, "second": {}}], [{"second": {"n": "x"}}, {"first": {}}]),
    (EITHER, [{"id": 1}, {"name": "x"}, {"id": 1, "name": "x"}], [{}]),
    (KINDS, [{"kind": "a", "n": 1}, {"kind": "b", "flag": True}, {"kind": "b"}], [{"kind": "a"}, {"n": 1}, {}]),
    (BASED, [{"id": 5, "limit": 9}, {"id": 5}], [{"limit": 9}, {"id": 5, "limit": 10}]),
    (ROOT, [{"value": 1, "children": []}], [{"value": 1}, {"value": "x", "children": []}]),
    (MAP, [{}, {"a": 1, "b": 2}], [{"a": [1]}]),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, [{"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    (
        {"properties": {"a": INTEGER}, "allOf": [{"properties": {"b": INTEGER}, "additionalProperties": False}]},
        [{"b": 1}, {}],
        [{"a": 1}],
    ),
]
"""Schemas, arguments that fulfil them, and arguments that do not."""


def admitted(parser: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = calls_grammar(tools, "required", parser, json.dumps)
    start = GRAMMARS.compile(StructuredOutputsParams(grammar=grammar)).start.deep_copy()
    call = {"function": {"name": "f", "arguments": arguments}, "id": "x"}
    text = tool_format(parser).write([call])
    tokens = byte_tokenizer().encode(text)
    return start.validate_tokens(tokens) == len(tokens) and start.consume_tokens(tokens) and start.is_accepting()


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "lfm2", "olmo3", "hermes"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_calls_fulfil_the_schema_around_each_parameter(parser: str, number: int) -> None:
    schema, right, wrong = CASES[number]
    for arguments in right:
        assert admitted(parser, schema, arguments), arguments
    for arguments in wrong:
        assert not admitted(parser, schema, arguments), arguments


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "lfm2"])
def test_written_arguments_are_read_with_their_types(parser: str, number: int) -> None:
    schema, right, _ = CASES[number]
    for arguments in right:
        text = tool_format(parser).write([{"function": {"name": "f", "arguments": arguments}, "id": "x"}])
        reader = tool_format(parser).parser({"f": schema})
        segments = [*reader.feed(text), *reader.finish()]
        read = "".join(segment.text for segment in segments if segment.kind is SegmentKind.ARGUMENTS)
        assert json.loads(read) == arguments


def test_types_of_alternatives_are_joined() -> None:
    schema = {"anyOf": [{"properties": {"a": INTEGER}}, {"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]}
    assert parameter_types(schema, "a") == {"integer", "string"}
    assert parameter_types(schema, "b") == {"string"}
    assert parameter_types(schema, "c") is None
    assert parameter_types(MAP, "any") == {"integer"}


def test_part_carries_all_that_it_refers_to() -> None:
    root = {
        "$defs": {"a/b": {"items": {"$ref": "#/$defs/c"}}, "c": {"$ref": "#/$defs/a~1b"}},
        "properties": {"$ref": {"$ref": "#/$defs/a~1b"}},
    }
    found = self_contained(root["properties"]["$ref"], root)
    assert found == {
        "$ref": "#/$defs/r0",
        "$defs": {"r0": {"items": {"$ref": "#/$defs/r1"}}, "r1": {"$ref": "#/$defs/r0"}},
    }
    assert self_contained({"enum": [{"$ref": "#"}]}, root) == {"enum": [{"$ref": "#"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}], "properties": {"a": INTEGER}},
        {"anyOf": [{"properties": {str(i): TEXT}} for i in range(MAX_SETS + 1)], "properties": {"a": INTEGER}},
        {"allOf": [{"anyOf": [{"required": [str(i)]}, {}]} for i in range(20)], "properties": {"a": INTEGER}},
        {"allOf": [{"type": "object"}, {"type": "string"}], "properties": {"a": INTEGER}},
        {"properties": {"a": INTEGER}, "$ref": "#/missing"},
        {"properties": {"a": INTEGER}, "anyOf": [False]},
    ],
)
def test_endless_and_impossible_combinations_are_left_out(schema: Mapping[str, Any]) -> None:
    [found] = parameter_sets(schema)
    assert found.properties == schema.get("properties", {})
