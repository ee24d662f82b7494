"""Directories of the replicas' disk caches: subdirectories of the configured one, each used by one process.

Replicas have new names at each start, so a directory belongs to the replica that has locked it: a new replica takes
over the directory of one that has ended.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from strandline.errors import ConfigError, cause_of

MODE: Final = 0o600


@contextmanager
def replica_directory(parent: Path) -> Iterator[tuple[Path, int]]:
    """Lock the first of the directories ``0``, ``1``, … in ``parent`` that is free; yield it and the lock.

    The lock is a file descriptor. Let the engine's process inherit it, to hold the lock until that has ended too.

    Raises:
        ConfigError: ``parent`` cannot be created or written.
    """
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        locks = ((number, _lock(parent, number)) for number in count())
        path, lock = next((parent / str(number), lock) for number, lock in locks if lock is not None)
    except OSError as error:
        raise ConfigError(f"--disk-cache {parent} cannot be used: {cause_of(error)}") from error
    try:
        yield path, lock
    finally:
        os.close(lock)


def _lock(parent: Path, number: int) -> int | None:
    """Return the lock on a directory, or None if another process has it."""
    lock = os.open(parent / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock
