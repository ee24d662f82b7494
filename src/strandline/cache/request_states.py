"""What a running request is resumed from beyond the blocks of its path, and how that becomes snapshots.

``cache/states/`` implements the protocol: states in slots, windows alone, or neither. The core imports none of it.
"""

from collections.abc import Callable
from typing import Protocol

from strandline.cache.lease import Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.resume import Match
from strandline.ids import SlotId
from strandline.records.account import SnapshotKind


class RequestStates(Protocol):
    """The states of all running requests."""

    @property
    def num_slots(self) -> int:
        """Slots that a running request needs, and a snapshot: 1 or 0."""

    def begin(self, lease: Lease, match: Match) -> None:
        """Give a lease what it resumes from and its own memory, which is promised, and record the hit."""

    def reserve(self, lease: Lease, end: int) -> tuple[tuple[int, SlotId], ...]:
        """Prepare the snapshots that are due in a step to ``end``; return those that the step emits.

        Returns:
            Position and slot of each.
        """

    def commit(self, lease: Lease) -> None:
        """Publish what is due up to ``lease.computed``."""

    def leave(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Publish the state at ``lease.computed``, as ``PrefixCache.leave_snapshot`` says."""

    def fold(self, lease: Lease) -> None:
        """Fold what the lease's log holds into its state."""

    def keep_fallback(self, lease: Lease) -> None:
        """Keep the state at ``lease.computed`` as its fallback, if there is memory for it."""

    def drop_fallback(self, lease: Lease) -> bool:
        """Free a lease's fallback, unless its next step reads it; return whether there was one."""

    def end(self, lease: Lease, kind: SnapshotKind, end: int) -> None:
        """Publish the last state up to a position of a lease that ends, and free its others."""


NewStates = Callable[[CacheMemory, Publisher, Placement | None], RequestStates]
"""Makes them. The placement says which become snapshots; None: none do, as the cache is disabled."""
