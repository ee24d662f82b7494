"""The configuration of LoRA adapters: names and meanings are vLLM's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

EXAMPLE: Final = '{"name": "sql", "path": "adapters/sql"}'
NAME: Final = re.compile(r"[^\s=][^\n\r]{0,199}")


@dataclass(frozen=True, slots=True)
class LoRAPath:
    """An adapter's name, which requests use, and the directory that it is read from."""

    name: str
    path: str


def read_lora_path(flag: str, value: str | Mapping[str, Any]) -> LoRAPath:
    """Read an adapter's name and directory: ``name=path``, or a mapping or JSON with both.

    Raises:
        ConfigError: it is neither, or one of them is missing or empty.
    """
    name: object
    path: object
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        name, equals, path = value.partition("=")
        if not equals:
            raise ConfigError(f"{flag} must be NAME=PATH or JSON such as {EXAMPLE}, got {value!r:.200}")
    else:
        fields = read_json_option(flag, value, known=("name", "path", "base_model_name"), example=EXAMPLE)
        name, path = fields.get("name"), fields.get("path")
    if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{flag} must have a name of at most 200 characters and a path, got {value!r:.200}")
    return LoRAPath(name, path)
