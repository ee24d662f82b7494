"""Tools of Anthropic's API: those that the model may call, in OpenAI's form.

Tools that Anthropic defines and the client runs have the schemas that are known for them. Tools that run on Anthropic's
servers are left out. A deferred tool is not declared before the conversation; a block of the conversation does that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import RequestError
from strandline.server.http.request_log import warn_once
from strandline.server.messages.content import function_tool
from strandline.server.requests.tools import Toolbox, toolbox
from strandline.server.requests.usage_and_logprobs import Json
from strandline.text.chat_messages import MARK

CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "none": "none", "any": "required"}
TOOL_SEARCH: Final = "tool_search_tool_"

_TEXT: Final = {"type": "string"}
_RANGE: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS: Final = {"path": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": {"type": "integer"}}


def _commands(names: Sequence[str], **properties: Any) -> Json:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command"]}


CLIENT_TOOLS: Final[Mapping[str, tuple[str, Json]]] = {
    "bash_": (
        "Run a command in a persistent shell, or restart the shell.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": (
        "View, create and edit text files.",
        _commands(
            ("view", "create", "str_replace", "insert"),
            **_EDITS,
            file_text=_TEXT,
            insert_text=_TEXT,
            view_range=_RANGE,
        ),
    ),
    "memory_": (
        "Read and write files under /memories, which outlast the conversation.",
        _commands(
            ("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            file_text=_TEXT,
            insert_text=_TEXT,
            view_range=_RANGE,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}
"""Tools that Anthropic defines and the client runs: the beginning of their types, a description, and a schema."""


@dataclass(frozen=True, slots=True)
class MessagesTools:
    """The tools of a request, in OpenAI's form."""

    listed: list[Json]
    """Those that the prompt declares before the conversation."""
    deferred: list[Json]
    """Those that a block of the conversation may declare."""
    hosted: dict[str, str]
    """Types of the tools that are left out, by name."""

    @property
    def definitions(self) -> dict[str, Json]:
        """All tools by name, without marks."""
        return {
            tool["function"]["name"]: {name: value for name, value in tool.items() if name != MARK}
            for tool in (*self.listed, *self.deferred)
        }

    def toolbox(self, choice: Mapping[str, Any] | None, added: Sequence[Json]) -> Toolbox:
        """Return the tools that may be called.

        Args:
            added: tools that only the conversation defines.

        Raises:
            RequestError: the choice is malformed, or needs a tool that is not served.
        """
        choice = choice or {"type": "auto"}
        kind, name = choice.get("type"), choice.get("name")
        wish: Any = CHOICES.get(str(kind))
        if kind == "tool":
            if isinstance(name, str) and name in self.hosted:
                raise _not_run(self.hosted[name])
            wish = {"type": "function", "function": {"name": name}}
        elif kind == "any" and self.hosted and not (self.listed or self.deferred or added):
            raise _not_run(next(iter(self.hosted.values())))
        if wish is None:
            raise RequestError(
                f"tool_choice must be of type auto, any, tool or none, got {json.dumps(choice)[:100]}",
                param="tool_choice",
            )
        is_parallel = not choice.get("disable_parallel_tool_use", False)
        return toolbox(self.listed, wish, is_parallel=is_parallel, later_tools=[*self.deferred, *added])


def read_tools(tools: Sequence[Any] | None) -> MessagesTools:
    """Return a request's tools.

    Raises:
        RequestError: one is malformed.
    """
    found = MessagesTools([], [], {})
    given = tools or ()
    # No client can find tools for the model that a search on Anthropic's servers would have found.
    is_searched = any(isinstance(tool, Mapping) and _kind(tool).startswith(TOOL_SEARCH) for tool in given)
    for index, tool in enumerate(given):
        function = _function(tool, index)
        if function is None:
            found.hosted[str(tool.get("name") or tool["type"])] = tool["type"]
            warn_once("tools of type %s are left out of prompts: they run on Anthropic's servers", tool["type"])
            continue
        is_deferred = tool.get("defer_loading") is True and not is_searched
        mark = {MARK: tool[MARK]} if tool.get(MARK) is not None else {}
        (found.deferred if is_deferred else found.listed).append({**function, **mark})
    return found


def _function(tool: Any, index: int) -> Json | None:
    """Return a tool in OpenAI's form; None if it is one that runs on Anthropic's servers."""
    if isinstance(tool, Mapping):
        kind, name = _kind(tool), tool.get("name")
        is_named = isinstance(name, str) and bool(name)
        if is_named and (kind in ("", "custom") or tool.get("input_schema") is not None):
            return function_tool(tool)
        for prefix, (description, schema) in CLIENT_TOOLS.items():
            if is_named and kind.startswith(prefix):
                return function_tool({"name": name, "description": description, "input_schema": schema})
        if kind not in ("", "custom", "function"):
            return None
    raise RequestError(
        f"tools.{index}: a tool must be {{'name': …, 'input_schema': …}}, or have a type of Anthropic's; "
        f"got {json.dumps(tool, default=str)[:200]}",
        param="tools",
    )


def _kind(tool: Mapping[str, Any]) -> str:
    kind = tool.get("type")
    return kind if isinstance(kind, str) else ""


def _not_run(kind: str) -> RequestError:
    return RequestError(
        f"tool_choice needs a tool of type {kind:.100}, which runs on Anthropic's servers; remove it",
        param="tool_choice",
    )
