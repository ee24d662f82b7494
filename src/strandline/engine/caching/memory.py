"""The memory of an engine's cache: its size on the device, the tiers below it, and reports of both."""

from typing import NamedTuple

from strandline.cache.policy.window_classes import window_classes
from strandline.cache.size import CacheSize
from strandline.cache.stats import MemoryUse
from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.cache.tiers.spills import spare_blocks
from strandline.device.executor import ExecutorFacts
from strandline.device.stores.host_store import HOST_STORE
from strandline.device.stores.lower_stores import FileFacts
from strandline.file_tiers import DISK
from strandline.records.persisted import NO_ENTRIES
from strandline.specs import ModelSpec


def cache_size(facts: ExecutorFacts, num_logs: int) -> CacheSize:
    """Return what the cache allocates from in an executor's memory."""
    spec = facts.spec
    windows = window_classes(spec)
    return CacheSize(facts.num_slabs, spec.blocks_per_slab, None, num_logs, facts.log_tokens, windows)


def lower_memories(facts: ExecutorFacts, snapshot_dtype: str) -> list[LowerMemory]:
    """Return the memories below the device, nearest first. Persisted entries are taken out of the facts."""
    spec, lower = facts.spec, facts.lower
    if not lower.num_host_blocks:
        return []
    block_bytes, snapshots = spec.block_bytes, spec.stored_snapshots(snapshot_dtype)
    num_host, num_spare = lower.num_host_blocks, 0
    if (files := lower.files) is not None:
        num_spare = num_host if lower.is_buffer else spare_blocks(num_host, spec.blocks_per_slab, snapshots.max_blocks)
    memories = [LowerMemory(HOST_STORE, num_host, block_bytes, snapshots, LoadCosts(), num_spare)]
    if files is not None:
        tier, persisted = files.tier, files.persisted.pop() if files.persisted else NO_ENTRIES
        costs = LoadCosts(tier.latency_s)
        memories.append(
            LowerMemory(tier.store, files.num_blocks, block_bytes, snapshots, costs, key=files.key, persisted=persisted)
        )
    return memories


def describe_tiers(facts: ExecutorFacts, snapshot_dtype: str, loads: Loads) -> list[str]:
    """Return a line for each tier."""
    spec, lower = facts.spec, facts.lower
    if not lower.num_host_blocks:
        return []
    size = f"{lower.num_host_blocks * spec.block_bytes / 2**20:,.0f} MiB{on_each_rank(facts)}"
    below = f"as a buffer before the {lower.files.tier.title}" if lower.is_buffer and lower.files is not None else ""
    line = f"host memory: {size} " + (below or "for what the cache evicts")
    if spec.stored(snapshot_dtype) != spec:
        num_blocks = spec.stored_snapshots(snapshot_dtype).max_blocks
        line += f"; there a snapshot takes the room of {num_blocks} blocks, its states in {snapshot_dtype}: not exact"
    if (files := lower.files) is None:
        return [line]
    used = loads.stats()[1]
    size = f"{files.num_blocks * spec.block_bytes / 2**20:,.0f} MiB{on_each_rank(facts)}"
    has = f"{used.num_used_bytes / 2**20:,.0f} MiB with {used.num_snapshots:,} snapshots"
    return [line, f"{files.tier.title}: {_files(files, size, has)}"]


def _files(files: FileFacts, size: str, has: str) -> str:
    """Return what is reported of a tier in files.

    Args:
        has: what it has now.
    """
    if files.tier == DISK:
        return f"{size} in {files.location}; {has} from earlier runs, found in {files.scan_s:.1f} s"
    return f"at most {size} of {files.location} are used; {has} of all engines found"


def on_each_rank(facts: ExecutorFacts) -> str:
    """Return the suffix of a size that every rank has; empty with one rank."""
    return f" on each of {facts.num_ranks} ranks" if facts.num_ranks > 1 else ""


class MemoryBytes(NamedTuple):
    """Allocated bytes of the arena, by use."""

    slots_in_use: int
    slots_evictable: int
    blocks_in_use: int
    blocks_evictable: int


def held_bytes(memory: MemoryUse, spec: ModelSpec) -> MemoryBytes:
    """Return the sizes of slots and of blocks of all kinds."""
    windows_bytes, windows_evictable_bytes = (
        sum(count * stride_bytes for count, stride_bytes in zip(counts, spec.window_strides_bytes, strict=True))
        for counts in (memory.num_window_blocks, memory.num_evictable_window_blocks)
    )
    windows_in_use_bytes = windows_bytes - windows_evictable_bytes
    return MemoryBytes(
        (memory.num_slots - memory.num_evictable_slots) * spec.slab_bytes,
        memory.num_evictable_slots * spec.slab_bytes,
        (memory.num_blocks - memory.num_evictable_blocks) * spec.block_bytes + windows_in_use_bytes,
        memory.num_evictable_blocks * spec.block_bytes + windows_evictable_bytes,
    )


def bytes_by_use(memory: MemoryUse, spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of slots and blocks, and what is free, by name."""
    held = held_bytes(memory, spec)
    return {**held._asdict(), "free": memory.num_slabs * spec.slab_bytes - sum(held)}
