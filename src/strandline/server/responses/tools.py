"""Tools of OpenAI's Responses API: how they are declared to the model, and what a call of the model's is to the client.

The model knows functions only. A custom tool is a function with one text. A tool of a namespace has a name that depends
on nothing but the namespace and its own name, so that its calls in a history are rendered as the model wrote them,
whatever tools the request has. Tools that run on OpenAI's servers are left out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2s
from typing import Any, Final, NamedTuple

from strandline.errors import RequestError
from strandline.server.http.request_log import warn_once
from strandline.server.requests.tools import MAX_TOOLS, Toolbox, toolbox
from strandline.server.responses.content import shown

INPUT: Final = "input"
"""The parameter of a function that stands for a custom tool."""
MAX_NAME_CHARACTERS: Final = 128
"""Maximum length of the name of a namespace's tool; longer names end in a digest."""
SYNTAXES: Final = ("lark", "regex")
CHOICES: Final = ("none", "auto", "required")
SEARCH: Final = "tool_search"
"""A search that the client runs for tools that it has not declared."""


class ToolName(NamedTuple):
    """A tool, as the client calls it."""

    kind: str
    """``function``, ``custom`` or ``tool_search``."""
    name: str
    namespace: str | None = None

    @property
    def as_function(self) -> str:
        """The name of the model's function."""
        if self.namespace is None:
            return self.name
        joint = "" if self.namespace.endswith("__") else "__"
        name = f"{self.namespace}{joint}{self.name}"
        written = re.sub(r"[^A-Za-z0-9_]", "_", name)  # in Python's syntax, calls have no other names
        if len(written) <= MAX_NAME_CHARACTERS:
            return written
        digest = blake2s(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return f"{written[: MAX_NAME_CHARACTERS - len(digest) - 1]}_{digest}"


@dataclass(slots=True)
class DeclaredTools:
    """The tools of a request, as functions."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In the form of chat completions."""
    later_functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those that items of the conversation declare, by name."""
    hosted: list[str] = field(default_factory=list)
    """Types of the tools that are left out."""
    _tools: dict[str, ToolName] = field(default_factory=dict)
    _names: dict[ToolName, str] = field(default_factory=dict)
    _local_names: dict[str, list[ToolName]] = field(default_factory=dict)
    """Tools by their names without namespaces."""
    _grammars: dict[str, str] = field(default_factory=dict)

    def add(self, tools: Sequence[Any], path: str) -> None:
        """Add the request's tools.

        Raises:
            RequestError: one is malformed.
        """
        self.functions += self._declare(tools, path)

    def add_later(self, tools: Sequence[Any], path: str) -> list[dict[str, Any]]:
        """Add the tools that an item declares; return their functions. Raises as ``add``.

        Items may declare a tool again and again; the last declaration counts.
        """
        functions = list(self._declare(tools, path))
        self.later_functions.update({function["function"]["name"]: function for function in functions})
        return functions

    def tool(self, function: str) -> ToolName:
        """Return the client's name of a function.

        A model may leave out the namespace, which is clear if one tool alone has the name, and it may call functions
        that are not declared.
        """
        if function in self._tools:
            return self._tools[function]
        found = self._local_names.get(function, [])
        return found[0] if len(found) == 1 else ToolName("function", function)

    def function(self, tool: ToolName) -> str:
        """Return the model's name of a tool, which the request need not declare.

        A client may leave out the namespace, which is clear if one tool alone has the name.
        """
        if tool in self._names or tool.namespace is not None:
            return self._names.get(tool, tool.as_function)
        found = [other for other in self._local_names.get(tool.name, ()) if other.kind == tool.kind]
        return self._names[found[0]] if len(found) == 1 else tool.as_function

    def toolbox(self, choice: Any, *, is_parallel: bool) -> Toolbox:
        """Return the functions.

        Raises:
            RequestError: the choice is malformed, or needs a tool that is not served.
        """
        choice = self._choice(choice)
        if choice == "required" and not (self.functions or self.later_functions) and self.hosted:
            raise self._needs_hosted(self.hosted[0])
        box = toolbox(self.functions, choice, is_parallel=is_parallel, later_tools=[*self.later_functions.values()])
        return replace(box, text_grammars=self._grammars)

    def _choice(self, choice: Any) -> Any:
        """Return a choice in the form of chat completions."""
        if choice is None or choice in CHOICES:
            return choice
        match choice:
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                return _choice_of(self._chosen(kind, name, choice.get("namespace")))
            case {"type": "allowed_tools", "tools": list(tools)}:
                return self._allowed(choice.get("mode", "auto"), tools)
            case {"type": "tool_search"} if (search := ToolName(SEARCH, SEARCH)) in self._names:
                return _choice_of(self._names[search])
            case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
                raise self._needs_hosted(kind)
        raise RequestError(
            f"tool_choice must be one of {', '.join(CHOICES)}, {{'type': 'function' or 'custom', 'name': …}} or "
            f"{{'type': 'allowed_tools', 'mode': …, 'tools': […]}}, got {shown(choice)}",
            param="tool_choice",
        )

    def _allowed(self, mode: Any, tools: Sequence[Any]) -> Any:
        names: list[str] = []
        hosted: list[str] = []
        for tool in tools:
            match tool:
                case {"type": "function" | "custom" as kind, "name": str(name)}:
                    names.append(self._chosen(kind, name, tool.get("namespace")))
                case {"type": "namespace", "name": str(name)}:
                    names += [function for function, tool in self._tools.items() if tool.namespace == name]
                case {"type": "tool_search"} if (search := ToolName(SEARCH, SEARCH)) in self._names:
                    names.append(self._names[search])
                case {"type": str(kind)} if kind not in ("function", "custom"):
                    hosted.append(kind)
                case _:
                    raise RequestError(
                        f"a tool of tool_choice.tools must be {{'type': …, 'name': …}}, got {shown(tool)}",
                        param="tool_choice",
                    )
        if mode not in ("auto", "required"):
            raise RequestError(f"tool_choice.mode must be auto or required, got {shown(mode)}", param="tool_choice")
        if not names and mode == "required":
            raise self._needs_hosted(hosted[0] if hosted else "none")
        if not names:
            return "none"
        chosen = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}

    def _chosen(self, kind: str, name: str, namespace: Any) -> str:
        """Return the function of a choice."""
        return self.function(ToolName(kind, name, namespace if isinstance(namespace, str) else None))

    @staticmethod
    def _needs_hosted(kind: str) -> RequestError:
        return RequestError(
            f"tool_choice needs a tool of type {kind[:60]!r}, which this server does not run; it serves tools of type "
            "function, custom and namespace",
            param="tool_choice",
        )

    def _declare(self, tools: Sequence[Any], path: str) -> Iterator[dict[str, Any]]:
        for index, tool in enumerate(tools):
            yield from self._functions_of(tool, f"{path}[{index}]", None)

    def _functions_of(self, tool: Any, path: str, namespace: str | None) -> Iterator[dict[str, Any]]:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(f"{path} must be a tool with a type, got {shown(tool)}", param=path)
        if kind == "namespace" and namespace is None:
            yield from self._namespace(tool, path)
        elif kind in ("function", "custom"):
            yield self._function(tool, path, namespace)
        elif kind == SEARCH and tool.get("execution") == "client" and namespace is None:
            yield self._function({**tool, "name": SEARCH}, path, None)
        else:
            warn_once("a tool of type %s is left out: this server does not run it", kind)
            self.hosted.append(kind)

    def _namespace(self, tool: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
        name, tools = _named(tool, path), tool.get("tools")
        if not isinstance(tools, list):
            raise RequestError(f"{path}.tools must be a list of tools, got {shown(tools)}", param=f"{path}.tools")
        about = tool.get("description")
        for index, inner in enumerate(tools):
            for declared in self._functions_of(inner, f"{path}.tools[{index}]", name):
                if isinstance(about, str) and about.strip():
                    function = declared["function"]
                    texts = (about.strip(), function.get("description"))
                    function["description"] = "\n\n".join(filter(None, texts))
                    about = None  # one of the tools tells what they have in common
                yield declared

    def _function(self, tool: Mapping[str, Any], path: str, namespace: str | None) -> dict[str, Any]:
        kind = str(tool["type"])
        named = ToolName(kind, _named(tool, path), namespace)
        name = self._names.get(named) or self._new_name(named, path)
        if kind != "custom":
            given = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            return {"type": "function", "function": {"name": name, **given}}
        grammar = _grammar_of(tool.get("format"), f"{path}.format")
        about = [text] if isinstance(text := tool.get("description"), str) and text else []
        if grammar is not None:
            syntax, definition = grammar
            about.append(f"The input is a text that follows this grammar, in {syntax} syntax:\n{definition}")
            self._grammars[name] = _as_lark(syntax, definition)
        properties = {INPUT: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}
        described = {"description": "\n\n".join(about)} if about else {}
        return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}

    def _new_name(self, tool: ToolName, path: str) -> str:
        """Record a tool; return its name as a function, with a number if another tool has it."""
        if len(self._tools) == MAX_TOOLS:
            raise RequestError(f"at most {MAX_TOOLS} tools may be given, {path} is one more", param="tools")
        name, number = tool.as_function, 1
        while name in self._tools:
            number += 1
            name = f"{tool.as_function}_{number}"
        self._names[tool], self._tools[name] = name, tool
        self._local_names.setdefault(tool.name, []).append(tool)
        return name


def _choice_of(function: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function}}


def _named(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}.name must be a text, got {shown(name)}", param=f"{path}.name")
    return name


def _grammar_of(given: Any, path: str) -> tuple[str, str] | None:
    """Return the syntax and text of a custom tool's grammar; None if its input is any text."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(definition)}:
            return syntax, definition
    raise RequestError(
        f"{path} must be {{'type': 'text'}} or {{'type': 'grammar', 'syntax': {' or '.join(SYNTAXES)}, 'definition': "
        f"…}}, got {shown(given)}",
        param=path,
    )


def _as_lark(syntax: str, definition: str) -> str:
    if syntax == "lark":
        return definition
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", definition, flags=re.DOTALL)
    return f"start: /{escaped}/".replace("\n", r"\n")
