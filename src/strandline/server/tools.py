"""Tools of a request, and the grammar of an answer that must call one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.text.reasoning_grammar import Tag, after_reasoning
from strandline.text.tool_formats import tool_format

MAX_TOOLS: Final = 1024


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A request's tools, in OpenAI's form."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    """``none``, ``auto``, ``required``, or ``named``."""
    name: str | None = None
    """The function that must be called, for ``named``."""
    is_parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any] | None:
        """Return parameter schemas by function; None if calls are not parsed."""
        if not self.tools or self.choice == "none":
            return None
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    def grammar(self, parser: str, tag: Tag, reasoning_end: str | None = None) -> str | None:
        """Return the grammar of an answer that must call a tool, in the model's format; None if it need not call one.

        Args:
            reasoning_end: tag that ends the reasoning in which the answer begins; None: it does not.

        Raises:
            RequestError: the model's format of calls is unknown.
        """
        if self.choice not in ("required", "named"):
            return None
        if parser == "none":
            raise RequestError(
                f"tool_choice {self.choice!r} needs a format of tool calls; give --tool-call-parser",
                param="tool_choice",
            )
        schemas = {name: schema for name, schema in (self.schemas or {}).items() if self.name in (None, name)}
        known = tool_format(parser)
        calls = {f"call{index}": named for index, named in enumerate(schemas.items())}
        rules = [line for rule, (name, schema) in calls.items() for line in known.rules(rule, name, schema, tag)]
        is_parallel = self.is_parallel and self.choice == "required"
        frame, start = known.frame, ["start: answer"]
        if reasoning_end is not None:
            start = after_reasoning(reasoning_end, "answer", tag, call_tag=frame.first_tag, opened="opened")
        return "\n".join(dict.fromkeys([*start, *frame.rules(list(calls), tag, is_parallel=is_parallel), *rules]))


def toolbox(tools: Sequence[Any] | None, choice: Any, *, is_parallel: bool = True) -> Toolbox:
    """Check a request's tools.

    Raises:
        RequestError: they are malformed.
    """
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools may be given, got {len(tools)}", param="tools")
    names = [_checked_name(tool) for tool in tools]
    kind, name = _choice(choice)
    if kind in ("required", "named") and not tools:
        raise RequestError(f"tool_choice {kind!r} needs tools", param="tool_choice")
    if name is not None and name not in names:
        raise RequestError(
            f"tool_choice names {name!r:.100}, which is not among the tools {', '.join(names)[:300]}",
            param="tool_choice",
        )
    return Toolbox(tools, kind, name, is_parallel)


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


def _choice(choice: Any) -> tuple[str, str | None]:
    if choice is None:
        return "auto", None
    if choice in ("none", "auto", "required"):
        return str(choice), None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return "named", function["name"]
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}, "
        f"got {_shown(choice)}",
        param="tool_choice",
    )


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:200]
