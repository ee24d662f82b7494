"""The states in requests' own slots that become snapshots: at the last token, or shortly before it.

A request may end in tokens that no later prompt contains: those of a stop string, which the answer's text leaves out.
The next turn then needs the state before them. While an output may be about to end in that way, its lease therefore
keeps a *fallback*: the slot with the state before the first such token. Later steps write another slot, as they do
after a published snapshot.

Where the lease's log holds drafts that were accepted, the fallback is not needed: fewer of them are folded. Of decoded
tokens that is not possible: the windows of convolutions, which have no log, and the final hidden state advance in the
slot at every token.
"""

from collections.abc import Iterable

from strandline.cache.lease import Cut, Lease
from strandline.cache.memory import CacheMemory
from strandline.cache.placement import Placement
from strandline.cache.publish import Publisher
from strandline.cache.tree import Home, find_home, snapshot_at
from strandline.ids import BLOCK_TOKENS, NULL_SLOT, SlotId
from strandline.records.account import SnapshotKind
from strandline.records.actions import FoldLog
from strandline.records.tokens import resumable_end


class OwnStates:
    """Folds, keeps and publishes the states in leases' own slots.

    Args:
        placement: says which of them become snapshots; None: nothing is kept.
        needs_slots: whether the model keeps states; else a state is what keys and values the windows contain.
    """

    def __init__(
        self,
        memory: CacheMemory,
        publisher: Publisher,
        placement: Placement | None,
        *,
        needs_slots: bool,
    ) -> None:
        self._memory = memory
        self._publisher = publisher
        self._placement = placement
        self._needs_slots = needs_slots

    def fold(self, lease: Lease, end: int | None = None) -> None:
        """Fold what the lease's log holds into the state in ``lease.dst``, by an action.

        Args:
            end: fold the drafts before this position alone, for a lease that ends; None: all tokens.
        """
        num_tokens = (lease.computed if end is None else end) - lease.folded
        if num_tokens and self._needs_slots:
            self._memory.actions.append(FoldLog(lease.dst, lease.log, num_tokens, lease.holds_drafts))
        lease.folded += num_tokens

    def home_for(self, lease: Lease, kind: SnapshotKind, position: int) -> Home | None:
        """Return the home of a new snapshot on the lease's path; None if it is unwanted, impossible or exists."""
        if self._placement is None or position == 0 or not self._placement.keeps(kind):
            return None
        if resumable_end(lease.tokens.data, position) < position:
            return None  # it is inside a picture, where nothing resumes
        home = find_home(lease.run, lease.tokens.data, position)
        return home if snapshot_at(home, position) is None else None

    def has_own_state(self, lease: Lease) -> bool:
        """Return whether the state at ``lease.computed`` can become a snapshot: it is the lease's, with its window.

        A lease that resumed one token before a snapshot has no whole window until it has computed that token.
        """
        return lease.has_own_state and self._memory.windows.covers(lease.window, lease.computed)

    def keep_fallback(self, lease: Lease) -> None:
        """Keep the state at ``lease.computed`` in the lease's slot, and give the lease a new one for the steps after.

        Replaces the fallback that it has. Nothing changes if no slot can be allocated, or the state is in a snapshot.
        """
        is_kept = self._placement is not None and self._placement.keeps(SnapshotKind.GENERATION_END)
        if not is_kept or not self.has_own_state(lease):
            return
        slot = self.take_slot_before_step(lease) if self._needs_slots else NULL_SLOT
        if slot is None:
            return
        self.fold(lease)
        self.drop_fallback(lease)
        window = self._memory.windows.part_before(lease.window, lease.computed)
        lease.fallback = Cut(lease.computed, lease.dst, SnapshotKind.GENERATION_END, window)
        lease.dst = slot

    def take_slot_before_step(self, lease: Lease) -> SlotId | None:
        """Allocate a slot for the state after the next step, if there is memory for that step's token, too.

        What the state before it is in is not evicted until that step has read it.
        """
        memory, end = self._memory, lease.computed + 1
        num_blocks = max(-(-end // BLOCK_TOKENS) - len(lease.table), 0)
        can_take = memory.can_take(num_blocks, 1, memory.windows.num_missing(lease.window, end))
        return memory.take_slot() if can_take else None

    def drop_fallback(self, lease: Lease) -> bool:
        """Free a lease's fallback, unless its next step reads it; return whether there was one."""
        fallback = lease.fallback
        if fallback is None or (self._needs_slots and lease.src == fallback.slot):
            return False
        self._memory.free_cut(fallback)
        lease.fallback = None
        return True

    def drop_fallbacks(self, leases: Iterable[Lease]) -> bool:
        """Free all fallbacks, for lack of memory; return whether there were any."""
        return sum(map(self.drop_fallback, leases)) > 0

    def leave_last(self, lease: Lease, kind: SnapshotKind, end: int) -> None:
        """Publish the last state of a lease that ends, or the last one up to a position, and free its other slots."""
        state = self._last_state(lease, min(end, lease.computed), kind)
        home = None if state is None else self.home_for(lease, kind, state.position)
        left = None
        if state is not None and home is not None:
            if state is not lease.fallback:
                self.fold(lease, state.position)
            self._publisher.publish(lease, state, home)
            left = state
        if left is None or left is lease.fallback:
            self._memory.free_slot(lease.dst)
        if lease.fallback is not None and left is not lease.fallback:
            self._memory.free_cut(lease.fallback)
        lease.fallback = None

    def _last_state(self, lease: Lease, end: int, kind: SnapshotKind) -> Cut | None:
        """Return the last state up to a position, if its keys and values are there; else the very last one, if any."""
        fallback, has_own = lease.fallback, self.has_own_state(lease)
        is_there = not self._needs_slots or end == lease.computed or (lease.holds_drafts and lease.folded <= end)
        if has_own and is_there and self._memory.windows.covers(lease.window, end):
            return Cut(end, lease.dst, kind)
        if fallback is not None and (fallback.position <= end or not has_own):
            fallback.kind = kind
            return fallback
        return Cut(lease.computed, lease.dst, kind) if has_own else None
