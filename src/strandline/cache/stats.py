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


@dataclass(frozen=True, slots=True)
class LowerStats:
    """Figures of a tier below the device. Counters start at its construction."""

    store: str
    num_blocks: int
    """Its size in blocks; a slot takes as many as its bytes at rest need."""
    num_used_blocks: int
    num_snapshots: int
    """Snapshots that rest there now."""
    num_snapshots_demoted: int
    num_blocks_demoted: int
    num_snapshots_evicted: int
    num_snapshots_refused: int
    """Evicted from the device or the tier above, and worth less than all that rests or, in a persistent tier, slower to
    load than to compute."""
    num_loads: int
    """Loads that ended well."""
    num_loaded_bytes: int
    num_failed_loads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Figures of a cache at one moment. Counters start at its construction."""

    memory: MemoryUse
    num_leases: int
    """Running requests."""
    num_snapshots: int
    """Published slots: neither a running request's own nor reserved for a cut."""
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
    tiers: tuple[LowerStats, ...]
    """Statistics of the tiers below the device, nearest first."""
