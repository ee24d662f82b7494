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
        return [f'{rule}: {opening} %json {_json({"type": "object", **schema})} "}}"']

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

    def value(schema: Any, root: Schema, definitions: Schema) -> str:
        if isinstance(schema, Mapping) and isinstance(grammar := schema.get(TEXT_GRAMMAR), str):
            return f"%lark {{\n{grammar}\n}} {closing}"
        values, types = literals(schema, root), value_types(schema, root)
        if values is not None and not any(isinstance(value, list | dict) for value in values):
            written = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(map(json.dumps, written))}) {closing}"
        if types is None or "string" in types:  # strings are written as they are
            return "text"
        return f"%json {_json({**definitions, **schema})} {closing}"

    def rules(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
        properties, definitions = _properties(schema)
        required = schema.get("required") or ()
        for written in (name, *(properties or ())):
            if split_name(f"{tags.quote}{written}{tags.quote}>") != (written, ""):
                raise _unwritable(written)
        parts = [json.dumps(f"{tags.function}{tags.quote}{name}{tags.quote}>\n")]
        for key, property_schema in (properties or {}).items():
            part = f"{opening(key)} {value(property_schema, schema, definitions)}"
            parts.append(part if key in required else f"({part})?")
        if properties is None:  # no schema of the parameters: any are allowed
            begin, end = json.dumps(tags.parameter + tags.quote), json.dumps(f"{tags.quote}>{tags.around_value}")
            parts.append(f'({begin} /[^>"\\n]+/ {end} text)*')
        text = f"text[suffix={closing}]: {ANYTHING}"
        return [" ".join([f"{rule}:", *parts, json.dumps(tags.end_function)]), text]

    return rules


def python_call(rule: str, name: str, schema: Schema, tag: Tag) -> list[str]:
    """Return the rules of a call in Python's syntax."""
    properties, definitions = _properties(schema)
    if not NAME.fullmatch(name):
        raise _unwritable(name)
    opening = json.dumps(f"{name}(")
    if properties is None:
        value = f'{rule}_any: /[A-Za-z_][A-Za-z0-9_]*/ "=" %json {{}}'
        return [f'{rule}: {opening} ({rule}_any (", " {rule}_any)*)? ")"', value]
    required = schema.get("required") or ()
    lines = []
    rest = first = ""
    for index, (key, value) in reversed([*enumerate(properties.items())]):
        if split_keyword(f"{key}=", properties) != (key, ""):
            raise _unwritable(key)
        argument = f"{rule}_{index}"
        lines.append(f"{argument}: {json.dumps(key + '=')} {_python_value(value, definitions)}")
        alone = f"{argument} {rest}".strip()
        is_required = key in required
        first = alone if is_required or not first else f"({alone} | {first})"
        if not is_required and index == len(properties) - 1:
            first = f"({first})?"
        rest = f'", " {alone}' if is_required else f'(", " {argument})? {rest}'.strip()
    return [f'{rule}: {opening} {first} ")"', *lines]


def _unwritable(name: str) -> RequestError:
    return RequestError(
        f"this model's calls cannot contain the name {name!r:.100}; rename it, or do not require a call"
    )


def _python_value(schema: Any, definitions: Schema) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) and "enum" not in schema else None
    if kind == "boolean":
        return '("True" | "False")'
    if kind == "null":
        return '"None"'
    return f"%json {_json({**definitions, **schema} if isinstance(schema, Mapping) else {})}"


def _properties(schema: Schema) -> tuple[Schema | None, Schema]:
    """Return a function's parameters (None if the schema lists none) and the definitions that they refer to."""
    properties = schema.get("properties")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return (properties if isinstance(properties, Mapping) else None), definitions


def _json(schema: Schema) -> str:
    """Return a schema as text, with the white space that templates write in values."""
    return json.dumps({**close_objects(schema), **AS_TEMPLATES_WRITE})
