"""Tools of a request, and the grammar of an answer that must call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.reasoning_grammar import Tag, after_reasoning
from strandline.text.tool_formats import tool_format
from strandline.text.tool_grammars import TEXT_GRAMMAR

MAX_TOOLS: Final = 1024
ANNOTATIONS: Final = frozenset({"$schema", "title", "description"})
"""Keywords of a schema that bind nothing."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A request's tools, in OpenAI's form."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the prompt declares before the conversation."""
    choice: str = "auto"
    """``none``, ``auto``, ``required``, or ``named``."""
    allowed: frozenset[str] | None = None
    """The functions that may be called: one for ``named``; None: all."""
    is_parallel: bool = True
    later_tools: Sequence[Mapping[str, Any]] = ()
    """Further tools that may be called, which a message of the conversation declares."""
    text_grammars: Mapping[str, str] = field(default_factory=dict)
    """Grammars of the texts of functions that take one text, in Lark's syntax, by function."""

    @property
    def schemas(self) -> dict[str, Any] | None:
        """Return parameter schemas by function; None if calls are not parsed."""
        tools = [*self.tools, *self.later_tools]
        if not tools or self.choice == "none":
            return None
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    @property
    def callable_schemas(self) -> dict[str, Any]:
        """Return parameter schemas of the functions that an answer may call."""
        return {
            name: _with_text_grammar(_closed_if_empty(schema), self.text_grammars.get(name))
            for name, schema in (self.schemas or {}).items()
            if self.allowed is None or name in self.allowed
        }

    def grammar(
        self, schemas: Mapping[str, Any], parser: str, tag: Tag, reasoning_end: str | None = None, *, instead: str = ""
    ) -> str:
        """Return the grammar of an answer that calls tools, in the model's format.

        Args:
            schemas: schemas of callable functions: ``callable_schemas``, or what a compiler accepts of them.
            reasoning_end: tag that ends the reasoning in which the answer begins; None: it does not.
            instead: rule of an answer without calls; empty: a tool must be called.

        Raises:
            RequestError: the model's format of calls is unknown, or cannot express a name.
        """
        if parser == "none":
            raise RequestError(
                f"tool_choice {self.choice!r} needs a format of tool calls; give --tool-call-parser",
                param="tool_choice",
            )
        known = tool_format(parser)
        calls = {f"call{index}": named for index, named in enumerate(schemas.items())}
        rules = [line for rule, (name, schema) in calls.items() for line in known.rules(rule, name, schema, tag)]
        is_parallel = self.is_parallel and self.choice != "named"
        answer = f"(answer | {instead})" if instead else "answer"
        frame, start = known.frame, [f"start: {answer}"]
        if reasoning_end is not None:
            start = after_reasoning(reasoning_end, answer, tag, call_tag=frame.first_tag, opened="opened")
        return "\n".join(dict.fromkeys([*start, *frame.rules(list(calls), tag, is_parallel=is_parallel), *rules]))


def toolbox(
    tools: Sequence[Any] | None, choice: Any, *, is_parallel: bool = True, later_tools: Sequence[Any] = ()
) -> Toolbox:
    """Check a request's tools.

    Args:
        later_tools: as in ``Toolbox``.

    Raises:
        RequestError: they are malformed.
    """
    tools = tools or ()
    if len(tools) + len(later_tools) > MAX_TOOLS:
        raise RequestError(
            f"at most {MAX_TOOLS} tools may be given, got {len(tools) + len(later_tools)}", param="tools"
        )
    names = [_checked_name(tool) for tool in (*tools, *later_tools)]
    kind, allowed = _choice(choice)
    if kind == "required" and not names:
        raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
    for name in allowed or ():
        if name not in names:
            those = f"which is not among the tools {', '.join(names)[:300]}" if names else "but there are no tools"
            raise RequestError(f"tool_choice names {name!r:.100}, {those}", param="tool_choice")
    return Toolbox(tools, kind, None if allowed is None else frozenset(allowed), is_parallel, later_tools)


def _closed_if_empty(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's parameters; one that lists none has none, as in OpenAI's API."""
    is_open = schema.get("properties") != {} or not schema.keys() <= {"type", "properties", "required"} | ANNOTATIONS
    if schema and (is_open or schema.get("required")):
        return schema
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _with_text_grammar(schema: Mapping[str, Any], grammar: str | None) -> Mapping[str, Any]:
    """Return a schema of one text with the text's grammar, for formats that can enforce it."""
    if grammar is None:
        return schema
    return {
        **schema,
        "properties": {key: {**text, TEXT_GRAMMAR: grammar} for key, text in schema["properties"].items()},
    }


def _checked_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or function is None or tool.get("type", "function") != "function":
        raise RequestError(
            f"a tool must be {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}, got {_shown(tool)}",
            param="tools",
        )
    if fault := _fault(function.get("parameters") or {}):
        raise RequestError(f"the parameters of tool {name!r:.100} must be a JSON schema; {fault}", param="tools")
    return name


def _fault(parameters: Any) -> str | None:
    """Return a fault of a parameter schema, in the parts that parsers and grammars read; None if there is none."""
    if not isinstance(parameters, Mapping):
        return f"got {_shown(parameters)}"
    required, properties = parameters.get("required"), parameters.get("properties")
    if required is not None and not _are_strings(required):
        return f"'required' must be a list of names, got {_shown(required)}"
    if properties is not None and not isinstance(properties, Mapping):
        return f"'properties' must map names to schemas, got {_shown(properties)}"
    for name, schema in (properties or {}).items():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        is_schema = isinstance(schema, Mapping | bool) and (kind is None or isinstance(kind, str) or _are_strings(kind))
        if not is_schema:
            return f"that of {name!r:.100} must be one too, got {_shown(schema)}"
    return None


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _choice(choice: Any) -> tuple[str, list[str] | None]:
    """Return a choice's kind, and the functions that it allows; None: all."""
    if choice is None:
        return "auto", None
    if choice in ("none", "auto", "required"):
        return str(choice), None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function" and (name := _function_name(choice)) is not None:
        return "named", [name]
    if kind == "allowed_tools":
        given = choice.get("allowed_tools", choice)
        tools = given.get("tools") if isinstance(given, Mapping) else None
        names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
        known = [name for name in names if name is not None]
        if known and len(known) == len(names) and given.get("mode", "auto") in ("auto", "required"):
            return given.get("mode", "auto"), known
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or {'type': "
        f"'allowed_tools', 'allowed_tools': {{'mode': 'auto' or 'required', 'tools': […]}}}}, got {_shown(choice)}",
        param="tool_choice",
    )


def _function_name(tool: Any) -> str | None:
    """Return the name in a choice of a function, which may be next to the type; None if it names no function."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:200]
