"""Holds: prefixes that are pinned, for other engines to fetch, or until they have been written to files.

A hold is a lease without a request. It keeps the blocks and the snapshots of a prefix from being evicted or moved. The
last, partly filled block is a copy, so that nothing that happens to the index touches it.

Invariant: what a hold pins is neither written, moved nor freed before ``drop``.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Final

from strandline.cache.core import PrefixCache
from strandline.cache.lease import Lease
from strandline.cache.tree import Snapshot, path_blocks, snapshot_above
from strandline.cache.walk import Walk, deepest_snapshot, walk
from strandline.errors import CacheInvariantError
from strandline.ids import BlockId, RequestId
from strandline.records.account import UNCOUNTED, SnapshotKind
from strandline.records.actions import CopyTokens
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, TokenBuffer

SHARED_KINDS: Final = (SnapshotKind.MARK, SnapshotKind.BRANCH)


class Holds:
    """Holds of a cache: those that one part of the engine has."""

    def __init__(self, cache: PrefixCache) -> None:
        parts = cache.internals()
        self._memory = parts.memory
        self._index = parts.index
        self._leases = parts.leases
        self._rule = parts.rule
        self._holds: dict[RequestId, array[int]] = {}
        """The blocks of each that are not moved."""

    def __len__(self) -> int:
        return len(self._holds)

    def keep(self, name: RequestId, tokens: TokenBuffer, salt: str = "") -> Lease | None:
        """Keep the deepest prefix of a prompt that can be resumed, and all snapshots on its path.

        Returns:
            A lease whose tokens are the prefix; its ``table`` and ``slots`` locate it once the cache's actions
            are carried out. None: nothing is cached, or there is no memory for the copy of a block.
        """
        if name in self._leases:
            raise CacheInvariantError(f"{name} has a lease already")
        found = self._index.match(salt, tokens.data)
        if found is None:
            return None
        num_tokens = found.end.kv_tokens
        if self._rule.needs_snapshots:
            num_tokens = 0 if found.snapshot is None else found.snapshot.position
        if not num_tokens:
            return None
        prefix = TokenBuffer()
        prefix.data = tokens.data[: num_tokens * TOKEN_BYTES]
        root = self._index.root(salt)
        match = self._index.find(root, prefix.data)
        snapshots = tuple(_snapshots_upwards(deepest_snapshot(match.end, prefix.data)))
        lease = Lease(name, prefix, salt, root, self._index.split_at(match.end), UNCOUNTED)
        self._memory.pin_run(lease.run)
        for snapshot in snapshots:
            self._memory.pin_snapshot(snapshot)
        if match.end.partial_run is not None and not self._copy_partial(lease, match.end):
            for snapshot in snapshots:
                self._memory.unpin_snapshot(snapshot)
            self._memory.unpin_run(lease.run)
            return None
        self._enter(lease, snapshots)
        return lease

    def keep_blocks(self, name: RequestId, salt: str, data: bytes, num_blocks: int) -> Lease:
        """Keep the first whole blocks of a path, which are all cached.

        Returns:
            A lease whose ``table`` locates them.
        """
        root = self._index.root(salt)
        prefix = TokenBuffer()
        prefix.data = bytearray(data[: num_blocks * BLOCK_KEY_BYTES])
        end = walk(root, prefix.data)
        if end.num_blocks != num_blocks or name in self._leases:
            raise CacheInvariantError(f"{name} is to keep {num_blocks} blocks, {end.num_blocks} are cached")
        lease = Lease(name, prefix, salt, root, self._index.split_at(end), UNCOUNTED)
        self._memory.pin_run(lease.run)
        self._enter(lease, ())
        return lease

    def _enter(self, lease: Lease, snapshots: tuple[Snapshot, ...]) -> None:
        blocks = self._holds[lease.request_id] = lease.table[:]
        self._memory.allocator.hold(blocks)
        for snapshot in snapshots:
            for window in snapshot.windows:
                window.size.allocator.hold(window.held)
        lease.held = snapshots
        lease.computed = lease.folded = len(lease.tokens)
        self._leases[lease.request_id] = lease

    def _copy_partial(self, lease: Lease, end: Walk) -> bool:
        """Give the lease its own copy of the block that the prefix ends in; False when there is no memory for it."""
        memory, run = self._memory, end.partial_run
        if run is None:
            return True
        memory.add_user(run)
        has_room = memory.can_take(1, 0)
        if has_room:
            copy = memory.take_promised_blocks(1)
            lease.table = path_blocks(lease.run) + copy  # blocks may have been moved for it
            source = BlockId(run.blocks[lease.num_published - run.start_block])
            memory.actions.append(CopyTokens(source, BlockId(lease.table[-1]), end.partial_tokens))
        memory.remove_user(run)
        return has_room

    def drop(self, lease: Lease) -> None:
        """Keep it no longer."""
        if self._leases.get(lease.request_id) is not lease:
            raise CacheInvariantError(f"{lease.request_id} is not held")
        del self._leases[lease.request_id]
        lease.is_active = False
        self._memory.allocator.let_go(self._holds.pop(lease.request_id))
        for snapshot in lease.held or ():
            for window in snapshot.windows:
                window.size.allocator.let_go(window.held)
            self._memory.unpin_snapshot(snapshot)
        self._memory.take_back(lease)


def useful_positions(offered: Mapping[int, SnapshotKind], num_spare: int) -> list[int]:
    """Return which snapshots of an offered prefix to load, in order of their positions.

    The deepest, which the prompt resumes from; the one above it, for prompts that rewind a little; and those that
    several prompts are likely to share, the deepest first.

    Args:
        offered: their kinds, by position.
        num_spare: slots that may be taken in addition to that of the deepest.
    """
    by_depth = sorted(offered, reverse=True)
    useful = [*by_depth[:2], *(position for position in by_depth[2:] if offered[position] in SHARED_KINDS)]
    return sorted(useful[: 1 + max(num_spare, 0)])


def _snapshots_upwards(snapshot: Snapshot | None) -> Iterator[Snapshot]:
    while snapshot is not None:
        yield snapshot
        snapshot = snapshot_above(snapshot)
