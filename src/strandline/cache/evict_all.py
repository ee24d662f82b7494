"""Eviction of everything at once: before memory is given back, in a reset, and in measurements."""

from strandline.cache.core import PrefixCache


def evict_all(cache: PrefixCache) -> None:
    """Evict all that no request holds. Tiers store what is worth it, once the actions are carried out."""
    memory = cache.internals().memory
    for slot in list(iter(memory.take_slot, None)):
        memory.free_slot(slot)
    memory.free_blocks(memory.take_blocks(memory.allocator.num_slabs * memory.allocator.blocks_per_slab))
