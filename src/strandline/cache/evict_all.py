"""Eviction of everything at once: before memory is given back, when weights change, and in measurements."""

from strandline.cache.below import FirstTier
from strandline.cache.core import PrefixCache
from strandline.cache.tree import Run, Snapshot


def evict_all(cache: PrefixCache) -> None:
    """Evict all that no request holds. Tiers store what is worth it, once the actions are carried out."""
    memory = cache.internals().memory
    for slot in list(iter(memory.take_slot, None)):
        memory.free_slot(slot)
    memory.free_blocks(memory.take_blocks(memory.allocator.num_slabs * memory.allocator.blocks_per_slab))


def drop_all(cache: PrefixCache) -> None:
    """Evict all that no request holds, and offer none of it to the tiers below.

    What they have that needs a block which only the device had is evicted as well.
    """
    memory = cache.internals().memory
    lower = memory.lower
    memory.lower = None if lower is None else _NothingDemoted(lower)
    try:
        evict_all(cache)
    finally:
        memory.lower = lower


class _NothingDemoted:
    """The first tier while the device offers it nothing."""

    def __init__(self, tier: FirstTier) -> None:
        self.lose_blocks = tier.lose_blocks

    def demote_snapshot(self, snapshot: Snapshot) -> None:
        """Leave it to be dropped."""

    def demote_blocks(self, run: Run, kept: int) -> None:
        self.lose_blocks(run, kept)
