"""Figures of a tier."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LowerStats:
    """Figures of a tier below the device. Counters start at its construction."""

    store: str
    num_blocks: int
    """Its size in blocks; a slot takes as many as its encoded bytes need."""
    num_used_blocks: int
    num_snapshots: int
    """Snapshots that it stores now."""
    num_snapshots_demoted: int
    num_blocks_demoted: int
    num_snapshots_evicted: int
    num_snapshots_refused: int
    """Evicted from the device or the tier above, and worth less than all others or, in a persistent tier, slower
    to load than to compute."""
    num_loads: int
    """Loads that ended well."""
    num_loaded_bytes: int
    num_failed_loads: int
