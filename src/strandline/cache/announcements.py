"""What the core of the cache tells about changes of its index, for events. ``cache/announcing/`` implements it."""

from typing import Protocol

from strandline.cache.tree import Run, SnapshotKey


class Announces(Protocol):
    """Collects events. Called after a change of the index."""

    def store(self, run: Run, key: SnapshotKey, salt: str) -> None:
        """Announce a snapshot, and the blocks of its path that are not announced yet."""

    def remove(self, run: Run, key: SnapshotKey) -> None:
        """Announce that a snapshot is gone, and the blocks of its path that no other snapshot needs."""

    def store_blocks(self, run: Run, salt: str) -> None:
        """Announce the blocks that were appended to a run, if they are resumable without a snapshot."""

    def remove_blocks(self, run: Run, num_kept: int) -> None:
        """Announce that a run's blocks after the first ``num_kept`` are evicted."""
