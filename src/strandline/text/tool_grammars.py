"""Grammars of tool calls in Lark's syntax, for answers that must call a tool.

Values are written as chat templates render them in the next turn, so that the next turn hits all of this one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.closed_objects import close_objects
from strandline.text.headed_calls import ARGUMENTS, function_name
from strandline.text.parameter_sets import ParameterSet, parameter_sets, self_contained
from strandline.text.python_calls import NAME, split_keyword
from strandline.text.reasoning_grammar import ANYTHING, Tag
from strandline.text.schema_types import literals, value_types
from strandline.text.tag_calls import Tags, split_name

AS_TEMPLATES_WRITE: Final = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": True,
        "coerce_one_of": True,
    }
}
"""JSON with the white space that templates write. Keywords and formats that llguidance lacks do not bind."""
TEXT_GRAMMAR: Final = "x-text-grammar"
"""Key of a string's schema for the grammar of its text, in Lark's syntax, which tag formats enforce."""

Schema = Mapping[str, Any]
CallRules = Callable[[str, str, Schema, Tag], list[str]]
"""Returns the rules of a call, given the first rule's name, the function's name, its parameters' schema, and tags."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The tags and the text around calls."""

    begin: Sequence[str] = ()
    end: Sequence[str] = ()
    begin_call: Sequence[str] = ()
    end_call: Sequence[str] = ()
    separator: str = ""
    """Text between two calls."""

    @property
    def first_tag(self) -> str:
        """The tag that the calls of an answer begin with; empty: they have none."""
        return next(iter((*self.begin, *self.begin_call)), "")

    def rules(self, calls: Sequence[str], tag: Tag, *, is_parallel: bool) -> list[str]:
        """Return the rules of an answer of one or several calls, given the names of their rules.

        The rule ``answer`` is the whole of it, ``opened`` that after the first tag.
        """
        first, *before = (*self.begin, *self.begin_call) or ("",)
        separator = f"{json.dumps(self.separator)} " if self.separator else ""
        more = (f"({separator}call)*",) if is_parallel else ()
        return [
            " ".join(["answer:", *([tag(first)] if first else []), "opened"]),
            " ".join(["opened:", *map(tag, before), "ended_call", *more, *map(tag, self.end)]),
            " ".join(["call:", *map(tag, self.begin_call), "ended_call"]),
            " ".join(["ended_call:", f"({' | '.join(calls)})", *map(tag, self.end_call)]),
        ]

    def text(self, calls: Sequence[str]) -> str:
        """Return calls with the tags and the text around them."""
        written = ["".join([*self.begin_call, call, *self.end_call]) for call in calls]
        return "".join([*self.begin, self.separator.join(written), *self.end])


def json_call(key: str) -> CallRules:
    """Return the rule of calls as JSON objects with their arguments under a key."""

    def rules(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
        opening = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        return [f'{rule}: {opening} %json {_json(_of_object(schema))} "}}"']

    return rules


def headed_call(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
    """Return the rule of a call with its id before its arguments."""
    if function_name(f"functions.{name}:999") != name:
        raise _unwritable(name)
    opening = json.dumps(f"functions.{name}:")
    return [f"{rule}: {opening} /[0-9]{{1,3}}/ {tag(ARGUMENTS)} %json {_json({'type': 'object', **schema})}"]


def tag_call(tags: Tags) -> CallRules:
    """Return the rules of calls in tags."""
    closing = json.dumps(f"{tags.around_value}{tags.end_parameter}\n")

    def opening(name: str) -> str:
        return json.dumps(f"{tags.parameter}{tags.quote}{name}{tags.quote}>{tags.around_value}")

    def value(schema: Any, root: Schema) -> str:
        if isinstance(schema, Mapping) and isinstance(grammar := schema.get(TEXT_GRAMMAR), str):
            return f"%lark {{\n{grammar}\n}} {closing}"
        values, types = literals(schema, root), value_types(schema, root)
        if values is not None and not any(isinstance(value, list | dict) for value in values):
            written = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(map(json.dumps, written))}) {closing}"
        if types is None or "string" in types:  # strings are written as they are
            return "text"
        return f"%json {_json(self_contained(schema, root))} {closing}"

    def parameters(some: ParameterSet, root: Schema) -> str:
        parts = []
        for key, schema in some.properties.items():
            part = f"{opening(key)} {value(schema, root)}"
            parts.append(part if key in some.required else f"({part})?")
        if some.free_values is not False:
            begin, end = json.dumps(tags.parameter + tags.quote), json.dumps(f"{tags.quote}>{tags.around_value}")
            parts.append(f'({begin} /[^<>"\\n]+/ {end} {value(some.free_values, root)})*')
        return " ".join(parts) or '""'

    def rules(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
        sets = parameter_sets(schema)
        for written in (name, *(key for some in sets for key in some.properties)):
            if split_name(f"{tags.quote}{written}{tags.quote}>") != (written, ""):
                raise _unwritable(written)
        begin, end = f"{tags.function}{tags.quote}{name}{tags.quote}>\n", json.dumps(tags.end_function)
        called = " | ".join(parameters(some, schema) for some in sets)
        text = f"text[suffix={closing}]: {ANYTHING}"
        return [f"{rule}: {json.dumps(begin)} ({called}) {end}", text]

    return rules


def python_call(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
    """Return the rules of a call in Python's syntax."""
    if not NAME.fullmatch(name):
        raise _unwritable(name)
    sets = [_python_arguments(f"{rule}_{index}", some, schema) for index, some in enumerate(parameter_sets(schema))]
    called = " | ".join(arguments for arguments, _ in sets)
    return [f'{rule}: {json.dumps(f"{name}(")} ({called}) ")"', *(line for _, lines in sets for line in lines)]


def _python_arguments(rule: str, some: ParameterSet, root: Schema) -> tuple[str, list[str]]:
    """Return the arguments of a call in Lark's syntax, and the rules that they need."""
    if some.free_values is not False:
        value = f'{rule}_any: /[A-Za-z_][A-Za-z0-9_]*/ "=" {_python_value(some.free_values, root)}'
        return f'({rule}_any (", " {rule}_any)*)?', [value]
    lines = []
    rest = first = ""
    for index, (key, value) in reversed([*enumerate(some.properties.items())]):
        if split_keyword(f"{key}=", some.properties) != (key, ""):
            raise _unwritable(key)
        argument = f"{rule}_{index}"
        lines.append(f"{argument}: {json.dumps(key + '=')} {_python_value(value, root)}")
        alone = f"{argument} {rest}".strip()
        is_required = key in some.required
        first = alone if is_required or not first else f"({alone} | {first})"
        if not is_required and index == len(some.properties) - 1:
            first = f"({first})?"
        rest = f'", " {alone}' if is_required else f'(", " {argument})? {rest}'.strip()
    return first or '""', lines


def _unwritable(name: str) -> RequestError:
    return RequestError(
        f"this model's calls cannot contain the name {name!r:.100}; rename it, or do not require a call"
    )


def _python_value(schema: Any, root: Schema) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) and "enum" not in schema else None
    if kind == "boolean":
        return '("True" | "False")'
    if kind == "null":
        return '"None"'
    return f"%json {_json(self_contained(schema, root))}"


def _of_object(schema: Schema) -> Schema:
    """Return a schema that allows objects alone. llguidance refuses keywords next to cyclic references."""
    return schema if "$ref" in schema else {"type": "object", **schema}


def _json(schema: Schema) -> str:
    """Return a schema as text, with the white space that templates write in values."""
    return json.dumps({**close_objects(schema), **AS_TEMPLATES_WRITE})
