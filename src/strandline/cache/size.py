"""The size of a cache's memory."""

from typing import NamedTuple


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
