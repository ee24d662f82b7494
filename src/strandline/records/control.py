"""What operators and trainers ask of an engine between its steps."""

from typing import Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of unfinished requests: they are ended, finished first, or frozen."""
Memory = Literal["weights", "kv_cache"]
"""What a sleeping engine has given back."""
MEMORIES: tuple[Memory, ...] = ("weights", "kv_cache")


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Run no step until ``Resume``."""

    clears: str | None
    """Begins the salts of what is cached from now on, and nothing cached before is hit; None: the cache stays."""


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Run steps again."""


class ResetCache(msgspec.Struct, tag=True, frozen=True):
    """Drop all that is cached, and compute unfinished requests anew. Refused while requests run, unless ``forced``."""

    clears: str
    """As of ``Pause``."""
    forced: bool


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Give memory back, and run no step until all of it is taken again."""

    level: int
    """1: weights stay in the host's memory. 2: they are read again."""


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Take memory again."""

    memories: tuple[Memory, ...]


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Compute with the weights in a directory from now on, also what unfinished requests have computed."""

    path: str
    clears: str
    """As of ``Pause``."""


Action = Pause | Resume | ResetCache | Sleep | WakeUp | UpdateWeights
