"""What the grammar compiler refuses of one tool never refuses a request, and binds no other part of the schema less."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.records.events import Limits
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.server.engines.prompt import Prompt
from strandline.server.requests import callable_tools
from strandline.server.requests.callable_tools import MAX_TRIALS, CallableTools
from strandline.server.requests.output_parser import OutputFormat
from strandline.server.requests.service import Service
from strandline.server.requests.structured_fields import structure_of_format
from strandline.server.requests.tools import toolbox
from strandline.text import schema_parts
from strandline.text.frontend import Frontend
from tests.cpu.engine.tokenizers import CALLS_IN_JSON, byte_tokenizer, chat_template

TEXT: Final = {"type": "string"}
LACKING: Final[Mapping[str, Any]] = {
    "propertyNames": {"type": "object", "propertyNames": TEXT},
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": True},
    "contains": {"type": "array", "contains": TEXT, "minContains": 2},
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "oneOf": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]},
    "minProperties": {"type": "object", "properties": {"a": TEXT}, "minProperties": 1},
    "format": {"type": "array", "items": {"type": "string", "format": "int64"}},
    "look-ahead": {"type": "array", "items": {"type": "string", "pattern": "^(?!x)"}},
    "look-behind": {"type": "array", "items": {"type": "string", "pattern": "(?<=x)y"}},
    "boundary": {"type": "array", "items": {"type": "string", "pattern": r"\bx"}},
    "back-reference": {"type": "array", "items": {"type": "string", "pattern": r"(a)\1"}},
    "malformed pattern": {"type": "array", "items": {"type": "string", "pattern": "("}},
    "patternProperties": {"type": "object", "patternProperties": {"^(?!x)": TEXT}},
    "unknown type": {"type": "array", "items": {"type": "any"}},
    "missing reference": {"type": "array", "items": {"$ref": "#/$defs/none"}},
    "remote reference": {"type": "array", "items": {"$ref": "https://schemas.example/a"}},
    "wrong value": {"type": "array", "items": {"type": "integer", "minimum": "a"}},
    "two patterns": {"type": "array", "items": {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string"}},
    "contradiction": {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 3}, "minItems": 1},
}
"""Values of a parameter in which a part is refused, by that part."""
READ: Final = {"type": "object", "properties": {"path": TEXT, "line": {"type": "integer"}}, "required": ["path"]}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def service(parser: str) -> Service:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template(CALLS_IN_JSON, thinks=False)
    frontend = Frontend(Limits(256, 4096), tokenizer=tokenizer, eos_ids=frozenset({0}))
    client: Any = SimpleNamespace(frontend=frontend)
    return Service(client, ["x"], output_format=OutputFormat(parser))


SERVICES: Final = {name: service(name) for name in ("hermes", "qwen3_coder", "lfm2", "kimi_k2")}


def bound(
    parser: str, tools: list[Any], choice: Any = "required", structure: StructuredOutputsParams | None = None
) -> StructuredOutputsParams:
    params = SamplingParams(structured_outputs=structure)
    checked = asyncio.run(SERVICES[parser].bind(params, toolbox(tools, choice), Prompt([], "")))
    assert checked.params.structured_outputs is not None
    return checked.params.structured_outputs


def admits(structure: StructuredOutputsParams, text: str) -> bool:
    """Return whether a text is a whole answer."""
    frontend = SERVICES["hermes"].client.frontend
    start = frontend.grammars.compile(structure).start.deep_copy()
    tokens = byte_tokenizer().encode(text)
    return start.validate_tokens(tokens) == len(tokens) and start.consume_tokens(tokens) and start.is_accepting()


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("part", LACKING)
@pytest.mark.parametrize("parser", SERVICES)
def test_one_tool_with_a_refused_part_refuses_no_request(parser: str, part: str) -> None:
    properties = {"a": {"type": "integer", "maximum": 9}, "b": LACKING[part]}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    structure = bound(parser, [tool("read", READ), tool("odd", parameters), tool("read_too", READ)])
    if parser == "hermes":
        assert admits(structure, hermes("read", {"path": "x"}))
        assert not admits(structure, hermes("read", {"line": 1}))
        assert admits(structure, hermes("odd", {"a": 7}))
        assert not admits(structure, hermes("odd", {"a": 17}))
        assert not admits(structure, hermes("odd", {"b": []}))


NO_PARAMETERS: Final = (
    None,
    {},
    {"type": "object", "properties": {}},
    {"properties": {}, "title": "f", "required": []},
)


@pytest.mark.parametrize("parameters", NO_PARAMETERS)
@pytest.mark.parametrize("parser", SERVICES)
def test_function_without_parameters_gets_no_arguments(parser: str, parameters: Any) -> None:
    structure = bound(parser, [tool("clock", parameters)])
    if parser == "hermes":
        assert admits(structure, hermes("clock", {}))
        assert not admits(structure, hermes("clock", {"zone": "x"}))
    if parser == "qwen3_coder":
        call = "<tool_call>\n<function=clock>\n{}</function>\n</tool_call>"
        assert admits(structure, call.format(""))
        assert not admits(structure, call.format("<parameter=zone>\nx\n</parameter>\n"))


def test_function_of_any_object_may_get_arguments() -> None:
    listed: dict[str, Any] = {"type": "object", "properties": {}}
    for parameters in ({"type": "object"}, {**listed, "additionalProperties": True}, {**listed, "required": ["zone"]}):
        assert admits(bound("hermes", [tool("f", parameters)]), hermes("f", {"zone": "x"}))


def test_other_parts_of_the_schema_still_bind() -> None:
    properties = {
        "good": {"type": "string", "pattern": "^[ab]+$"},
        "bad": {"type": "string", "pattern": "^(?!x)", "enum": ["x", "y"]},
        "deep": {"type": "array", "items": {"type": "object", "properties": {"z": {"type": "string", "pattern": "("}}}},
    }
    structure = bound("hermes", [tool("f", {"type": "object", "properties": properties, "required": ["good"]})])
    assert admits(structure, hermes("f", {"good": "ab", "bad": "x", "deep": [{"z": "q"}]}))
    assert not admits(structure, hermes("f", {"good": "c"}))
    assert not admits(structure, hermes("f", {"good": "a", "bad": "z"}))
    assert not admits(structure, hermes("f", {"good": "a", "deep": [{"z": 1}]}))
    assert not admits(structure, hermes("f", {"good": "a", "deep": [{"y": 1}]}))


@pytest.mark.parametrize("part", LACKING)
def test_response_format_with_a_refused_part_stays_refused(part: str) -> None:
    schema = {"type": "object", "properties": {"b": LACKING[part]}, "required": ["b"]}
    structure = structure_of_format({"type": "json_schema", "json_schema": {"schema": schema}}, "response_format")
    assert structure is not None
    with pytest.raises(RequestError, match=r"response_format cannot be used|the JSON schema binds") as caught:
        bound("hermes", [tool("read", READ)], "auto", structure)
    assert caught.value.param == "response_format"


def test_tool_that_cannot_be_called_is_named_without_others_schemas() -> None:
    tools = [tool("read", {**READ, "description": "secret"}), tool("a b<", READ)]
    structure = bound("qwen3_coder", tools)
    assert admits(
        structure, "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>"
    )
    named = {"type": "function", "function": {"name": "a b<"}}
    with pytest.raises(RequestError, match="the tool 'a b<' cannot be called") as caught:
        bound("qwen3_coder", tools, named)
    assert "secret" not in str(caught.value)


def test_left_out_parts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"type": "object", "properties": {"c": {"type": "string", "pattern": "(?=c)"}}}
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            bound("hermes", [tool("once", parameters)])
    assert [record.getMessage() for record in caplog.records if "'once'" in record.getMessage()] == [
        "the tool 'once': left out of its schema, because the grammar compiler refuses it: properties/c/pattern"
    ]


def test_number_of_trials_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = reduced = 0

    async def check(schemas: Mapping[str, Any]) -> None:
        nonlocal asked
        asked += 1
        raise RequestError("no")

    def without_parts(*args: Any) -> Any:
        nonlocal reduced
        reduced += 1
        return schema_parts.without_parts(*args)

    monkeypatch.setattr(callable_tools, "without_parts", without_parts)
    schema = {"properties": {str(i): {"type": "string", "pattern": "("} for i in range(2000)}}
    with pytest.raises(RequestError, match="cannot be called: no"):
        asyncio.run(CallableTools().accepted({str(i): schema for i in range(100)}, check))
    assert asked <= 10 * MAX_TRIALS
    # A schema is reduced for a trial, or as the result: it takes time, and other requests wait.
    assert reduced <= 9 * MAX_TRIALS


NUMBER: Final = StructuredOutputsParams(
    json={"properties": {"n": {"type": "integer"}}, "required": ["n"]}, origin="response_format"
)


def test_answer_is_a_call_or_of_the_format() -> None:
    structure = NUMBER
    either = bound("hermes", [tool("read", READ)], "auto", structure)
    assert admits(either, '{"n": 3}')
    assert admits(either, hermes("read", {"path": "x"}))
    assert not admits(either, "text")
    assert not admits(either, '{"m": 3}')
    assert not admits(either, hermes("read", {"n": 3}))
    assert not admits(either, hermes("read", {"path": "x"}) + '{"n": 3}')
    only = bound("hermes", [tool("read", READ)], "required", structure)
    assert admits(only, hermes("read", {"path": "x"}))
    assert not admits(only, '{"n": 3}')
    assert bound("hermes", [tool("read", READ)], "none", structure).calls is None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_call_or_answer_follows_the_reasoning(choice: str) -> None:
    thinks = replace(SERVICES["hermes"], output_format=OutputFormat("hermes", "qwen3"))
    params = SamplingParams(structured_outputs=NUMBER)
    checked = asyncio.run(thinks.bind(params, toolbox([tool("read", READ)], choice), Prompt([], "<think>\n")))
    structure = checked.params.structured_outputs
    assert structure is not None
    call = hermes("read", {"path": "x"})
    assert admits(structure, "Hm.</think>\n\n" + call)
    assert admits(structure, "Hm.\n" + call)
    assert admits(structure, 'Hm.</think>\n\n{"n": 3}') is (choice == "auto")
    assert not admits(structure, "Hm.</think>\n\nHello")


SCALARS: Final = st.sampled_from(
    [*LACKING.values(), TEXT, {"type": "integer", "minimum": 0}, {"enum": ["a", 1, None]}, {"const": "q"}, {}, True]
)
SCHEMAS: Final = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda some: {"allOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(
            lambda properties, required: {"type": "object", "properties": properties, "required": required},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.lists(st.sampled_from("abcd"), max_size=2, unique=True),
        ),
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(SERVICES)),
    st.lists(st.dictionaries(st.sampled_from("abc"), SCHEMAS, max_size=3), min_size=1, max_size=3),
)
@settings(max_examples=settings().max_examples // 2 or 1, deadline=None)
def test_no_set_of_tools_is_refused(parser: str, parameters: list[dict[str, Any]]) -> None:
    tools = [
        tool(f"f{index}", {"type": "object", "properties": properties, "required": [*properties][:1]})
        for index, properties in enumerate(parameters)
    ]
    structure = bound(parser, tools)
    grammars = SERVICES[parser].client.frontend.grammars
    assert not grammars.compile(structure).start.is_error()
