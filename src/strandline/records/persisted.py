"""Blocks and snapshots that persistent tiers hold from earlier processes or from other engines, as data.

Blocks and snapshots name the blocks before them by the hashes of ``path_hashes``, with the name of their tree instead
of a salt.
"""

from typing import Final, NamedTuple

from strandline.records.account import SnapshotKind


class PersistedBlocks(NamedTuple):
    """Consecutive whole blocks of a path."""

    tree: str
    """Names the salt: a keyed hash of it."""
    before: bytes
    """Hash of the path before the first one."""
    tokens: bytes
    """Those of the blocks, encoded."""
    addresses: tuple[int, ...]
    """One for each block."""
    interarrival_bin: int
    idle_s: float
    """Seconds since the last use."""
    is_shared: bool


class PersistedSnapshot(NamedTuple):
    """A snapshot."""

    tree: str
    before: bytes
    """Hash of the whole blocks before it."""
    key: bytes
    """The tokens from there to its position, encoded: fewer than a block."""
    address: int
    tail_address: int
    """Address of the block that contains its position; 0: its position is at a block's end."""
    kind: SnapshotKind
    interarrival_bin: int
    idle_s: float
    is_shared: bool


class PersistedEntries(NamedTuple):
    """What a store, or some of its files, holds."""

    blocks: tuple[PersistedBlocks, ...]
    snapshots: tuple[PersistedSnapshot, ...]


NO_ENTRIES: Final = PersistedEntries((), ())
