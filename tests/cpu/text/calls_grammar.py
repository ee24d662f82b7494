"""Grammars of calls, for tests."""

from typing import Any

from strandline.server.requests.tools import toolbox
from strandline.text.reasoning_grammar import Tag


def calls_grammar(tools: list[Any], choice: Any, parser: str, tag: Tag, reasoning_end: str | None = None) -> str:
    """Return the grammar of answers that call tools, with the schemas as they are."""
    box = toolbox(tools, choice)
    return box.grammar(box.callable_schemas, parser, tag, reasoning_end)
