"""Figures of a cache: memory use and counters, as frozen records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from strandline.cache.counters import LoadCounters
from strandline.records.account import Reason, SnapshotKind


class MemoryUse(NamedTuple):
    """Allocated slots and blocks, without the null ones."""

    num_slabs: int
    """Size of the arena, the null slab included."""
    num_free_slabs: int
    """Slabs that hold neither a slot nor blocks."""
    max_blocks: int
    """Blocks that could be allocated if no slot were."""
    num_slots: int
    num_blocks: int
    num_evictable_slots: int
    """Slots that eviction could free: snapshots that no running request reads."""
    num_evictable_blocks: int
    """Blocks that eviction could free: those that no running request uses."""
    num_window_blocks: tuple[int, ...] = ()
    """For each size of windows."""
    num_evictable_window_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Figures of a cache at one moment. Counters start at its construction."""

    memory: MemoryUse
    num_leases: int
    """Running requests."""
    num_snapshots: int
    """Snapshots of the index: neither a running request's own states nor reserved for a cut."""
    num_snapshots_evicted: int
    num_blocks_evicted: int
    queries: int
    queried_tokens: int
    hit_tokens: int
    missed_tokens: Mapping[Reason, int]
    told_tokens: Mapping[Reason, int]
    """As ``missed_tokens``, by the reasons of ``Account.for_callers``."""
    hits_by_kind: Mapping[SnapshotKind, int]
    snapshots_taken: Mapping[SnapshotKind, int]
    loads: LoadCounters
