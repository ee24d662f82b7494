"""What to evict: a queue of everything that may go, in the order of its worth.

The order is a strategy of one method. Entries are snapshots without readers, and childless runs that no lease
uses (evicted one block at a time, from their end). The queue is a heap with lazy deletion: an entry whose worth
has changed since it was pushed, or that may not go any more, is passed over.
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

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry) -> None:
        """Offer an entry. Call again whenever its worth changes or it becomes evictable."""
        self._pushes += 1
        heapq.heappush(self._heap, (self._order.worth(entry), self._pushes, entry))

    def pop(self) -> Entry | None:
        """Remove and return the entry with the least worth that may go now, or None."""
        while self._heap:
            worth, _, entry = heapq.heappop(self._heap)
            if self._can_evict(entry) and worth == self._order.worth(entry):
                return entry
        return None

    def prune(self, limit: int) -> None:
        """Drop stale entries when more than ``limit`` have gathered."""
        if len(self._heap) > limit:
            fresh = {id(e): (w, n, e) for w, n, e in self._heap if self._can_evict(e) and w == self._order.worth(e)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)
