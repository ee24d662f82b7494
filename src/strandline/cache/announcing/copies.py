"""How many memories hold what events announce, where there are tiers below the device.

A block or a snapshot that several memories hold is announced once: when the first of them gets it, until the last one
loses it. Every memory announces all blocks before those that it announces.
"""

from collections.abc import Iterator

from strandline.records.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Cleared,
    SnapshotRemoved,
    SnapshotStored,
)
from strandline.records.tokens import BLOCK_KEY_BYTES


class Copies:
    """Counts holders, by hash."""

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}

    def apply(self, event: CacheEvent) -> Iterator[CacheEvent]:
        """Count an event of one memory; yield what it changes for all of them together, if anything."""
        match event:
            case BlocksStored(hashes, before, tokens):
                is_new = [self._add(path_hash) for path_hash in hashes]
                if True in is_new:
                    first = is_new.index(True)
                    before = hashes[first - 1] if first else before
                    yield BlocksStored(hashes[first:], before, tokens[first * BLOCK_KEY_BYTES :])
            case BlocksRemoved(hashes):
                if gone := tuple([path_hash for path_hash in hashes if self._discard(path_hash)]):
                    yield BlocksRemoved(gone)
            case SnapshotStored(path_hash):
                if self._add(path_hash):
                    yield event
            case SnapshotRemoved(path_hash):
                if self._discard(path_hash):
                    yield event
            case Cleared():
                self.counts.clear()
                yield event

    def _add(self, path_hash: bytes) -> bool:
        """Count a holder; return whether it is the first."""
        num_holders = self.counts[path_hash] = self.counts.get(path_hash, 0) + 1
        return num_holders == 1

    def _discard(self, path_hash: bytes) -> bool:
        """Count a holder less; return whether it was the last."""
        num_holders = self.counts[path_hash] = self.counts[path_hash] - 1
        if not num_holders:
            del self.counts[path_hash]
        return not num_holders
