"""Turns changes of what tiers hold into events.

A demoted snapshot can be resumed once it is loaded, so it is announced, and so are the blocks on its path: those of the
tiers' tree.

A persistent tier knows a salt by its hash alone. What it holds from an earlier process is announced once the salt is
known: at the start for prompts without one, else with the first request under it.
"""

from collections.abc import Callable, Iterable, Iterator

from strandline.cache.announcing.stored_events import blocks_stored, snapshot_stored
from strandline.cache.tiers.tier_tree import TierBlock, TierSnapshot, TierTree
from strandline.records.cache_events import BlocksRemoved, BlocksStored, CacheEvent, SnapshotRemoved, SnapshotStored
from strandline.records.path_hashes import block_hashes, root_hash


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
        salt, block = self._salts.get(demoted.tree), demoted.block
        if salt is None or block is None:
            return
        nodes, node = list[TierBlock](), block
        while not node.path_hash:
            if node.parent is None:
                node.path_hash = root_hash(salt)
                break
            nodes.append(node)
            node = node.parent
        self._emit_all(_nodes_stored(nodes[::-1], salt))
        if self._needs_snapshots:
            self._emit(_snapshot_event(demoted, block, salt))

    def leave(self, demoted: TierSnapshot, unlinked: Iterable[TierBlock]) -> None:
        """Announce that a snapshot has left the tree, and the blocks that have left with it, deepest first."""
        if demoted.path_hash:
            self._emit(SnapshotRemoved(demoted.path_hash))
        hashes = tuple([node.path_hash for node in unlinked if node.path_hash])
        if hashes:
            self._emit(BlocksRemoved(hashes))

    def _emit_all(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self._emit(event)

    def _state_of(self, tree: str) -> Iterator[CacheEvent]:
        """Yield what is announced of a tree."""
        root, salt = self._tree.roots.get(tree), self._salts[tree]
        if root is None:
            return
        root.path_hash = root_hash(salt)
        for nodes in _chains(root):
            yield from _nodes_stored(nodes, salt)
            for node in nodes if self._needs_snapshots else ():
                for demoted in node.snapshots.values():
                    yield _snapshot_event(demoted, node, salt)


def _chains(root: TierBlock) -> Iterator[list[TierBlock]]:
    """Yield all nodes of a tree, in paths without branches; a path comes after those before it."""
    waiting = [root]
    while waiting:
        chain = [waiting.pop()]
        while len(chain[-1].children) == 1:
            chain += chain[-1].children.values()
        yield chain
        waiting += chain[-1].children.values()


def _nodes_stored(nodes: list[TierBlock], salt: str) -> Iterator[BlocksStored]:
    """Yield the events of consecutive blocks; those before them have their hashes."""
    nodes = [node for node in nodes if node.parent is not None]
    if not nodes or (above := nodes[0].parent) is None:
        return
    tokens = b"".join([node.key for node in nodes])
    if not nodes[-1].path_hash:
        for node, path_hash in zip(nodes, block_hashes(above.path_hash, tokens), strict=True):
            node.path_hash = path_hash
    before = None if above.parent is None else above.path_hash
    yield from blocks_stored([node.path_hash for node in nodes], before, tokens, salt)


def _snapshot_event(demoted: TierSnapshot, block: TierBlock, salt: str) -> SnapshotStored:
    """Return the event of a snapshot after a block."""
    if demoted.key or block.parent is None:
        event = snapshot_stored(block.path_hash, demoted.key, demoted.position, salt)
    else:
        event = snapshot_stored(block.parent.path_hash, block.key, demoted.position, salt)
    demoted.path_hash = event.path_hash
    return event
