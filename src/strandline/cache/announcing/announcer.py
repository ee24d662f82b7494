"""Turns changes of the prefix index into events.

A block is *announced* while there is a snapshot at its end or below, so the announced blocks of a run are its first
ones, and the blocks above an announced block are announced too. Without snapshots, every whole block is announced. What
tiers hold is announced as well (``cache/tiers/tier_announcer.py``), and nothing twice (``copies.py``).

Invariants, held by ``cache/inspection/invariants.py``: ``Run.num_announced`` is right for every run, and ``Run.hashes``
has at least those blocks.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from strandline.cache.announcing.copies import Copies
from strandline.cache.announcing.stored_events import hash_after, path_stored, snapshot_stored
from strandline.cache.core import PrefixCache
from strandline.cache.traversal import runs_below
from strandline.cache.tree import Run, Snapshot
from strandline.ids import BLOCK_TOKENS
from strandline.records.cache_events import (
    BlocksRemoved,
    CacheEvent,
    Cleared,
    SnapshotRemoved,
    SnapshotStored,
)


def take_events(cache: PrefixCache) -> list[CacheEvent]:
    """Return what has become resumable and what has ceased to be since the last call, in order."""
    announcer = cache.internals().memory.announcer
    return announcer.take() if isinstance(announcer, Announcer) else []


def restate_events(cache: PrefixCache) -> list[CacheEvent]:
    """Return events that announce everything anew, and discard those not taken yet. Linear in the cache's size."""
    parts = cache.internals()
    announcer = parts.memory.announcer
    return announcer.restate(parts.index.roots) if isinstance(announcer, Announcer) else []


class TierEvents(Protocol):
    """Announces what is in the tiers below the device, by ``Announcer.emit``."""

    def add_salt(self, salt: str) -> None:
        """Announce what is stored under a salt, if it was not known."""

    def state(self) -> Iterator[CacheEvent]:
        """Yield events that announce everything anew."""


class Announcer:
    """Collects events. Called after a snapshot is attached to the tree, and after it is detached.

    Args:
        needs_snapshots: whether prompts resume at snapshots alone.
    """

    def __init__(self, *, needs_snapshots: bool = True) -> None:
        self._needs_snapshots = needs_snapshots
        self._events: list[CacheEvent] = [Cleared()]
        self._below: TierEvents | None = None
        self.copies: Copies | None = None
        """Counts what the device and tiers below it hold; None: there is no tier, and every event counts."""

    def add(self, below: "TierEvents") -> None:
        """Add the tiers below the device, whose entries stay announced as long as they are there."""
        self.copies, self._below = Copies(), below
        below.add_salt("")

    def add_salt(self, salt: str) -> None:
        """Learn of a salt, from the first request under it."""
        if self._below is not None:
            self._below.add_salt(salt)

    def emit(self, event: CacheEvent) -> None:
        """Take an event of the device or of a tier."""
        if self.copies is None:
            self._events.append(event)
        else:
            self._events.extend(self.copies.apply(event))

    def _emit_all(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self.emit(event)

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def restate(self, roots: Mapping[str, Run]) -> list[CacheEvent]:
        """Return events that announce everything anew, and discard those not taken yet."""
        self._events = []
        events = [Cleared(), *self._state(roots)]
        if self.copies is None:
            return events
        copies = Copies()
        return [each for event in events for each in copies.apply(event)]

    def count_copies(self, roots: Mapping[str, Run]) -> dict[bytes, int]:
        """Return how many memories hold what is announced, by hash, counted anew."""
        copies = Copies()
        for event in self._state(roots):
            list(copies.apply(event))
        return copies.counts

    def _state(self, roots: Mapping[str, Run]) -> Iterator[CacheEvent]:
        """Yield what each memory holds."""
        for salt, root in roots.items():
            for run in runs_below(root):
                yield from _state_of(run, salt)
        if self._below is not None:
            yield from self._below.state()

    def store(self, snapshot: Snapshot, salt: str) -> None:
        """Announce a snapshot, and the blocks of its path that are not announced yet."""
        run, end = snapshot.home, snapshot.position // BLOCK_TOKENS
        added: list[tuple[Run, int]] = []
        while run.parent is not None and run.num_announced < end - run.start_block:
            added.append((run, run.num_announced))
            run.num_announced = end - run.start_block
            run, end = run.parent, run.start_block
        if added:
            lowest = snapshot.home
            hash_after(lowest, lowest.start_block + lowest.num_announced, salt)
            self._emit_all(path_stored([(run, start, run.num_announced) for run, start in added[::-1]], salt))
        event = _snapshot_stored(snapshot, salt)
        snapshot.path_hash = event.path_hash
        self.emit(event)

    def remove(self, snapshot: Snapshot) -> None:
        """Announce that a snapshot is gone, and the blocks of its path that no other snapshot needs."""
        self.emit(SnapshotRemoved(snapshot.path_hash))
        removed = list[bytes]()
        run = snapshot.home
        while run.parent is not None and (kept := _num_above_snapshots(run)) < run.num_announced:
            removed += run.hashes[kept : run.num_announced][::-1]
            run.num_announced = kept
            run = run.parent
        if removed:
            self.emit(BlocksRemoved(tuple(removed)))

    def store_blocks(self, run: Run, salt: str) -> None:
        """Announce the blocks that were appended to a run, if they are resumable without a snapshot."""
        first, end = run.num_announced, self.num_resumable(run)
        if self._needs_snapshots or first == end:
            return
        run.num_announced = end
        hash_after(run, run.start_block + end, salt)
        self._emit_all(path_stored([(run, first, end)], salt))

    def remove_blocks(self, run: Run, num_kept: int) -> None:
        """Announce that a run's blocks after the first ``num_kept`` are evicted; no event if a snapshot implies it."""
        if not self._needs_snapshots and num_kept < run.num_announced:
            self.emit(BlocksRemoved(tuple(run.hashes[num_kept : run.num_announced][::-1])))
            run.num_announced = num_kept

    def num_resumable(self, run: Run) -> int:
        """Return how many of a run's blocks are to be announced."""
        if self._needs_snapshots:
            return _num_above_snapshots(run)
        return 0 if run.is_tail else len(run.blocks)


def _num_above_snapshots(run: Run) -> int:
    """Return how many of a run's blocks have a snapshot at their end or below."""
    if any(child.num_announced for child in run.children.values()):
        return len(run.blocks)
    return run.keys[-1][0] - run.start_block if run.keys else 0


def _state_of(run: Run, salt: str) -> Iterator[CacheEvent]:
    """Yield what is announced of a run itself."""
    if run.num_announced:
        yield from path_stored([(run, 0, run.num_announced)], salt)
    for snapshot in run.snapshots.values():
        yield _snapshot_stored(snapshot, salt)


def _snapshot_stored(snapshot: Snapshot, salt: str) -> SnapshotStored:
    return snapshot_stored(snapshot.home, snapshot.key, salt)
