"""Changes of the cache that routers follow: which prefixes became resumable, and which ceased to be. Frozen records.

What tiers below the device have is resumable, too. The hashes are those of ``strandline.records.path_hashes``. Tokens
are encoded; those of salted prompts are masked.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one path can be resumed beyond.

    There is a snapshot at their end or below, or the model needs none.
    """

    hashes: tuple[bytes, ...]
    before: bytes | None
    """Hash of the block before them; None: they begin a path."""
    tokens: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks, or all snapshots at their end and below, are gone. The deepest block comes first."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A prompt that begins with this path resumes here, or deeper."""

    path_hash: bytes
    position: int
    before: bytes | None
    """Hash of the block before its last one; None: it is in the first block."""
    tokens: bytes
    """The 1 to 64 tokens from there to its position."""


@dataclass(frozen=True, slots=True)
class SnapshotRemoved:
    """A snapshot is gone."""

    path_hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is resumable any more, except what later events announce."""


CacheEvent = BlocksStored | BlocksRemoved | SnapshotStored | SnapshotRemoved | Cleared
