"""The tiers below the device in the core: their memory for the cache, and a line on each for reports."""

from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.cache.tiers.spills import spare_blocks
from strandline.device.executor import ExecutorFacts
from strandline.device.stores.host_store import HOST_STORE
from strandline.device.stores.lower_stores import FileFacts
from strandline.file_tiers import DISK
from strandline.records.kept import NOTHING


def lower_memories(facts: ExecutorFacts, snapshot_dtype: str) -> list[LowerMemory]:
    """Return the memories below the device, nearest first. What files have kept is taken out of the facts."""
    spec, lower = facts.spec, facts.lower
    if not lower.num_host_blocks:
        return []
    block_bytes, snapshots = spec.block_bytes, spec.stored_snapshots(snapshot_dtype)
    num_host, num_spare = lower.num_host_blocks, 0
    if (files := lower.files) is not None:
        num_spare = num_host if lower.is_buffer else spare_blocks(num_host, spec.blocks_per_slab, snapshots.max_blocks)
    memories = [LowerMemory(HOST_STORE, num_host, block_bytes, snapshots, LoadCosts(), num_spare)]
    if files is not None:
        tier, kept = files.tier, files.kept.pop() if files.kept else NOTHING
        costs = LoadCosts(tier.latency_s)
        memories.append(
            LowerMemory(tier.store, files.num_blocks, block_bytes, snapshots, costs, key=files.key, kept=kept)
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
    if spec.at_rest(snapshot_dtype) != spec:
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
