"""Turns changes of the prefix index into events.

A block is *announced* while there is a snapshot at its end or below, so the announced blocks of a run are its first
ones, and the blocks above an announced block are announced too. Without snapshots, every whole block of the device is
announced. Snapshots of the device and of tiers below it count alike, and one that both have is announced once. What
tiers hold from an earlier process is announced once its salt is known: at the start for prompts without one, else with
the first request under it.

Invariants, held by ``cache/inspection/invariants.py``: ``Run.num_announced`` is right for every run, and ``Run.hashes``
has at least those blocks.
"""

from collections.abc import Iterable, Iterator

from strandline.cache.announcing.stored_events import hash_after, path_stored, snapshot_stored
from strandline.cache.core import PrefixCache
from strandline.cache.traversal import all_runs_below, continuations, is_on_device, stored_keys
from strandline.cache.tree import Run, SnapshotKey
from strandline.records.cache_events import (
    BlocksRemoved,
    CacheEvent,
    Cleared,
    SnapshotRemoved,
)


def take_events(cache: PrefixCache) -> list[CacheEvent]:
    """Return what has become resumable and what has ceased to be since the last call, in order."""
    announcer = cache.internals().memory.announcer
    return announcer.take() if isinstance(announcer, Announcer) else []


def restate_events(cache: PrefixCache) -> list[CacheEvent]:
    """Return events that announce everything anew, and discard those not taken yet. Linear in the cache's size."""
    parts = cache.internals()
    announcer = parts.memory.announcer
    below = parts.below
    tier_roots = () if below is None else below.known_roots()
    roots = dict.fromkeys((*parts.index.roots.values(), *tier_roots))
    return announcer.restate(roots) if isinstance(announcer, Announcer) else []


class Announcer:
    """Collects events. Called after a snapshot is attached to the tree, and after it is detached.

    Args:
        needs_snapshots: whether prompts resume at snapshots alone.
    """

    def __init__(self, *, needs_snapshots: bool = True) -> None:
        self._needs_snapshots = needs_snapshots
        self._events: list[CacheEvent] = [Cleared()]

    def add_root(self, root: Run) -> None:
        """Announce what tiers have under a salt that has become known."""
        for run in all_runs_below(root):
            run.num_announced = self.num_resumable(run)
        self._events.extend(self._state_below(root))

    def clear(self) -> None:
        """Announce that nothing is cached any more; discard events not taken yet."""
        self._events = [Cleared()]

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def restate(self, roots: Iterable[Run]) -> list[CacheEvent]:
        """Return events that announce everything anew, and discard those not taken yet.

        Args:
            roots: of the trees whose salts are known.
        """
        self._events = []
        return [Cleared(), *(event for root in roots for event in self._state_below(root))]

    def _state_below(self, root: Run) -> Iterator[CacheEvent]:
        for run in all_runs_below(root):
            yield from self._state_of(run, root.salt)

    def _state_of(self, run: Run, salt: str) -> Iterator[CacheEvent]:
        """Yield what is announced of a run itself."""
        if run.num_announced:
            hash_after(run, run.start_block + run.num_announced, salt)
            yield from path_stored([(run, 0, run.num_announced)], salt)
        for key in dict.fromkeys((*run.keys, *stored_keys(run))) if self._needs_snapshots else ():
            yield snapshot_stored(run, key, salt)

    def store(self, run: Run, key: SnapshotKey, salt: str) -> None:
        """Announce a snapshot, and the blocks of its path that are not announced yet."""
        added, node, end = list[tuple[Run, int]](), run, key[0]
        while node.parent is not None and node.num_announced < end - node.start_block:
            added.append((node, node.num_announced))
            node.num_announced = end - node.start_block
            node, end = node.parent, node.start_block
        if added:
            hash_after(run, run.start_block + run.num_announced, salt)
            self._events.extend(path_stored([(each, start, each.num_announced) for each, start in added[::-1]], salt))
        if self._needs_snapshots and _num_holders(run, key) == 1:
            self._events.append(snapshot_stored(run, key, salt))

    def remove(self, run: Run, key: SnapshotKey) -> None:
        """Announce that a snapshot is gone, and the blocks of its path that no other snapshot needs."""
        if self._needs_snapshots and not _num_holders(run, key):
            *_, root = run.ancestry()
            self._events.append(SnapshotRemoved(snapshot_stored(run, key, root.salt).path_hash))
        removed = list[bytes]()
        while run.parent is not None and (kept := self.num_resumable(run)) < run.num_announced:
            removed += run.hashes[kept : run.num_announced][::-1]
            run.num_announced = kept
            run = run.parent
        if removed:
            self._events.append(BlocksRemoved(tuple(removed)))

    def store_blocks(self, run: Run, salt: str) -> None:
        """Announce the blocks that were appended to a run, if they are resumable without a snapshot."""
        first, end = run.num_announced, self.num_resumable(run)
        if self._needs_snapshots or first == end:
            return
        run.num_announced = end
        hash_after(run, run.start_block + end, salt)
        self._events.extend(path_stored([(run, first, end)], salt))

    def remove_blocks(self, run: Run, num_kept: int) -> None:
        """Announce that a run's blocks after the first ``num_kept`` are evicted; no event if a snapshot implies it."""
        if not self._needs_snapshots and num_kept < run.num_announced:
            self._events.append(BlocksRemoved(tuple(run.hashes[num_kept : run.num_announced][::-1])))
            run.num_announced = num_kept

    def num_resumable(self, run: Run) -> int:
        """Return how many of a run's blocks are to be announced."""
        if not self._needs_snapshots and is_on_device(run):
            return 0 if run.is_tail else len(run.blocks)
        if any(child.num_announced for child in continuations(run)):
            return run.end_block - run.start_block
        return max((keys[-1][0] - run.start_block for keys in (run.keys, stored_keys(run)) if keys), default=0)


def _num_holders(run: Run, key: SnapshotKey) -> int:
    """Count who has a snapshot: the device, and the tiers below it."""
    return (key in run.snapshots) + (run.stored is not None and key in run.stored.snapshots)
