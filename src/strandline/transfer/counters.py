"""Counts of what was transferred, by threads of their own."""

from collections import Counter
from threading import Lock
from typing import Final, NamedTuple

DONE: Final = "done"
NOT_NEEDED: Final = "not_needed"
"""The engine that asked has it, or its request went on without."""
NOTHING: Final = "nothing"
"""The engine that was asked has nothing of the prompt."""
SLOWER: Final = "slower"
"""Fetching would have taken longer than computing."""


class Counts(NamedTuple):
    """The pulls of one side: its own, or those of its peers."""

    outcomes: dict[str, int]
    """Pulls that have ended, by outcome: one of the above, or the ``Cause`` of a failure."""
    num_bytes: int
    """Bytes of completed transfers."""
    seconds: float
    """From the first to the last byte of each of them, summed."""


class TransferCounters:
    """Counts the pulls of one side. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._outcomes: Counter[str] = Counter()
        self._num_bytes = 0
        self._seconds = 0.0

    def count(self, outcome: str) -> None:
        """Count a pull that brought nothing."""
        with self._lock:
            self._outcomes[str(outcome)] += 1

    def count_done(self, num_bytes: int, seconds: float) -> None:
        """Count a pull that brought all that was wanted."""
        with self._lock:
            self._outcomes[DONE] += 1
            self._num_bytes += num_bytes
            self._seconds += seconds

    def read(self) -> Counts:
        """Return the counts so far."""
        with self._lock:
            return Counts(dict(self._outcomes), self._num_bytes, self._seconds)
