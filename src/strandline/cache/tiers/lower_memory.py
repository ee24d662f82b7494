"""Memory below the device, as data."""

from dataclasses import dataclass

from strandline.cache.tiers.load_costs import LoadCosts
from strandline.records.persisted import NO_ENTRIES, PersistedEntries
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
    persisted: PersistedEntries = NO_ENTRIES
    """What it holds from an earlier process."""
