"""The tiers below the device in the core: their memory for the cache, and their contents for reports."""

from typing import Final

from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.cache.tiers.spills import spare_blocks
from strandline.device.executor import ExecutorFacts
from strandline.device.stores.file_store import DISK_STORE, OBJECT_STORE
from strandline.device.stores.host_store import HOST_STORE
from strandline.records.events import TierStats
from strandline.records.kept import NOTHING
from strandline.transfer.object_files import SALT_KEY

OBJECT_LATENCY_S: Final = 0.02
"""Until the first byte of an object comes, which small loads wait for as well."""


def lower_memories(facts: ExecutorFacts, snapshot_dtype: str) -> list[LowerMemory]:
    """Return the memories below the device, nearest first. What the disk has kept is taken out of the facts."""
    spec, lower = facts.spec, facts.lower
    if not lower.num_host_blocks:
        return []
    block_bytes, snapshots = spec.block_bytes, spec.stored_snapshots(snapshot_dtype)
    num_host, num_spare = lower.num_host_blocks, 0
    if lower.disk is not None or lower.objects is not None:
        num_spare = num_host if lower.is_buffer else spare_blocks(num_host, spec.blocks_per_slab, snapshots.max_blocks)
    memories = [LowerMemory(HOST_STORE, num_host, block_bytes, snapshots, LoadCosts(), num_spare)]
    if (disk := lower.disk) is not None:
        kept = disk.kept.pop() if disk.kept else NOTHING
        memories.append(
            LowerMemory(DISK_STORE, disk.num_blocks, block_bytes, snapshots, LoadCosts(), key=disk.key, kept=kept)
        )
    if (objects := lower.objects) is not None:
        costs = LoadCosts(OBJECT_LATENCY_S)
        memories.append(LowerMemory(OBJECT_STORE, objects.num_blocks, block_bytes, snapshots, costs, key=SALT_KEY))
    return memories


def tier_stats(loads: Loads, block_bytes: int) -> list[TierStats]:
    """Return the figures of the tiers, nearest first."""
    return [
        TierStats(
            name=tier.store,
            num_bytes=tier.num_blocks * block_bytes,
            num_used_bytes=tier.num_used_blocks * block_bytes,
            num_snapshots=tier.num_snapshots,
            num_snapshots_demoted=tier.num_snapshots_demoted,
            num_blocks_demoted=tier.num_blocks_demoted,
            num_snapshots_evicted=tier.num_snapshots_evicted,
            num_snapshots_refused=tier.num_snapshots_refused,
            num_loads=tier.num_loads,
            num_loaded_bytes=tier.num_loaded_bytes,
            num_failed_loads=tier.num_failed_loads,
        )
        for tier in loads.stats()
    ]


def describe_tiers(facts: ExecutorFacts, snapshot_dtype: str, loads: Loads) -> list[str]:
    """Return a line for each tier."""
    spec, lower = facts.spec, facts.lower
    if not lower.num_host_blocks:
        return []
    size = f"{lower.num_host_blocks * spec.block_bytes / 2**20:,.0f} MiB{on_each_rank(facts)}"
    below = "the disk" if lower.disk is not None else "the object store"
    line = f"host memory: {size} " + (f"as a buffer before {below}" if lower.is_buffer else "for what the cache evicts")
    if spec.at_rest(snapshot_dtype) != spec:
        num_blocks = spec.stored_snapshots(snapshot_dtype).max_blocks
        line += f"; there a snapshot takes the room of {num_blocks} blocks, its states in {snapshot_dtype}: not exact"
    if lower.disk is None and lower.objects is None:
        return [line]
    used = loads.stats()[1]
    has = f"{used.num_used_blocks * spec.block_bytes / 2**20:,.0f} MiB with {used.num_snapshots:,} snapshots"
    if (disk := lower.disk) is not None:
        size = f"{disk.num_blocks * spec.block_bytes / 2**20:,.0f} MiB{on_each_rank(facts)}"
        return [line, f"disk cache: {size} in {disk.directory}; {has} from earlier runs, found in {disk.scan_s:.1f} s"]
    if (objects := lower.objects) is not None:
        size = f"{objects.num_blocks * spec.block_bytes / 2**20:,.0f} MiB{on_each_rank(facts)}"
        return [line, f"object store: at most {size} of {objects.url} are used; {has} of all engines found"]
    return [line]


def on_each_rank(facts: ExecutorFacts) -> str:
    """Return the suffix of a size that every rank has; empty with one rank."""
    return f" on each of {facts.num_ranks} ranks" if facts.num_ranks > 1 else ""
