"""The file of API keys, with limits of each: TOML, a table for each key."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from strandline.errors import ConfigError, cause_of
from strandline.server.engines.tenants import KeyLimits

FLAG: Final = "--api-keys-file"
LIMITS: Final = ("max-requests-per-minute", "max-tokens-per-minute", "max-concurrent-requests")
FIELDS: Final = ("key", "weight", *LIMITS)
MAX_WEIGHT: Final = 1000.0


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key of the file."""

    name: str
    key: str
    limits: KeyLimits
    weight: float = 1.0


def read_keys_file(path: str, defaults: KeyLimits) -> Sequence[NamedKey]:
    """Read a file of keys.

    Args:
        defaults: limits of keys that have none of their own.

    Raises:
        ConfigError: it cannot be read, or has an unknown field or a value out of range.
    """
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {cause_of(error)}") from error
    keys = [_read(name, table, defaults) for name, table in tables.items()]
    if not keys:
        raise ConfigError(f'{FLAG} {path} has no keys; add a table for each, such as [team-a] with key = "..."')
    if len({each.key for each in keys}) < len(keys):
        raise ConfigError(f"{FLAG} {path} has the same key twice")
    return keys


def _read(name: str, table: Any, defaults: KeyLimits) -> NamedKey:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{FLAG}: {name!r} must be a table with the field key")
    if unknown := [field for field in table if field not in FIELDS]:
        raise ConfigError(f"{FLAG}: [{name}] has an unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    key, weight = table.get("key"), table.get("weight", 1.0)
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(f"{FLAG}: [{name}] needs a key that is a text and not blank")
    if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"{FLAG}: [{name}] weight must be above 0 and at most {MAX_WEIGHT:g}, got {weight!r:.100}")
    limits = {field: table[field] for field in LIMITS if field in table}
    for field, value in limits.items():
        check_limit(f"{FLAG}: [{name}] {field}", value)
    own = replace(defaults, **{field.replace("-", "_"): value for field, value in limits.items()})
    return NamedKey(name, key, own, float(weight))


def check_limit(name: str, value: Any) -> None:
    """Raise a ConfigError unless a limit is a whole number above 0."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r:.100}")
