"""Tool calls written as models write them, for the history of templates that leave calls out."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from strandline.text.headed_calls import ARGUMENTS, function_name
from strandline.text.tag_calls import Tags

WriteCall = Callable[[str, Mapping[str, Any], str], str]
"""Writes a call, given the function's name, the arguments, and the call's id."""


def write_json(key: str) -> WriteCall:
    """Return a writer of calls as JSON objects with their arguments under a key."""

    def write(name: str, arguments: Mapping[str, Any], _: str) -> str:
        return f'{{"name": {_json(name)}, "{key}": {_json(arguments)}}}'

    return write


def write_tags(tags: Tags) -> WriteCall:
    """Return a writer of calls in tags."""

    def opening(tag: str, name: str) -> str:
        return f"{tag}{tags.quote}{name}{tags.quote}>"

    def write(name: str, arguments: Mapping[str, Any], _: str) -> str:
        lines = [opening(tags.function, name)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value)
            lines.append(f"{opening(tags.parameter, key)}{tags.around_value}{text}{tags.around_value}")
            lines[-1] += tags.end_parameter
        return "\n".join([*lines, tags.end_function])

    return write


def write_python(name: str, arguments: Mapping[str, Any], _: str) -> str:
    """Write a call in Python's syntax."""
    return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def write_headed(name: str, arguments: Mapping[str, Any], call_id: str) -> str:
    """Write a call with its id before its arguments."""
    head = call_id if function_name(call_id) == name else f"functions.{name}:0"
    return f"{head}{ARGUMENTS}{_json(arguments)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else _json(value)
