"""An event loop whose clock stands still while the process is stopped.

Tests of time limits are short, and a machine with much else to do stops a process for longer. Where a client and its
server run in one loop, neither is late for the other by this clock.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

TURN_S: Final = 0.01
"""Longest wait for files; twice as much passes at most between two looks at the clock."""


class BriefSelector(selectors.DefaultSelector):
    """Waits for a turn at most, so that waiting for files is no stop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(TURN_S if timeout is None else min(timeout, TURN_S))


class SteadyLoop(asyncio.SelectorEventLoop):
    """Runs as asyncio's own, by a clock that no stop of the process advances."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self._looked_s = monotonic()
        super().__init__(BriefSelector())

    def time(self) -> float:
        """Return the seconds that have passed, of each stop a moment at most."""
        now_s = monotonic()
        self._time_s += min(now_s - self._looked_s, 2 * TURN_S)
        self._looked_s = now_s
        return self._time_s


def run_steadily(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as ``asyncio.run`` does, in a steady loop."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(main)
