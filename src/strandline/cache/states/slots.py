"""The states of a model that keeps states, in slots of their own: a snapshot is a slot, and the window before it.

A request may end in tokens that no later prompt contains: those of a stop string, which the answer's text leaves out.
The next turn then needs the state before them. While an output may be about to end in that way, its lease therefore
keeps a *fallback*: the slot with the state before the first such token. Later steps write another slot, as they do
after a published snapshot.

Where the lease's log holds drafts that were accepted, the fallback is not needed: fewer of them are folded. Of decoded
tokens that is not possible: the windows of convolutions, which have no log, and the final hidden state advance in the
slot at every token.
"""

from strandline.cache.lease import Cut, Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.resume import Match
from strandline.cache.states.snapshots import LeasedSnapshots
from strandline.ids import BLOCK_TOKENS, SlotId
from strandline.records.account import SnapshotKind
from strandline.records.actions import FoldLog


class SlotStates:
    """Folds, keeps and publishes the states in leases' own slots. Arguments are those of ``NewStates``."""

    num_slots = 1

    def __init__(self, memory: CacheMemory, publisher: Publisher, placement: Placement | None) -> None:
        self._memory = memory
        self._publisher = publisher
        self._snapshots = LeasedSnapshots(memory, publisher, placement)

    def begin(self, lease: Lease, match: Match) -> None:
        lease.dst = self._memory.take_promised_slot()
        self._snapshots.resume(lease, match)
        if match.snapshot is not None:
            lease.source, lease.src = match.snapshot, match.snapshot.slot

    def reserve(self, lease: Lease, end: int) -> tuple[tuple[int, SlotId], ...]:
        for position, kind in self._snapshots.take_due(lease, end):
            slot = self._memory.take_slot() if self._memory.can_take(0, 1) else None
            if slot is not None:
                lease.cuts.append(Cut(position, slot, kind))
        return tuple((cut.position, cut.slot) for cut in lease.cuts)

    def commit(self, lease: Lease) -> None:
        self._snapshots.publish_due(lease)

    def leave(self, lease: Lease, kind: SnapshotKind) -> bool:
        """Publish the lease's slot, and give it a new one for the steps after."""
        has_own = self._snapshots.has_own_state(lease)
        home = self._snapshots.home_for(lease, kind, lease.computed) if has_own else None
        slot = None if home is None else self._take_slot_before_step(lease)
        if home is None or slot is None:
            return False
        self.fold(lease)
        snapshot = self._publisher.publish(lease, Cut(lease.computed, lease.dst, kind), home, num_readers=1)
        lease.source, lease.src, lease.dst = snapshot, snapshot.slot, slot
        return True

    def fold(self, lease: Lease) -> None:
        self._fold_to(lease, lease.computed)

    def _fold_to(self, lease: Lease, end: int) -> None:
        """Fold the tokens in the lease's log into the state in ``lease.dst``, by an action.

        Args:
            end: before ``lease.computed``, of drafts in the log of a lease that ends: the others are not folded.
        """
        num_tokens = end - lease.folded
        if num_tokens:
            self._memory.actions.append(FoldLog(lease.dst, lease.log, num_tokens, lease.holds_drafts))
        lease.folded = end

    def keep_fallback(self, lease: Lease) -> None:
        """Keep the state at ``lease.computed`` in the lease's slot, and give the lease a new one for the steps after.

        Replaces the fallback that it has. Nothing changes if no slot can be allocated, or the state is in a snapshot.
        """
        is_kept = self._snapshots.keeps(SnapshotKind.GENERATION_END) and self._snapshots.has_own_state(lease)
        slot = self._take_slot_before_step(lease) if is_kept else None
        if slot is None:
            return
        self.fold(lease)
        self.drop_fallback(lease)
        windows = lease.windows_before(lease.computed)
        lease.fallback = Cut(lease.computed, lease.dst, SnapshotKind.GENERATION_END, windows)
        lease.dst = slot

    def _take_slot_before_step(self, lease: Lease) -> SlotId | None:
        """Allocate a slot for the state after the next step, if there is memory for that step's token, too.

        What the state before it is in is not evicted until that step has read it.
        """
        memory, end = self._memory, lease.computed + 1
        num_blocks = max(-(-end // BLOCK_TOKENS) - len(lease.table), 0)
        can_take = memory.can_take(num_blocks, 1, lease.num_missing_window_blocks(end))
        return memory.take_slot() if can_take else None

    def drop_fallback(self, lease: Lease) -> bool:
        is_read = lease.fallback is not None and lease.src == lease.fallback.slot
        return not is_read and self._snapshots.drop_fallback(lease)

    def end(self, lease: Lease, kind: SnapshotKind, end: int) -> None:
        """Publish the last state of a lease that ends, or the last one up to a position, and free its other slots."""
        state = self._last_state(lease, min(end, lease.computed), kind)
        home = None if state is None else self._snapshots.home_for(lease, kind, state.position)
        left = None
        if state is not None and home is not None:
            if state is not lease.fallback:
                self._fold_to(lease, state.position)
            self._publisher.publish(lease, state, home)
            left = state
        if left is None or left is lease.fallback:
            self._memory.free_slot(lease.dst)
        if left is not lease.fallback:
            self._snapshots.drop_fallback(lease)
        lease.fallback = None

    def _last_state(self, lease: Lease, end: int, kind: SnapshotKind) -> Cut | None:
        """Return the last state up to a position, if its keys and values are there; else the very last one, if any."""
        is_there = end == lease.computed or (lease.holds_drafts and lease.folded <= end)
        if is_there and self._snapshots.has_own_state(lease) and self._snapshots.has_window(lease, end):
            return Cut(end, lease.dst, kind)
        return self._snapshots.fallback_before(lease, kind, end)
