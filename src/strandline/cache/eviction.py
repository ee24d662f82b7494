"""What to evict: a queue of everything that may go, in the order of its worth.

The order is a strategy of one method. Entries are snapshots without readers, and childless runs that no lease
uses (evicted one block at a time, from their end). The queue is a heap with lazy deletion: of an entry that was
pushed more than once the last push counts; one that may not go any more is dropped, until it is offered again; one
whose worth has risen since it was pushed goes back in. Stale entries are dropped when they outnumber the others.

What is offered is ranked only when something must go: a turn of a conversation offers the same few entries several
times over. But no more than ``MAX_UNRANKED`` wait for that, so that the first eviction does not pay for all before it.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from strandline.cache.account import SnapshotKind
from strandline.cache.outcomes import next_edge
from strandline.cache.reuse import ReuseHistory
from strandline.cache.tree import Run, Snapshot, last_stub_into, num_continuations, snapshot_above
from strandline.ids import BLOCK_TOKENS

Entry = Run | Snapshot

NOTHING: Final = float("-inf")
CERTAIN: Final = 1.0
"""Returns per unit of time of what a waiting request will resume from, or nobody has had the chance to."""
MAX_UNRANKED: Final = 64


class EvictionOrder(Protocol):
    """Ranks what may be evicted: the entry with the least worth goes first."""

    def worth(self, entry: Entry) -> float: ...


@runtime_checkable
class AgeingOrder(EvictionOrder, Protocol):
    """An order by which entries lose worth as time goes by."""

    @property
    def now(self) -> int: ...

    def appraise(self, entry: Entry) -> tuple[float, int | None]:
        """Return an entry's worth, and when, after now, that may next be less if nobody uses it; None: never."""


class LeastRecentlyUsed:
    """Evict what was used longest ago. The baseline."""

    def worth(self, entry: Entry) -> float:
        return entry.last_tick


class WorthPerByte:
    """Evict what saves the least computation per byte and time, for its chance of being used. The default.

    A snapshot saves the tokens since the nearest snapshot above it: what is above is not lost with it, and a snapshot
    grows dearer when the one above goes. The last snapshot of a path also holds the keys and values since then, which
    nobody could use without it: they count as its size, and go with it. Once a path goes on after a snapshot, only a
    rewind would use it; where several go on, what they share is used again. One path that goes on in several ways is
    still one: its answers were left out, not shared. The end of a prompt is used if its path's next turn leaves out the
    answer, until that has come. Keys and values that no snapshot needs are worth nothing. The last snapshot of a path
    that was used since the last admission is as good as certain: nobody has had the chance to use it since.

    When something unused for so long comes back is learned (``ReuseHistory``).

    Args:
        blocks_per_slot: the size of a snapshot.
    """

    def __init__(self, blocks_per_slot: int, reuse: ReuseHistory) -> None:
        self._slot_tokens = blocks_per_slot * BLOCK_TOKENS
        self._reuse = reuse

    @property
    def now(self) -> int:
        """Admissions so far."""
        return self._reuse.now

    def worth(self, entry: Entry) -> float:
        worth, _ = self.appraise(entry)
        return worth

    def appraise(self, entry: Entry) -> tuple[float, int | None]:
        snapshot = entry if isinstance(entry, Snapshot) else _needed_snapshot(entry)
        if snapshot is None:
            return NOTHING, None
        age = self._reuse.now - snapshot.use.at
        return self._worth(snapshot, age), snapshot.use.at + next_edge(age)

    def _worth(self, snapshot: Snapshot, age: int) -> float:
        above = snapshot_above(snapshot)
        saved_tokens = snapshot.position - (above.position if above is not None else 0)
        ways_on = num_continuations(snapshot)
        size = self._slot_tokens + (0 if ways_on else saved_tokens)
        density = self._density(snapshot, ways_on, age)
        if snapshot.num_waiters or (ways_on == 0 and age == 0):
            density = max(density, CERTAIN)
        return density * saved_tokens / size

    def _density(self, snapshot: Snapshot, ways_on: int, age: int) -> float:
        reuse = self._reuse
        if ways_on > 1 and snapshot.is_shared:
            return reuse.density_of_shared(snapshot.use.interarrival_bin, age)
        if ways_on == 0:
            is_answer = snapshot.kind is SnapshotKind.GENERATION_END
            return (reuse.density_of_answer if is_answer else reuse.density)(snapshot.use.interarrival_bin, age)
        if snapshot.kind is SnapshotKind.PROMPT_END and not snapshot.is_passed:
            return reuse.density_of_prompt(snapshot.use.interarrival_bin, age)
        return reuse.density_of_inner(snapshot.use.interarrival_bin, age)


