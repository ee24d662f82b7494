"""Calls of tools as the two chat templates write them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

WriteCall = Callable[[str, Mapping[str, Any]], str]
"""Writes a call of a tool, given its name and arguments, in the form of a chat template."""


def call_in_json(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def call_in_tags(name: str, arguments: Mapping[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CALLS: Mapping[str, WriteCall] = {"lenient": call_in_json, "strict": call_in_tags}
"""By template."""
