"""What a store that outlives the process holds from an earlier one, as data.

Blocks and snapshots name the blocks before them by the hashes of ``path_hashes``, with the name of their tree instead
of a salt.
"""

from typing import Final, NamedTuple

from strandline.records.account import SnapshotKind


class KeptBlocks(NamedTuple):
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


class KeptSnapshot(NamedTuple):
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


class Kept(NamedTuple):
    """All that a store holds."""

    blocks: tuple[KeptBlocks, ...]
    snapshots: tuple[KeptSnapshot, ...]


NOTHING: Final = Kept((), ())