def _needed_snapshot(run: Run) -> Snapshot | None:
    """Return the last snapshot that needs the last block of a childless run, or None."""
    if run.positions:
        last = run.positions[-1]
        return run.snapshots[last] if last > (run.end_block - 1) * BLOCK_TOKENS else None
    return last_stub_into(run) if len(run.blocks) == 1 else None


class EvictionQueue:
    """Candidates for eviction, least worth first."""

    def __init__(self, order: EvictionOrder, can_evict: Callable[[Entry], bool]) -> None:
        self._order = order
        self._ageing = order if isinstance(order, AgeingOrder) else None
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Entry]] = []
        self._reviews: dict[int, list[tuple[int, Entry]]] = {}
        """By time: which pushes to look at again then."""
        self._num_reviews = 0
        self._reviewed_at = 0
        self._unranked: dict[Entry, None] = {}
        """Offered since something last had to go, in the order of the first offer."""
        self._pushes = 0
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._heap) + len(self._unranked)

    def __contains__(self, entry: Entry) -> bool:
        return entry.last_push > 0 or entry in self._unranked

    def push(self, entry: Entry) -> None:
        """Offer an entry. Call again whenever its worth falls or it becomes evictable."""
        self._unranked[entry] = None
        if len(self._unranked) >= MAX_UNRANKED:
            self._rank_offers()

    def _rank_offers(self) -> None:
        """Put what was offered in its place, unless it may not go any more."""
        offered, self._unranked = self._unranked, {}
        for entry in offered:
            if self._can_evict(entry):
                self._rank(entry)

    def _rank(self, entry: Entry) -> None:
        if len(self._heap) >= self._prune_at or self._num_reviews >= self._prune_at:
            self._prune()
        number = self._pushes = self._pushes + 1
        entry.last_push = number
        if self._ageing is None:
            worth = self._order.worth(entry)
        else:
            worth, review_at = self._ageing.appraise(entry)
            if review_at is not None:
                self._reviews.setdefault(review_at, []).append((number, entry))
                self._num_reviews += 1
        heapq.heappush(self._heap, (worth, number, entry))

    def _review(self) -> None:
        """Push again whatever may be worth less by now."""
        if self._ageing is None or not self._reviews or self._reviewed_at == (now := self._ageing.now):
            return
        times: Sequence[int] = range(self._reviewed_at + 1, now + 1)
        if len(times) > len(self._reviews):
            times = sorted(at for at in self._reviews if at <= now)
        self._reviewed_at = now
        for at in times:
            due = self._reviews.pop(at, ())
            self._num_reviews -= len(due)
            for number, entry in due:
                if entry.last_push == number and self._can_evict(entry):
                    self._rank(entry)

    def pop(self) -> Entry | None:
        """Remove and return the entry with the least worth that may go now, or None."""
        self._rank_offers()
        self._review()
        while self._heap:
            worth, number, entry = heapq.heappop(self._heap)
            if entry.last_push != number:
                continue
            if self._can_evict(entry):
                if self._order.worth(entry) > worth:
                    self._rank(entry)
                    continue
                entry.last_push = 0
                return entry
            entry.last_push = 0
        return None

    def _prune(self) -> None:
        """Drop stale entries."""
        heap = list[tuple[float, int, Entry]]()
        for ranked in self._heap:
            _, number, entry = ranked
            if entry.last_push == number:
                if self._can_evict(entry):
                    heap.append(ranked)
                else:
                    entry.last_push = 0
        heapq.heapify(heap)
        self._heap = heap
        self._num_reviews = 0
        for at, due in list(self._reviews.items()):
            due[:] = [review for review in due if review[1].last_push == review[0]]
            self._num_reviews += len(due)
            if not due:
                del self._reviews[at]
        self._prune_at = 4 * len(self._heap) + 1024
