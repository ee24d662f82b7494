"""The size of a cache's memory."""

from typing import NamedTuple

from strandline.ids import BLOCK_TOKENS


class WindowClass(NamedTuple):
    """A size of windows, whose blocks are stored apart."""

    num_tokens: int
    """Last tokens whose blocks are stored (``WindowSize.num_tokens``)."""
    blocks_per_slab: int
    """Its blocks that fit in the memory of one slot."""


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
    windows: tuple[WindowClass, ...] = ()
    """The sizes of windows whose blocks are stored apart."""

    @property
    def num_null_blocks(self) -> int:
        """Blocks that the null blocks of all kinds overlap with, the null block included: they begin together."""
        return max((-(-self.blocks_per_slab // window.blocks_per_slab) for window in self.windows), default=1)

    def snapshot_blocks(self, num_slots: int) -> int:
        """Return the size of a snapshot in blocks, rounded up: its slot, unless it has none, and its windows."""
        return self.blocks_per_slab * num_slots + sum(
            -(-self.blocks_per_slab * -(-(window.num_tokens - 1) // BLOCK_TOKENS) // window.blocks_per_slab)
            for window in self.windows
        )
