"""What a cache does with blocks that no resume can need: nothing, unless all attention of the model has windows."""

from typing import Protocol

from strandline.cache.lease import Lease
from strandline.cache.tree import Snapshot


class Gaps(Protocol):
    """Frees blocks of paths before their ends."""

    def free_more(self) -> bool:
        """Evict an entry, where that may free blocks of paths in use; return whether memory may suffice now."""

    def advance(self, lease: Lease) -> None:
        """Free the blocks that a lease's window has passed, unless something else needs them."""

    def has_window(self, lease: Lease, position: int) -> bool:
        """Return whether a lease has all blocks that computing from a position on reads."""

    def leave(self, snapshot: Snapshot) -> None:
        """Free the blocks that only a snapshot needed, which was removed from the index."""

    def end(self, lease: Lease) -> None:
        """Free the blocks of the index that only a lease needed, which has ended."""


class NoGaps:
    """For models with a layer that attends to all tokens, or with window blocks: no path lacks blocks."""

    def free_more(self) -> bool:
        return False

    def advance(self, lease: Lease) -> None:
        return

    def has_window(self, lease: Lease, position: int) -> bool:
        return True

    def leave(self, snapshot: Snapshot) -> None:
        return

    def end(self, lease: Lease) -> None:
        return
