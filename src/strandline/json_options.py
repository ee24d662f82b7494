"""Options with several fields: a mapping in Python, JSON on the command line."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from strandline.errors import ConfigError


def read_json_option(
    flag: str, value: str | Mapping[str, Any], *, known: Iterable[str], example: str
) -> Mapping[str, Any]:
    """Return the fields of an option that is given as a mapping or as JSON.

    Args:
        known: the names of all fields.
        example: a valid value, for messages.

    Raises:
        ConfigError: the value is not a mapping, or a field is unknown.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag} must be JSON such as {example}: {error}; got {value!r}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag} must be a mapping such as {example}, got {value!r}")
    known = list(known)
    for name in value:
        if name not in known:
            raise ConfigError(f"{flag}: unknown field {name!r}; known are {', '.join(known)}")
    return value
