"""Warnings about requests: each is logged once, and a limited number of them, because clients choose the names."""

import logging
from typing import Final

LOGGER: Final = logging.getLogger("strandline.server")
MAX_LOGGED: Final = 200

_LOGGED: Final = set[tuple[str, str]]()


def warn_once(message: str, name: str) -> None:
    """Log a warning unless it has been logged.

    Args:
        message: with a ``%s`` for the name, which is shortened and escaped.
    """
    if len(_LOGGED) < MAX_LOGGED and (message, name) not in _LOGGED:
        _LOGGED.add((message, name))
        LOGGER.warning(message, f"{name[:60]!r}")
