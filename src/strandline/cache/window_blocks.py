"""Window blocks: keys and values of the layers with windows.

To go on at position ``p``, those layers read the tokens of ``[p - window_tokens + 1, p)`` alone. So these blocks are
no part of the index: a running request has a *window* of them, and so has every snapshot, whose slot and window are
what a request needs beyond the blocks of its path. Windows share blocks; one that no window has is free.

Invariants: the tokens of a window are not written again; what evicting snapshots could free is counted exactly.
"""

from array import array
from collections.abc import Callable, Iterable

from strandline.cache.slab_allocator import SlabAllocator
from strandline.cache.window import NO_WINDOW, Window
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, BlockId, Lifetime
from strandline.records.actions import Action, CopyTokens, DropBlocks, MoveBlock


class WindowBlocks:
    """The windows of a cache, and the allocator of their blocks.

    Args:
        window_tokens: tokens that a token sees, itself among them; 0: there are no window blocks, and all windows are
            empty.
    """

    def __init__(self, allocator: SlabAllocator, window_tokens: int, issue: Callable[[Action], None]) -> None:
        self.allocator = allocator
        self.num_evictable = 0
        """Blocks that eviction could free: those without a pinned window."""
        self._window_tokens = window_tokens
        self.are_kept = window_tokens > 0
        """Whether there are window blocks."""
        self._issue = issue
        self._windows: dict[int, list[Window]] = {}
        """By block, the windows that have it."""
        self._num_pinned: dict[int, int] = {}
        """By block, how many of these are pinned."""

    # What a request needs

    def num_missing(self, window: Window, end: int) -> int:
        """Return how many blocks a request lacks for the tokens up to ``end``."""
        return max(-(-end // BLOCK_TOKENS) - len(window.blocks), 0) if self._window_tokens else 0

    def num_to_resume(self, position: int, end: int) -> int:
        """Return how many blocks a request that resumes needs of its own, for the tokens up to ``end``."""
        return -(-end // BLOCK_TOKENS) - position // BLOCK_TOKENS if self._window_tokens else 0

    def num_missing_slabs(self, num_blocks: int) -> int:
        """Return how many free slabs it takes to allocate this many blocks without eviction."""
        allocator = self.allocator
        return -(-max(num_blocks - allocator.num_free_blocks, 0) // allocator.blocks_per_slab)

    def num_slabs_with(self, num_blocks: int) -> int:
        """Return how many slabs the blocks that stay and this many more take at least."""
        return self.allocator.num_slabs_for(self.allocator.num_blocks - self.num_evictable + num_blocks)

    def covers(self, window: Window, position: int) -> bool:
        """Return whether a request's window still has all that computing from a position on reads."""
        return not self._window_tokens or window.first <= self.first_seen(position)

    def first_seen(self, position: int) -> int:
        """Return the first block that computing from a position on reads."""
        return max(position - self._window_tokens + 1, 0) // BLOCK_TOKENS

    # Windows

    def extend(self, window: Window, blocks: "array[int]") -> None:
        """Give a window further blocks, which were allocated for it."""
        window.blocks += blocks
        self._add(window, blocks)

    def advance(self, window: Window, position: int) -> None:
        """Release the blocks that a request which computes from a position on does not read."""
        end = min(self.first_seen(position), len(window.blocks))
        if end > window.first:
            passed = window.blocks[window.first : end]
            window.blocks[window.first : end] = array("i", [NULL_BLOCK]) * len(passed)
            window.first = end
            self._remove(window, passed)

    def part_before(self, window: Window, position: int) -> Window:
        """Return a pinned window of what computing from a position on reads, which shares blocks with a request's.

        Raises:
            CacheInvariantError: the request has not got all of it any more.
        """
        if not self._window_tokens:
            return NO_WINDOW
        if not self.covers(window, position) or position > len(window.blocks) * BLOCK_TOKENS:
            raise CacheInvariantError(f"the window before {position} was freed")
        first = self.first_seen(position)
        part = Window(first, window.blocks[first : -(-position // BLOCK_TOKENS)])
        self._add(part, part.held)
        return part

    def resumed(self, window: Window, position: int, blocks: "array[int]") -> Window:
        """Return the window of a request that resumes at a position in the last block of a snapshot's window.

        Args:
            blocks: allocated for it: one for a copy of the block that the position is inside; else none.
        """
        index, num_tokens = divmod(position, BLOCK_TOKENS)
        shared = window.blocks[window.first : index]
        if blocks:
            self._issue(CopyTokens(BlockId(window.blocks[index]), BlockId(blocks[0]), num_tokens, Lifetime.WINDOW))
        own = Window(window.first, shared + blocks)
        self._add(own, own.held)
        return own

    def set_pinned(self, window: Window, *, is_pinned: bool) -> None:
        """Keep a snapshot's window from eviction, or let it be evicted."""
        if window.is_pinned != is_pinned:
            window.is_pinned = is_pinned
            for block in window.held:
                self._count_pinned(block, 1 if is_pinned else -1)

    def release(self, window: Window) -> None:
        """Free the blocks that no other window has."""
        held = window.held
        window.first = len(window.blocks)
        self._remove(window, held)

    def _add(self, window: Window, blocks: "array[int]") -> None:
        for block in blocks:
            windows = self._windows.get(block)
            if windows is None:
                self._windows[block], self._num_pinned[block] = [window], 1
            else:
                windows.append(window)
                self._count_pinned(block, 1)

    def _remove(self, window: Window, blocks: "array[int]") -> None:
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
            self._issue(DropBlocks(tuple(freed), Lifetime.WINDOW))

    def _count_pinned(self, block: int, change: int) -> None:
        before = self._num_pinned[block]
        after = self._num_pinned[block] = before + change
        self.num_evictable += (after == 0) - (before == 0)

    def compact(self) -> None:
        """Move blocks to free a slab."""
        for src, dst in self.allocator.compact():
            self._issue(MoveBlock(src, dst, Lifetime.WINDOW))
            windows = self._windows[dst] = self._windows.pop(src)
            self._num_pinned[dst] = self._num_pinned.pop(src)
            for window in windows:
                window.blocks[window.blocks.index(src, window.first)] = dst

    def windows_of(self, block: int) -> Iterable[Window]:
        """Return the windows that have a block."""
        return self._windows.get(block, ())
