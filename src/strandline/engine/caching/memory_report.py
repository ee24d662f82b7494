"""What the memory for blocks and snapshots is used for, in bytes."""

from typing import NamedTuple

from strandline.cache.stats import MemoryUse
from strandline.specs import ModelSpec


class TenantBytes(NamedTuple):
    """Allocated bytes of the arena, by use."""

    slots_in_use: int
    slots_evictable: int
    blocks_in_use: int
    blocks_evictable: int


def tenant_bytes(memory: MemoryUse, spec: ModelSpec) -> TenantBytes:
    """Return the sizes of slots and of blocks of all kinds."""
    windows_bytes, windows_evictable_bytes = (
        sum(count * stride_bytes for count, stride_bytes in zip(counts, spec.window_strides_bytes, strict=True))
        for counts in (memory.num_window_blocks, memory.num_evictable_window_blocks)
    )
    windows_in_use_bytes = windows_bytes - windows_evictable_bytes
    return TenantBytes(
        (memory.num_slots - memory.num_evictable_slots) * spec.slab_bytes,
        memory.num_evictable_slots * spec.slab_bytes,
        (memory.num_blocks - memory.num_evictable_blocks) * spec.block_bytes + windows_in_use_bytes,
        memory.num_evictable_blocks * spec.block_bytes + windows_evictable_bytes,
    )


def bytes_by_tenant(memory: MemoryUse, spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of slots and blocks, and what is free, by name."""
    held = tenant_bytes(memory, spec)
    return {**held._asdict(), "free": memory.num_slabs * spec.slab_bytes - sum(held)}
