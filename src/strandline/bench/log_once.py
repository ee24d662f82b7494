"""Keeps a command that loads a model several times from repeating what is logged at each load."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_once(name: str) -> Iterator[None]:
    """Let a logger pass each message only once."""
    logger = logging.getLogger(name)
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_repeated = text in seen
        seen.add(text)
        return not is_repeated

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)
