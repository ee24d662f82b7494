"""Turns changes of what tiers hold into events.

A demoted snapshot can be resumed once it is loaded, so it is announced, and so are the blocks on its path: those of the
tiers' tree.

A persistent tier knows a salt by its hash alone. What it holds from an earlier process is announced once the salt is
known: at the start for prompts without one, else with the first request under it.
"""

from collections.abc import Callable, Iterable, Iterator

from strandline.cache.announcing.stored_events import hash_after, path_stored, snapshot_stored
from strandline.cache.tiers.tier_tree import TierRun, TierSnapshot, TierTree
from strandline.cache.traversal import runs_below
from strandline.errors import CacheInvariantError
from strandline.records.cache_events import BlocksRemoved, CacheEvent, SnapshotRemoved, SnapshotStored


class TierAnnouncer:
    """Announces what is in the tree of the tiers.

    Args:
        emit: takes events.
        needs_snapshots: whether prompts resume at snapshots alone.
    """

    def __init__(self, emit: Callable[[CacheEvent], None], tree: TierTree, *, needs_snapshots: bool) -> None:
        self._emit = emit
        self._tree = tree
        self._needs_snapshots = needs_snapshots
        self._salts: dict[str, str] = {}
        """By the name of a tree."""

    def add_salt(self, salt: str) -> None:
        """Announce what is stored under a salt, if the salt was not known."""
        tree = self._tree.name(salt)
        if tree not in self._salts:
            self._salts[tree] = salt
            self._emit_all(self._state_of(tree))

    def state(self) -> Iterator[CacheEvent]:
        """Yield events that announce everything anew."""
        for tree in self._salts:
            yield from self._state_of(tree)

    def enter(self, demoted: TierSnapshot) -> None:
        """Announce a snapshot that has entered the tree, and the blocks that have entered with it."""
        salt = self._salts.get(demoted.tree)
        if salt is None:
            return
        entered = list[tuple[TierRun, int, int]]()
        for run in demoted.ancestry():
            first, end = len(run.hashes), run.end_block - run.start_block
            if first == end:
                break
            entered.append((run, first, end))
        if entered:
            hash_after(entered[0][0], entered[0][0].end_block, salt)
        self._emit_all(path_stored(entered[::-1], salt))
        if self._needs_snapshots:
            self._emit(_snapshot_event(demoted, salt))

    def leave(self, demoted: TierSnapshot, hashes: list[bytes]) -> None:
        """Announce that a snapshot has left the tree, and the blocks that have left with it, deepest first."""
        if demoted.path_hash:
            self._emit(SnapshotRemoved(demoted.path_hash))
        if hashes:
            self._emit(BlocksRemoved(tuple(hashes)))

    def _emit_all(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self._emit(event)

    def _state_of(self, tree: str) -> Iterator[CacheEvent]:
        """Yield what is announced of a tree."""
        root, salt = self._tree.roots.get(tree), self._salts[tree]
        for run in runs_below(root) if root is not None else ():
            hash_after(run, run.end_block, salt)
            yield from path_stored([(run, 0, len(run.hashes))] if run.hashes else [], salt)
            for demoted in run.snapshots.values() if self._needs_snapshots else ():
                yield _snapshot_event(demoted, salt)


def _snapshot_event(demoted: TierSnapshot, salt: str) -> SnapshotStored:
    """Return the event of a snapshot of the tree."""
    if demoted.home is None:
        raise CacheInvariantError(f"the demoted snapshot at {demoted.position} is announced, but not in the tree")
    event = snapshot_stored(demoted.home, demoted.key, salt)
    demoted.path_hash = event.path_hash
    return event
