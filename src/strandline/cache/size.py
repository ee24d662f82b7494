"""The size of a cache's memory."""

from typing import NamedTuple

from strandline.ids import BLOCK_TOKENS


class CacheSize(NamedTuple):
    """What a cache allocates from."""

    num_slabs: int
    """Size of the arena (see ``SlabAllocator``), the null slab included."""
    blocks_per_slab: int
    """Blocks that fit in the memory of one slot."""
    max_slots: int | None = None
    """Slabs reserved for slots, the others being for blocks, as a baseline; None: no static share."""
    num_logs: int = 0
    """Logs to grant, one per lease, numbered from 1. A lease that gets none folds every token."""
    log_tokens: int = 0
    """Capacity of a log, in decoded tokens."""
    window_tokens: int = 0
    """Tokens whose window blocks are stored (``ModelSpec.max_window_tokens``); 0: there are none."""
    window_blocks_per_slab: int = 0
    """Window blocks that fit in the memory of one slot."""

    @property
    def num_null_blocks(self) -> int:
        """Blocks that the null blocks of all kinds overlap with, the null block included: they begin together."""
        return -(-self.blocks_per_slab // self.window_blocks_per_slab) if self.window_blocks_per_slab else 1

    def snapshot_blocks(self, num_slots: int) -> int:
        """Return the size of a snapshot in blocks, rounded up: its slot, unless it has none, and its window."""
        slot_blocks = self.blocks_per_slab * num_slots
        if not self.window_tokens:
            return slot_blocks
        num_window_blocks = -(-(self.window_tokens - 1) // BLOCK_TOKENS)
        return slot_blocks + -(-self.blocks_per_slab * num_window_blocks // self.window_blocks_per_slab)
