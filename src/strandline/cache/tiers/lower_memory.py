"""Memory below the device and its figures, as data."""

from dataclasses import dataclass

from strandline.cache.tiers.load_costs import LoadCosts
from strandline.records.kept import NOTHING, Kept
from strandline.specs import SnapshotSize


@dataclass(frozen=True, slots=True)
class LowerMemory:
    """Memory below the device."""

    store: str
    """The name of the store in actions."""
    num_blocks: int
    """Its size in blocks."""
    block_bytes: int
    snapshots: SnapshotSize
    """What stored snapshots take."""
    costs: LoadCosts
    num_spare_blocks: int = 0
    """Blocks to leave free, by spilling what is worth least to the tier below."""
    key: bytes | None = None
    """Secret for hashing salts in its files, the same for all that have one.

    None: it ends with the process, and drops what is loaded.
    """
    kept: Kept = NOTHING
    """What it holds from an earlier process."""


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
