"""What to evict: a queue of everything that may go, in the order of its worth.

The order is a strategy of one method. Entries are snapshots without readers, and childless runs that no lease
uses (evicted one block at a time, from their end). The queue is a heap with lazy deletion: of an entry that was
pushed more than once the last push counts; one that may not go any more is dropped, until it is offered again; one
whose worth has risen since it was pushed goes back in.
"""

import heapq
from collections.abc import Callable
from typing import Final, Protocol

from strandline.cache.tree import Run, Snapshot, first_bare_block, last_stub_into, num_continuations, snapshot_above
from strandline.ids import BLOCK_TOKENS

Entry = Run | Snapshot

NOTHING: Final = float("-inf")
REWIND_CHANCE: Final = 0.05
"""Of a snapshot that its path goes on from, to be used once more; the chance of a path's last one counts as 1."""
BRANCH_CHANCE: Final = 0.5
"""Of a snapshot that several paths go on from."""


class EvictionOrder(Protocol):
    """Ranks what may be evicted: the entry with the least worth goes first."""

    def worth(self, entry: Entry) -> float: ...


class LeastRecentlyUsed:
    """Evict what was used longest ago. The baseline."""

    def worth(self, entry: Entry) -> float:
        return entry.last_used


class WorthPerByte:
    """Evict what saves the least computation per byte, for its chance of being used. The default.

    A snapshot saves the tokens since the nearest snapshot above it: what is above is not lost with it, and a snapshot
    grows dearer when the one above goes. The last snapshot of a path also holds the keys and values since then, which
    nobody could use without it: they count as its size, and go with it. Its chance is the best: the next turn resumes
    there. Once a path goes on after a snapshot, only a rewind would use it; where several go on, what they share is
    used again. Keys and values that no snapshot needs are worth nothing.

    Use ages: an entry counts from the worth of what was evicted when it was last used, so that what is worth twice as
    much stays unused for twice as long. Source: GreedyDual-Size (Cao and Irani, 1997); the coverage is our own.

    Args:
        blocks_per_slot: the size of a snapshot.
    """

    def __init__(self, blocks_per_slot: int) -> None:
        self._slot_tokens = blocks_per_slot * BLOCK_TOKENS

    def worth(self, entry: Entry) -> float:
        if isinstance(entry, Snapshot):
            return entry.level + self._gain(entry)
        if first_bare_block(entry) < entry.end_block:
            return NOTHING
        if entry.positions:
            return self.worth(entry.snapshots[entry.positions[-1]])
        stub = last_stub_into(entry)
        return NOTHING if stub is None else self.worth(stub)

    def _gain(self, snapshot: Snapshot) -> float:
        above = snapshot_above(snapshot)
        saved_tokens = snapshot.position - (above.position if above is not None else 0)
        match num_continuations(snapshot):
            case 0:
                return saved_tokens / (self._slot_tokens + saved_tokens)
            case 1:
                return min(REWIND_CHANCE * saved_tokens / self._slot_tokens, 1.0)
            case _:
                return min(BRANCH_CHANCE * saved_tokens / self._slot_tokens, 1.0)


class EvictionQueue:
    """Candidates for eviction, least worth first."""

    def __init__(self, order: EvictionOrder, can_evict: Callable[[Entry], bool]) -> None:
        self._order = order
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Entry]] = []
        self._pushes = 0
        self.level = 0.0
        """The most that anything evicted so far was worth."""
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
                self.level = max(self.level, worth)
                return entry
            del self._last_push[entry]
        return None

    def prune(self, limit: int) -> None:
        """Drop stale entries when more than ``limit`` have gathered."""
        if len(self._heap) > limit:
            self._heap = [(w, n, e) for w, n, e in self._heap if self._last_push.get(e) == n and self._can_evict(e)]
            self._last_push = {entry: number for _, number, entry in self._heap}
            heapq.heapify(self._heap)
