"""Allocation of logs, which hold a running request's tokens that are not folded into its state yet."""

from heapq import heappop, heappush
from typing import cast

from strandline.ids import NULL_LOG, LogId


class LogPool:
    """Grants logs, the smallest id first, so that those in use are adjacent.

    Args:
        num_logs: number of logs; their ids start at 1.
    """

    def __init__(self, num_logs: int) -> None:
        self._free = [LogId(number) for number in range(1, num_logs + 1)]
        """A heap."""
        self._num_logs = num_logs

    def grant(self) -> LogId:
        """Return a free log, or the null log when all are granted."""
        return heappop(self._free) if self._free else NULL_LOG

    def free(self, log: LogId) -> None:
        """Take a log back; the null log is ignored."""
        if log != NULL_LOG:
            heappush(self._free, log)

    def used(self) -> set[LogId]:
        """Return the logs that are granted (for checks; linear in their number)."""
        return cast(set[LogId], set(range(1, self._num_logs + 1)).difference(self._free))
