"""Time as a dependency: seconds from an arbitrary start, so that tests and replays can replace the clock."""

from time import perf_counter
from typing import Protocol


class Clock(Protocol):
    """A clock that returns the time in seconds."""

    def __call__(self) -> float: ...


SYSTEM_CLOCK: Clock = perf_counter
