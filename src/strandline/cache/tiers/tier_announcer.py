"""Turns changes of what tiers hold into events.

A demoted snapshot can be resumed once it is loaded, so it is announced, and so are the blocks on its path: those of the
tiers' tree.

A persistent tier knows a salt by its hash alone. What it holds from an earlier process is announced once the salt is
known: at the start for prompts without one, else with the first request under it.
"""

from collections.abc import Callable, Iterable, Iterator

from strandline.cache.announcing.stored_events import blocks_stored, snapshot_stored
from strandline.cache.tiers.tier_tree import TierRun, TierSnapshot, TierTree
from strandline.errors import CacheInvariantError
from strandline.records.cache_events import BlocksRemoved, BlocksStored, CacheEvent, SnapshotRemoved, SnapshotStored
from strandline.records.path_hashes import block_hashes, num_blocks_before, root_hash
from strandline.records.tokens import BLOCK_KEY_BYTES


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
        entered = list[TierRun]()
        for run in demoted.ancestry():
            if len(run.hashes) == len(run.tokens) // BLOCK_KEY_BYTES:
                break
            entered.append(run)
        self._emit_all(_blocks_entered(entered[::-1], salt))
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
        waiting = [root] if root is not None else []
        while waiting:
            run = waiting.pop()
            yield from _blocks_stored(run, salt)
            for demoted in run.snapshots.values() if self._needs_snapshots else ():
                yield _snapshot_event(demoted, salt)
            waiting += run.children.values()


def _blocks_entered(runs: list[TierRun], salt: str) -> Iterator[BlocksStored]:
    """Yield the events of consecutive blocks that are not announced yet, which end these runs of a path."""
    if not runs:
        return
    first = runs[0]
    depth = first.start_block + len(first.hashes)
    before = _hash_after(first, depth, salt)
    tokens = b"".join([run.tokens[len(run.hashes) * BLOCK_KEY_BYTES :] for run in runs])
    hashes = list(block_hashes(before, tokens))
    for run in runs:
        run.hashes += hashes[run.start_block + len(run.hashes) - depth : run.end_block - depth]
    yield from blocks_stored(hashes, before if depth else None, tokens, salt)


def _blocks_stored(run: TierRun, salt: str) -> Iterator[BlocksStored]:
    """Yield the events of all blocks of a run; those before it have their hashes."""
    before, tokens = _hash_after(run, run.start_block, salt), bytes(run.tokens)
    run.hashes = run.hashes or list(block_hashes(before, tokens))
    yield from blocks_stored(run.hashes, before if run.start_block else None, tokens, salt)


def _hash_after(run: TierRun, depth: int, salt: str) -> bytes:
    """Return the hash of the path to the block of a run at a depth, or the one before its first."""
    if not depth:
        return root_hash(salt)
    holder = run if depth > run.start_block or run.parent is None else run.parent
    return holder.hashes[depth - holder.start_block - 1]


def _snapshot_event(demoted: TierSnapshot, salt: str) -> SnapshotStored:
    """Return the event of a snapshot of the tree."""
    run, depth, tokens = demoted.run, num_blocks_before(demoted.position), demoted.key
    if run is None:
        raise CacheInvariantError(f"the demoted snapshot at {demoted.position} is announced, but not in the tree")
    if depth < demoted.num_blocks:
        start = (depth - run.start_block) * BLOCK_KEY_BYTES
        tokens = bytes(run.tokens[start : start + BLOCK_KEY_BYTES])
    event = snapshot_stored(_hash_after(run, depth, salt), tokens, demoted.position, salt)
    demoted.path_hash = event.path_hash
    return event
