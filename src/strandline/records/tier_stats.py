"""Figures of a tier below the device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectoryUse:
    """What a directory holds that engines share, of all models, engines and ranks."""

    num_files: int
    num_used_bytes: int
    """In whole pages, files that are being written included."""
    num_free_bytes: int
    """What is left of its size."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier below the device stores, and what was loaded from it. Counters count from the start."""

    name: str
    """``host``: host memory, ``disk``: the disk cache, ``objects``: the object store."""
    num_bytes: int
    """Its size."""
    num_used_bytes: int
    """A snapshot takes as many blocks as its encoded bytes need."""
    num_free_bytes: int
    """What may be stored in addition: at most what the disk had room for if the last store failed."""
    num_snapshots: int
    """Snapshots that it stores now."""
    num_snapshots_demoted: int
    num_blocks_demoted: int
    num_snapshots_evicted: int
    """Snapshots that it evicted for others."""
    num_snapshots_refused: int
    """Evicted from the device or the tier above, and worth less than all others or, in a tier in files, slower to load
    than to compute."""
    num_loads: int
    """Loads that ended well."""
    num_loaded_bytes: int
    num_failed_loads: int
