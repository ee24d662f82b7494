"""Window blocks: keys and values of the layers with windows, for each size of windows.

To go on at position ``p``, those layers read the tokens of ``[p - window_tokens + 1, p)`` alone. So these blocks are
no part of the index: a running request has a *window* of them for each size, and so has every snapshot, whose slot and
windows are what a request needs beyond the blocks of its path. Windows share blocks; one that no window has is free.

Invariants: the tokens of a window are not written again; what evicting snapshots could free is counted exactly.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from strandline.cache.slab_allocator import SlabAllocator
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, BlockId, Lifetime
from strandline.records.actions import Action, CopyTokens, DropBlocks, MoveBlock


class WindowBlocks:
    """The blocks of one size of windows.

    Args:
        window_tokens: tokens that a token sees, itself among them.
    """

    def __init__(
        self, lifetime: Lifetime, allocator: SlabAllocator, window_tokens: int, issue: Callable[[Action], None]
    ) -> None:
        self._lifetime = lifetime
        self.allocator = allocator
        self.num_evictable = 0
        """Blocks that eviction could free: those without a pinned window."""
        self._window_tokens = window_tokens
        self._issue = issue
        self._windows: dict[int, list[Window]] = {}
        """By block, the windows that have it."""
        self._num_pinned: dict[int, int] = {}
        """By block, how many of these are pinned."""

    def num_missing_slabs(self, num_blocks: int) -> int:
        """Return how many free slabs it takes to allocate this many blocks without eviction."""
        allocator = self.allocator
        return -(-max(num_blocks - allocator.num_free_blocks, 0) // allocator.blocks_per_slab)

    def num_slabs_with(self, num_blocks: int) -> int:
        """Return how many slabs the blocks that stay and this many more take at least."""
        return self.allocator.num_slabs_for(self.allocator.num_blocks - self.num_evictable + num_blocks)

    def first_seen(self, position: int) -> int:
        """Return the first block that computing from a position on reads."""
        return max(position - self._window_tokens + 1, 0) // BLOCK_TOKENS

    def num_blocks_before(self, position: int) -> int:
        """Return how many blocks the window of a snapshot at a position has."""
        return -(-position // BLOCK_TOKENS) - self.first_seen(position)

    def add(self, window: "Window", blocks: "array[int]") -> None:
        """Record that a window has further blocks."""
        for block in blocks:
            windows = self._windows.get(block)
            if windows is None:
                self._windows[block], self._num_pinned[block] = [window], 1
            else:
                windows.append(window)
                self._count_pinned(block, 1)

    def remove(self, window: "Window", blocks: "array[int]") -> None:
        """Record that a window has blocks no more; free those that no other window has."""
        freed = list[int]()
        for block in blocks:
            windows = self._windows[block]
            del windows[next(index for index, other in enumerate(windows) if other is window)]
            if window.is_pinned:
                self._count_pinned(block, -1)
            if not windows:
                self.num_evictable -= 1
                del self._windows[block], self._num_pinned[block]
                freed.append(block)
        if freed:
            self.allocator.free_blocks(freed)
            self._issue(DropBlocks(tuple(freed), self._lifetime))

    def set_pinned(self, window: "Window", *, is_pinned: bool) -> None:
        """Keep a snapshot's window from eviction, or let it be evicted."""
        if window.is_pinned != is_pinned:
            window.is_pinned = is_pinned
            for block in window.held:
                self._count_pinned(block, 1 if is_pinned else -1)

    def _count_pinned(self, block: int, change: int) -> None:
        before = self._num_pinned[block]
        after = self._num_pinned[block] = before + change
        self.num_evictable += (after == 0) - (before == 0)

    def copy_tokens(self, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first tokens of a block, by an action."""
        self._issue(CopyTokens(BlockId(src), BlockId(dst), num_tokens, self._lifetime))

    def compact(self) -> None:
        """Move blocks to free a slab."""
        for src, dst in self.allocator.compact():
            self._issue(MoveBlock(src, dst, self._lifetime))
            windows = self._windows[dst] = self._windows.pop(src)
            self._num_pinned[dst] = self._num_pinned.pop(src)
            for window in windows:
                window.blocks[window.blocks.index(src, window.first)] = dst

    def windows_of(self, block: int) -> "Iterable[Window]":
        """Return the windows that have a block."""
        return self._windows.get(block, ())


class Window:
    """Consecutive window blocks of a path, for one size of windows.

    Attributes:
        size: has the blocks.
        blocks: by their index in the path; the null block before ``first``.
        first: the index of the first block.
        is_pinned: whether a running request needs them; else they are those of a snapshot that may be evicted.
    """

    __slots__ = ("blocks", "first", "is_pinned", "size")

    def __init__(self, size: WindowBlocks, first: int = 0, blocks: Sequence[int] = ()) -> None:
        self.size = size
        self.blocks = array("i", [NULL_BLOCK]) * first + array("i", blocks)
        self.first = first
        self.is_pinned = True
        size.add(self, self.held)

    @property
    def held(self) -> "array[int]":
        """Its blocks without the null blocks."""
        return self.blocks[self.first :]

    @property
    def ids(self) -> tuple[BlockId, ...]:
        """Its blocks without the null blocks, for actions."""
        return tuple(map(BlockId, self.held))

    @property
    def packed(self) -> bytes:
        """The index of its first block, then its blocks, int32 each."""
        return array("i", [self.first, *self.held]).tobytes()

    def covers(self, position: int) -> bool:
        """Return whether a request's window has all that computing from a position on reads, as far as it has got."""
        return self.first <= self.size.first_seen(position)

    def extend(self, blocks: "array[int]") -> None:
        """Take in further blocks, which were allocated for it."""
        self.blocks += blocks
        self.size.add(self, blocks)

    def advance(self, position: int) -> None:
        """Release the blocks that a request which computes from a position on does not read."""
        end = min(self.size.first_seen(position), len(self.blocks))
        if end > self.first:
            passed = self.blocks[self.first : end]
            self.blocks[self.first : end] = array("i", [NULL_BLOCK]) * len(passed)
            self.first = end
            self.size.remove(self, passed)

    def release(self) -> None:
        """Free the blocks that no other window has."""
        held = self.held
        self.first = len(self.blocks)
        self.size.remove(self, held)

    def part_before(self, position: int) -> "Window":
        """Return a pinned window of what computing from a position on reads, which shares its blocks."""
        first = self.size.first_seen(position)
        return Window(self.size, first, self.blocks[first : -(-position // BLOCK_TOKENS)])

    def resumed(self, position: int, blocks: "array[int]") -> "Window":
        """Return the window of a request that resumes at a position in the last block of this one, a snapshot's.

        Args:
            blocks: allocated for it: one for a copy of the block that the position is inside; else none.
        """
        index, num_tokens = divmod(position, BLOCK_TOKENS)
        if blocks:
            self.size.copy_tokens(self.blocks[index], blocks[0], num_tokens)
        return Window(self.size, self.first, self.blocks[self.first : index] + blocks)


Windows = tuple[Window, ...]
"""Those of one running request or snapshot, for each size; empty: there are no window blocks. The windows of a request
end with the same token."""
