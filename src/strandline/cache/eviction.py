"""The eviction order: a queue of everything that can be evicted, least worth first.

Entries are snapshots without readers, and childless runs that no lease uses (evicted from their end, in blocks). The
queue is a heap with lazy deletion: only the last push of an entry counts; an entry that cannot be evicted any more is
dropped until it is offered again; an entry whose worth has risen since it was pushed is pushed again. Stale pushes are
pruned when they outnumber the others.

Offers are ranked only when something must be evicted, since a turn of a conversation offers the same few entries
several times. At most ``MAX_UNRANKED`` are deferred, so that the first eviction does not pay for all of them.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from strandline.cache.tree import Run, Snapshot

Entry = Run | Snapshot

MAX_UNRANKED: Final = 64


class Ranked(Protocol):
    """What can be in an eviction queue."""

    last_push: int
    """The number of its last push; 0: it is not there."""


Ranked_t = TypeVar("Ranked_t", bound=Ranked)
Ranked_contra = TypeVar("Ranked_contra", contravariant=True)


class Order(Protocol[Ranked_contra]):
    """Ranks what can be evicted: the entry with the least worth first."""

    def worth(self, entry: Ranked_contra) -> float: ...


@runtime_checkable
class AgeingOrder(Order[Ranked_contra], Protocol[Ranked_contra]):
    """An order in which the worth of entries falls with time."""

    @property
    def now(self) -> int: ...

    def appraise(self, entry: Ranked_contra) -> tuple[float, int | None]:
        """Return an entry's worth, and the time at which it may next fall if the entry stays unused; None: never."""


EvictionOrder = Order[Entry]
"""Ranks what the device can evict."""


class EvictionQueue(Generic[Ranked_t]):
    """Candidates for eviction, least worth first."""

    def __init__(self, order: Order[Ranked_t], can_evict: Callable[[Ranked_t], bool]) -> None:
        self._order = order
        self._ageing = order if isinstance(order, AgeingOrder) else None
        self._can_evict = can_evict
        self._heap: list[tuple[float, int, Ranked_t]] = []
        self._reviews: dict[int, list[tuple[int, Ranked_t]]] = {}
        """By time: pushes whose worth may have fallen by then."""
        self._num_reviews = 0
        self._reviewed_at = 0
        self._unranked: dict[Ranked_t, None] = {}
        """Entries offered since the last eviction, in the order of their first offer."""
        self._pushes = 0
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._heap) + len(self._unranked)

    def __contains__(self, entry: Ranked_t) -> bool:
        return entry.last_push > 0 or entry in self._unranked

    def push(self, entry: Ranked_t) -> None:
        """Offer an entry. Call again whenever its worth falls or it becomes evictable again."""
        self._unranked[entry] = None
        if len(self._unranked) >= MAX_UNRANKED:
            self._rank_offers()

    def _rank_offers(self) -> None:
        """Rank the offered entries that can still be evicted."""
        offered, self._unranked = self._unranked, {}
        for entry in offered:
            if self._can_evict(entry):
                self._rank(entry)

    def _rank(self, entry: Ranked_t) -> None:
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
        """Rank again the entries whose worth may have fallen by now."""
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

    def pop(self) -> Ranked_t | None:
        """Remove and return the evictable entry with the least worth, or None."""
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
        """Drop stale pushes."""
        heap = list[tuple[float, int, Ranked_t]]()
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


def resolve(entry: Entry) -> Entry | None:
    """Return a snapshot or a run, or its replacement if it has been evicted: where waiting requests would resume."""
    if isinstance(entry, Run):
        while entry.replacement is not None:
            entry = entry.replacement
        return entry
    snapshot: Snapshot | None = entry
    while snapshot is not None and not snapshot.is_attached:
        snapshot = snapshot.replacement
    return snapshot


def can_evict(entry: Entry) -> bool:
    """Return whether no request needs a snapshot, or a childless run."""
    if isinstance(entry, Snapshot):
        return entry.is_attached and entry.num_readers == 0
    return entry.parent is not None and not entry.children and entry.num_users == 0 and not entry.is_live
