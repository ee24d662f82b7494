"""Sliding windows: blocks of keys and values that no resume can need are freed.

Where all attention of a model has windows, a request at position ``p`` reads the keys and values of
``[p - window_tokens + 1, p)`` alone. A block before the windows of all requests and snapshots that use it is
freed at once. Its run retains its tokens, with the null block instead: a *gap*. Lookups still find the snapshots
after it, and branches.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.resume import first_block_seen
from strandline.cache.tree import Run, Snapshot, path_blocks
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK


class Windows:
    """Frees blocks that the windows of leases and snapshots have passed.

    Args:
        leases: all of them, whose tables name the blocks that they read.
        window_tokens: tokens that a token sees, itself among them: the most of any layer.
    """

    def __init__(self, memory: CacheMemory, leases: Callable[[], Iterable[Lease]], window_tokens: int) -> None:
        self._window_tokens: Final = window_tokens
        self._memory = memory
        self._leases = leases

    def free_more(self) -> bool:
        """Evict an entry: evicting a snapshot may free blocks of a path that is in use, which no count includes."""
        return self._memory.evict()

    def advance(self, lease: Lease) -> None:
        """Free the blocks that a lease's window has passed, unless something else needs them."""
        if lease.computed < self._window_tokens:
            return
        first = lease.num_left
        lease.num_left = max(first, min(first_block_seen(lease.computed, self._window_tokens), len(lease.table)))
        own = [block for block in lease.table[max(first, lease.num_published) : lease.num_left] if block]
        self.free_unneeded(lease.table[first : min(lease.num_left, lease.num_published)], first)
        for index in range(max(first, lease.num_published), lease.num_left):
            lease.table[index] = NULL_BLOCK
        self._memory.free_blocks(own)

    def has_window(self, lease: Lease, position: int) -> bool:
        """Return whether a lease has all blocks that computing from a position on reads."""
        return first_block_seen(position, self._window_tokens) >= lease.num_left

    def end(self, lease: Lease) -> None:
        """Free the blocks of the index that only a lease needed, which has ended."""
        first = lease.num_left if lease.is_request else 0
        self.free_unneeded(path_blocks(lease.run)[first:], first)

    def leave(self, snapshot: Snapshot) -> None:
        """Free the blocks that only a snapshot needed, which was removed from the index."""
        first = first_block_seen(snapshot.position, self._window_tokens)
        for run in self._last_runs(snapshot):
            self.free_unneeded(run.blocks[:1], run.start_block)
        for run in snapshot.home.ancestry():
            start = max(first, run.start_block)
            end = min(run.end_block, -(-snapshot.position // BLOCK_TOKENS))
            self.free_unneeded(run.blocks[start - run.start_block : max(end, start) - run.start_block], start)
            if run.start_block <= first:
                return

    def free_unneeded(self, blocks: Iterable[int], first: int) -> None:
        """Free those of these consecutive blocks of the index that nothing needs; the first has the index ``first``."""
        unneeded = dict[Run, list[int]]()
        for index, block in enumerate(blocks, first):
            run = self._memory.owner(block) if block else None
            if run is None or run.is_live or self._is_needed(run, index, block):
                continue
            for lease in self._leases():
                if index < lease.num_published and lease.table[index] == block:
                    lease.table[index] = NULL_BLOCK
            unneeded.setdefault(run, []).append(index)
        for run, indices in unneeded.items():
            self._memory.open_gaps(run, indices)

    def _is_needed(self, run: Run, index: int, block: int) -> bool:
        for lease in self._leases():
            is_seen = first_block_seen(lease.computed, self._window_tokens) <= index < len(lease.table)
            if is_seen and lease.table[index] == block:
                return True
        if index == run.start_block and run.parent is not None:
            key = run.first_key
            if any(key.startswith(stub_key) for stub_key in run.parent.stubs):
                return True
        # A snapshot at q needs the block if its tokens come before q, and the last of them is seen at q.
        return _has_snapshot(run, index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS + self._window_tokens - 1)

    @staticmethod
    def _last_runs(snapshot: Snapshot) -> Iterator[Run]:
        """Yield the runs whose first block contains a stub."""
        key = snapshot.stub_key
        if key is not None:
            yield from [child for child_key, child in snapshot.home.children.items() if child_key.startswith(key)]


def _has_snapshot(run: Run, after: int, before: int) -> bool:
    """Return whether a snapshot with a position in ``(after, before)`` is in a run or below it."""
    waiting = [run]
    while waiting:
        node = waiting.pop()
        if any(after < position < before for position in node.positions):
            return True
        if any(after < stub.position < before for stub in node.stubs.values()):
            return True
        if node.end_tokens < before:
            waiting.extend(node.children.values())
    return False
