"""Python's own values instead of those of NumPy, torch and pathlib, which callers of ``LLM`` have at hand."""

import os
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final

PLAIN: Final = frozenset({NoneType, bool, int, float, str})


def plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy or torch, and paths, as Python's own values, also inside a list or mapping."""
    if type(value) in PLAIN:
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | set | frozenset) and _holds_others(value):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and (_holds_others(value) or _holds_others(value.values())):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _holds_others(values: Any) -> bool:
    kinds = set(map(type, values)) - PLAIN
    return any(hasattr(kind, "tolist") or issubclass(kind, os.PathLike) for kind in kinds)
