"""The states of a model that keeps none but stores window blocks: a snapshot is a window, with the null slot.

No step emits a snapshot, and none needs memory of its own when it is taken: it is a part of its lease's window.
"""

from strandline.cache.lease import Cut, Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.resume import Match
from strandline.cache.states.snapshots import LeasedSnapshots
from strandline.ids import NULL_SLOT, SlotId
from strandline.records.account import SnapshotKind


class WindowStates:
    """Keeps and publishes parts of leases' windows. Arguments are those of ``NewStates``."""

    num_slots = 0

    def __init__(self, memory: CacheMemory, publisher: Publisher, placement: Placement | None) -> None:
        self._memory = memory
        self._publisher = publisher
        self._snapshots = LeasedSnapshots(memory, publisher, placement)

    def begin(self, lease: Lease, match: Match) -> None:
        self._snapshots.resume(lease, match)
        if match.snapshot is not None:
            self._memory.unpin_snapshot(match.snapshot)

    def reserve(self, lease: Lease, end: int) -> tuple[tuple[int, SlotId], ...]:
        lease.cuts += [Cut(position, NULL_SLOT, kind) for position, kind in self._snapshots.take_due(lease, end)]
        return ()

    def commit(self, lease: Lease) -> None:
        self._snapshots.publish_due(lease)

    def leave(self, lease: Lease, kind: SnapshotKind) -> bool:
        return self._snapshots.has_own_state(lease) and self._publish(lease, Cut(lease.computed, NULL_SLOT, kind))

    def _publish(self, lease: Lease, cut: Cut) -> bool:
        """Publish a snapshot, if it is wanted and there is none; return whether it was."""
        home = self._snapshots.home_for(lease, cut.kind, cut.position)
        if home is not None:
            self._publisher.publish(lease, cut, home)
        return home is not None

    def fold(self, lease: Lease) -> None:
        lease.folded = lease.computed

    def keep_fallback(self, lease: Lease) -> None:
        if self._snapshots.keeps(SnapshotKind.GENERATION_END) and self._snapshots.has_own_state(lease):
            self.fold(lease)
            self.drop_fallback(lease)
            windows = lease.windows_before(lease.computed)
            lease.fallback = Cut(lease.computed, NULL_SLOT, SnapshotKind.GENERATION_END, windows)

    def drop_fallback(self, lease: Lease) -> bool:
        return self._snapshots.drop_fallback(lease)

    def end(self, lease: Lease, kind: SnapshotKind, end: int) -> None:
        end = min(end, lease.computed)
        if self._snapshots.has_own_state(lease) and self._snapshots.has_window(lease, end):
            state: Cut | None = Cut(end, NULL_SLOT, kind)
        else:
            state = self._snapshots.fallback_before(lease, kind, end)
        if state is not None and self._publish(lease, state) and state is lease.fallback:
            lease.fallback = None
        self.drop_fallback(lease)
