"""What to evict: a queue of everything that may go, in the order of its worth.

The order is a strategy of one method. Entries are snapshots without readers, and childless runs that no lease
uses (evicted one block at a time, from their end). The queue is a heap with lazy deletion: of an entry that was
pushed more than once the last push counts; one that may not go any more is dropped, until it is offered again; one
whose worth has risen since it was pushed goes back in.
"""

import heapq
from collections.abc import Callable
from typing import Protocol

from strandline.cache.tree import Run, Snapshot

Entry = Run | Snapshot


class EvictionOrder(Protocol):
    """Ranks what may be evicted: the entry with the least worth goes first."""

    def worth(self, entry: Entry) -> float: ...


class LeastRecentlyUsed:
    """Evict what was used longest ago. The baseline."""

    def worth(self, entry: Entry) -> float:
        return entry.last_used


class EvictionQueue:
    """Candidates for eviction, least worth first."""

    def __init__(self, order: EvictionOrder, can_evict: Callable[[Entry], bool]) -> None:
        self._order = order
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self._last_push: dict[Entry, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._last_push

    def push(self, entry: Entry) -> None:
        """Offer an entry. Call again whenever its worth falls or it becomes evictable."""
        self._pushes += 1
        self._last_push[entry] = self._pushes
        heapq.heappush(self._heap, (self._order.worth(entry), self._pushes, entry))

    def pop(self) -> Entry | None:
        """Remove and return the entry with the least worth that may go now, or None."""
        while self._heap:
            worth, number, entry = heapq.heappop(self._heap)
            if self._last_push.get(entry) != number:
                continue
            if self._can_evict(entry):
                if self._order.worth(entry) > worth:
                    self.push(entry)
                    continue
                del self._last_push[entry]
                return entry
            del self._last_push[entry]
        return None

    def prune(self, limit: int) -> None:
        """Drop stale entries when more than ``limit`` have gathered."""
        if len(self._heap) > limit:
            self._heap = [(w, n, e) for w, n, e in self._heap if self._last_push.get(e) == n and self._can_evict(e)]
            self._last_push = {entry: number for _, number, entry in self._heap}
            heapq.heapify(self._heap)
