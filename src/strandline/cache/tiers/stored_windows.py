"""The windows of snapshots that leave the device, and of those that are loaded."""

from strandline.cache.memory import CacheMemory
from strandline.cache.window import NO_WINDOW, Window
from strandline.cache.window_blocks import WindowBlocks
from strandline.ids import BLOCK_TOKENS, BlockId


def ids_of(window: Window | None) -> tuple[BlockId, ...]:
    """Return the blocks of a window, for actions; None: there are none."""
    return () if window is None else tuple(map(BlockId, window.held))


def num_slabs_for(windows: WindowBlocks, position: int) -> int:
    """Return how many slabs the window of a snapshot at a position takes that is loaded."""
    return -(-_num_blocks(windows, position) // windows.allocator.blocks_per_slab)


def take_window(memory: CacheMemory, position: int) -> Window:
    """Allocate the window of a snapshot that is going to be loaded, which ``can_take`` has promised.

    Its blocks are not moved before ``let_go``. They get slabs of their own, since in shared ones they would keep others
    from being moved, and so slabs from being emptied that were promised.
    """
    windows = memory.windows
    if not windows.are_kept:
        return NO_WINDOW
    memory.empty_slabs(num_slabs_for(windows, position))
    blocks = windows.allocator.take_in_free_slabs(_num_blocks(windows, position))
    windows.allocator.hold(blocks)
    window = Window(windows.first_seen(position))
    windows.extend(window, blocks)
    return window


def let_go(windows: WindowBlocks, window: Window | None) -> None:
    """Let the blocks of such a window be moved: it is loaded, or will not be."""
    if window is not None and windows.are_kept:
        windows.allocator.let_go(window.held)


def _num_blocks(windows: WindowBlocks, position: int) -> int:
    return -(-position // BLOCK_TOKENS) - windows.first_seen(position) if windows.are_kept else 0
