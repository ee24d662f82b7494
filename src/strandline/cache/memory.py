"""Allocation of blocks and slots, evicting cached entries when the arena is full.

The only module that frees memory of the index. All changes to the device's memory are issued as actions.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from strandline.cache.announcements import Announces
from strandline.cache.below import FirstTier
from strandline.cache.eviction import Entry, EvictionOrder, EvictionQueue, can_evict, resolve
from strandline.cache.lease import Cut, Lease
from strandline.cache.owners import BlockOwners
from strandline.cache.resume import Match
from strandline.cache.size import WindowClass
from strandline.cache.slab_allocator import SlabAllocator
from strandline.cache.stats import MemoryUse
from strandline.cache.tree import (
    Run,
    Snapshot,
    first_unneeded_block,
    run_of_last_block,
    snapshot_above,
    snapshots_that_need,
)
from strandline.cache.tree_changes import detach_snapshot, remove_child
from strandline.cache.window_blocks import WindowBlocks, Windows
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_SLOT, Lifetime, SlotId
from strandline.records.actions import Action, DropBlocks, DropSlot, MoveBlock
from strandline.records.tokens import BLOCK_KEY_BYTES

ALLOCATION_FAILED: Final = "an allocation failed after can_take had promised the memory"
MAX_TRIM_SHARE: Final = 64
"""At most one in this many blocks is evicted at once beyond those that are needed."""


class CacheMemory:
    """The arena's allocator together with what the index holds in it.

    Attributes:
        num_evictable_blocks, num_evictable_slots: what eviction could free, always exact.
        announcer: collects events of what becomes resumable and what ceases to be; None: events are off.
    """

    def __init__(
        self,
        allocator: SlabAllocator,
        order: EvictionOrder,
        leases: Callable[[], Iterable[Lease]],
        announcer: Announces | None = None,
        windows: Sequence[WindowClass] = (),
    ) -> None:
        self.allocator = allocator
        own = [SlabAllocator(allocator.num_slabs, size.blocks_per_slab, shares=allocator) for size in windows]
        self.windows = tuple(
            WindowBlocks(Lifetime(number), blocks, size.num_tokens, self.issue)
            for number, (blocks, size) in enumerate(zip(own, windows, strict=True), 1)
        )
        """For each size of windows."""
        self.announcer = announcer
        self.actions: list[Action] = []
        self.lower: FirstTier | None = None
        """The tier that evicted entries are offered to; None: they are dropped."""
        self.num_evictable_blocks = 0
        self.num_evictable_slots = 0
        self.num_snapshots_evicted = 0
        self.num_blocks_evicted = 0
        self._queue = EvictionQueue[Entry](order, can_evict)
        self._block_queue = self._queue if allocator.max_slots is None else EvictionQueue[Entry](order, can_evict)
        self._leases = leases
        self._trim_blocks = min(
            allocator.blocks_per_slab, allocator.num_slabs * allocator.blocks_per_slab // MAX_TRIM_SHARE
        )
        """How many blocks that no snapshot needs are evicted at once, even if fewer would do."""
        self._owners = BlockOwners()
        self.revision = 0
        """Number of changes to the index: to its runs' tokens and children, and to its snapshots."""
        self.tick = 0
        """Number of uses so far. Each entry keeps the number of its last use, which orders entries by recency."""

    def issue(self, action: Action) -> None:
        """Add an action."""
        self.actions.append(action)

    def next_tick(self) -> int:
        """Count a use and return its number."""
        self.tick += 1
        return self.tick

    def use(self) -> MemoryUse:
        """Return how much memory is allocated."""
        allocator = self.allocator
        return MemoryUse(
            allocator.num_slabs,
            allocator.num_free_slabs,
            allocator.max_block_slabs * allocator.blocks_per_slab - allocator.num_null_blocks,
            allocator.num_slots,
            allocator.num_blocks,
            self.num_evictable_slots,
            self.num_evictable_blocks,
            tuple([size.allocator.num_blocks for size in self.windows]),
            tuple([size.num_evictable for size in self.windows]),
        )

    # What fits

    def can_take(self, num_blocks: int, num_slots: int, num_window_blocks: int = 0) -> bool:
        """Return whether this many blocks, slots and window blocks of each size can be allocated, evicting if needed.

        Exact, since blocks can be moved to empty a slab, unless some in it are held. Slab 0 never becomes a slot.
        """
        allocator = self.allocator
        size = allocator.blocks_per_slab
        if allocator.max_slots is not None:
            num_slots_left = allocator.max_slots - allocator.num_slots + self.num_evictable_slots
            num_blocks_left = allocator.max_block_slabs * size - 1 - allocator.num_blocks + self.num_evictable_blocks
            return num_slots <= num_slots_left and num_blocks <= num_blocks_left
        num_slabs, num_in_windows = num_slots, 0
        for window in self.windows:  # most caches have none: a generator would cost more than this loop
            num_slabs += window.num_missing_slabs(num_window_blocks)
            num_in_windows += window.allocator.num_blocks + num_window_blocks
        if num_blocks <= allocator.num_free_blocks and num_slabs <= allocator.num_free_slabs:
            return True
        slabs_for_slots = allocator.num_free_slabs + self.num_evictable_slots
        room = allocator.num_free_blocks + self.num_evictable_blocks + slabs_for_slots * size
        if not num_slots and not num_in_windows:
            return num_blocks <= room  # slab 0 only holds blocks
        blocks_that_stay = allocator.num_blocks - self.num_evictable_blocks + num_blocks
        slots_that_stay = allocator.num_slots - self.num_evictable_slots + num_slots
        slabs_that_stay = allocator.num_slabs_for(blocks_that_stay) + slots_that_stay
        for window in self.windows:
            slabs_that_stay += window.num_slabs_with(num_window_blocks)
        return slabs_that_stay <= allocator.num_slabs - 1

    # Taking

    def take_blocks(self, num_blocks: int) -> "array[int]":
        """Allocate blocks, evicting if needed; fewer than asked for when everything else is in use."""
        taken = self.allocator.take_blocks(num_blocks)
        while len(taken) < num_blocks:
            if not self._compact_windows() and not self._evict_one(self._block_queue, num_blocks - len(taken)):
                break
            taken += self.allocator.take_blocks(num_blocks - len(taken))
        return taken

    def extend_windows(self, windows: Windows, num_blocks: int) -> None:
        """Give a request this many blocks of each size, which ``can_take`` has promised."""
        for window in windows:
            window.extend(self._take_promised_window_blocks(window.size, num_blocks))

    def resume_windows(self, windows: Windows, position: int) -> Windows:
        """Return the windows of a request that resumes at a position in the last blocks of a snapshot's windows.

        A block that the position is inside is copied; ``can_take`` has promised the memory.
        """
        num_blocks = int(position % BLOCK_TOKENS > 0)
        return tuple(
            [window.resumed(position, self._take_promised_window_blocks(window.size, num_blocks)) for window in windows]
        )

    def _take_promised_window_blocks(self, size: WindowBlocks, num_blocks: int) -> "array[int]":
        """Allocate window blocks of one size. They can only be moved once a window has them."""
        allocator = size.allocator
        taken = allocator.take_blocks(num_blocks)
        while len(taken) < num_blocks:
            if not self._empty_slab():  # an evicted snapshot may leave window blocks, but no slab
                raise CacheInvariantError(ALLOCATION_FAILED)
            taken += allocator.take_blocks(num_blocks - len(taken))
        return taken

    def empty_slabs(self, num_slabs: int) -> None:
        """Empty slabs until ``num_slabs`` are free, which ``can_take`` has promised."""
        while self.allocator.num_free_slabs < num_slabs:
            if not self._empty_slab():
                raise CacheInvariantError(ALLOCATION_FAILED)

    def take_slot(self) -> SlotId | None:
        """Allocate a slot, evicting and moving blocks if needed; None when everything else is in use."""
        while True:
            slot = self.allocator.take_slot()
            if slot is not None:
                return slot
            if not self._empty_slab():
                return None

    def _empty_slab(self) -> bool:
        """Move blocks to free a slab, or evict an entry, for a slot or window blocks; False: no entry is left."""
        if self.allocator.max_slots is None and self.allocator.can_compact():
            self._compact()
        elif not self._compact_windows():
            return self._evict_one(self._queue, self.allocator.blocks_per_slab - self.allocator.num_free_blocks)
        return True

    def _compact_windows(self) -> bool:
        """Move window blocks of one size to free a slab; False: that is impossible."""
        size = next((size for size in self.windows if size.allocator.can_compact()), None)
        if size is not None:
            size.compact()
        return size is not None

    def take_promised_blocks(self, num_blocks: int) -> "array[int]":
        """Allocate blocks that ``can_take`` has promised."""
        taken = self.take_blocks(num_blocks)
        if len(taken) < num_blocks:
            raise CacheInvariantError(ALLOCATION_FAILED)
        return taken

    def take_promised_slot(self) -> SlotId:
        """Allocate a slot that ``can_take`` has promised."""
        slot = self.take_slot()
        if slot is None:
            raise CacheInvariantError(ALLOCATION_FAILED)
        return slot

    def free_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.allocator.free_blocks(blocks)
            self.actions.append(DropBlocks(tuple(blocks)))

    def free_cut(self, cut: Cut) -> None:
        """Free what a cut holds that is not published."""
        self.free_slot(cut.slot)
        for window in cut.windows or ():
            window.release()

    def free_slot(self, slot: SlotId) -> None:
        """Free a slot; the null slot was not allocated."""
        if slot != NULL_SLOT:
            self.allocator.free_slot(slot)
            self.actions.append(DropSlot(slot))

    # The index's blocks

    def own(self, run: Run, blocks: Sequence[int]) -> None:
        """Record that these, the last blocks of ``run``, belong to it."""
        self.revision += 1
        self._owners.own(run, blocks)

    def disown(self, blocks: Iterable[int]) -> None:
        self._owners.disown(blocks)

    def owner(self, block: int) -> Run | None:
        """Return the run that a block of the index belongs to."""
        return self._owners.owner(block)

    def _compact(self) -> None:
        moves = self.allocator.compact()
        self.actions += [MoveBlock(src, dst) for src, dst in moves]
        self._owners.move(moves, self._leases())

    # Users and readers

    def pin_run(self, run: Run) -> None:
        """Add a user to the run and all above it."""
        for node in run.ancestry():
            self.add_user(node)

    def unpin_run(self, run: Run) -> None:
        """Remove a user from the run and all above it; offer those without users for eviction."""
        for node in run.ancestry():
            self.remove_user(node)

    def try_pin(self, upper: Run, match: Match, num_blocks: int, num_slots: int, num_window_blocks: int) -> bool:
        """Pin what a match uses, if this much memory can be allocated in addition.

        Args:
            upper: the run that ends with the match's last whole block.
        """
        self.pin_run(upper)
        if match.copied_run is not None:
            self.add_user(match.copied_run)
        if match.snapshot is not None:
            self.pin_snapshot(match.snapshot)
        if self.can_take(num_blocks, num_slots, num_window_blocks):
            return True
        if match.copied_run is not None:
            self.remove_user(match.copied_run)
        self.unpin_run(upper)
        if match.snapshot is not None:
            self.unpin_snapshot(match.snapshot)
        return False

    def add_user(self, run: Run) -> None:
        """Add a user to this run alone: one that is a user of all above it already."""
        run.num_users += 1
        if run.num_users == 1:
            self.num_evictable_blocks -= len(run.blocks)

    def remove_user(self, run: Run) -> None:
        """Remove a user from this run alone."""
        run.num_users -= 1
        if run.num_users == 0:
            self.num_evictable_blocks += len(run.blocks)
            self.offer(run)

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.num_readers += 1
        if snapshot.num_readers == 1:
            self.num_evictable_slots -= snapshot.num_slots
            for window in snapshot.windows:
                window.size.set_pinned(window, is_pinned=True)

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a reader. A snapshot that was evicted meanwhile is freed with its last reader."""
        snapshot.num_readers -= 1
        if snapshot.num_readers:
            return
        if snapshot.is_attached:
            self.num_evictable_slots += snapshot.num_slots
            for window in snapshot.windows:
                window.size.set_pinned(window, is_pinned=False)
            self.offer(snapshot)
        else:
            self._free_snapshot(snapshot)

    def _free_snapshot(self, snapshot: Snapshot) -> None:
        self.free_slot(snapshot.slot)
        for window in snapshot.windows:
            window.release()

    def take_back(self, lease: Lease) -> None:
        """Free the blocks that are a lease's own, and unpin its path."""
        tail = lease.tail
        kept = tail.blocks[0] if tail is not None else None
        own = lease.table[lease.num_published :]
        self.free_blocks([block for block in own if block != kept])
        if tail is not None:
            tail.is_live = False
            self.remove_user(tail)
        self.unpin_run(lease.run)
        for window in lease.windows:
            window.release()

    def touch(self, *runs: Run | None) -> None:
        """Count a use of these runs."""
        tick = self.next_tick()
        for run in runs:
            if run is not None:
                run.last_tick = tick

    def forget_waiter(self, entry: Entry) -> None:
        """Remove a waiting request from what it would have resumed from, or from its replacement if that is evicted."""
        here = resolve(entry)
        if here is not None:
            here.num_waiters -= 1
            self.offer(here)
            if isinstance(here, Snapshot) and (run := run_of_last_block(here)) is not None:
                self.offer(run)

    def offer(self, entry: Entry) -> None:
        """Put an entry into the eviction queue if it can be evicted now."""
        if can_evict(entry):
            (self._queue if isinstance(entry, Snapshot) else self._block_queue).push(entry)

    def enter_snapshot(self, snapshot: Snapshot) -> None:
        """Account for a new snapshot of the index.

        Also offers the snapshots that it makes less valuable: the one above it, and the next one below in its run.
        """
        self.revision += 1
        if snapshot.num_readers == 0:
            self.num_evictable_slots += snapshot.num_slots
            for window in snapshot.windows:
                window.size.set_pinned(window, is_pinned=False)
            self.offer(snapshot)
        if (above := snapshot_above(snapshot)) is not None:
            self.offer(above)
        if (below := snapshot.home.key_after(snapshot.key)) is not None:
            self.offer(snapshot.home.snapshots[below])

    # Evicting

    def are_queued(self, runs: Iterable[Run], snapshots: Iterable[Snapshot]) -> bool:
        """Return whether those that can be evicted are in the queues; others never would be."""
        runs, snapshots = filter(can_evict, runs), filter(can_evict, snapshots)
        return all(run in self._block_queue for run in runs) and all(each in self._queue for each in snapshots)

    def evict(self) -> bool:
        """Evict the entry of least worth; return False if nothing can be evicted."""
        return self._evict_one(self._queue, 1)

    def _evict_one(self, queue: EvictionQueue[Entry], num_blocks: int) -> bool:
        """Evict the entry of least worth, or about ``num_blocks`` blocks of a run; False: no entry is left."""
        entry = queue.pop()
        if entry is None:
            return False
        if isinstance(entry, Snapshot):
            self.drop_snapshot(entry)
        else:
            self._trim(entry, num_blocks)
        return True

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Evict a snapshot; its slot is freed now, or with its last reader.

        Waiting requests that would have resumed there resume at the snapshot above.
        """
        if self.lower is not None:
            self.lower.demote_snapshot(snapshot)
        self._drop_snapshot(snapshot)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        above = snapshot_above(snapshot)
        if above is not None:
            above.replace(snapshot)
        detach_snapshot(snapshot)
        if self.announcer is not None:
            self.announcer.remove(snapshot.home, snapshot.key)
        self.revision += 1
        self.num_snapshots_evicted += 1
        if (unneeded := run_of_last_block(snapshot)) is not None:
            self.offer(unneeded)
        if snapshot.num_readers == 0:
            self.num_evictable_slots -= snapshot.num_slots
            self._free_snapshot(snapshot)

    def _trim(self, run: Run, num_blocks: int) -> None:
        """Evict the last block of a childless, unused run, and the snapshots that need it.

        When no snapshot needs that block, evicts further blocks that none needs: ``num_blocks``, or enough for a slot.
        """
        for key in run.keys[bisect_right(run.keys, (run.end_block - 1, b"")) :]:
            self.drop_snapshot(run.snapshots[key])
        num_evicted = max(1, min(max(num_blocks, self._trim_blocks), run.end_block - first_unneeded_block(run)))
        self.num_blocks_evicted += num_evicted
        if num_evicted == len(run.blocks):
            self._truncate(run, num_evicted - 1)
            self.remove_run(run)
        else:
            self._truncate(run, num_evicted)
            self.offer(run)

    def _truncate(self, run: Run, num_blocks: int) -> None:
        """Remove the last blocks of a run from the index, but not all of them."""
        if not num_blocks:
            return
        kept = len(run.blocks) - num_blocks
        evicted = run.blocks[kept:]
        key = bytes(run.tokens[kept * BLOCK_KEY_BYTES : (kept + 1) * BLOCK_KEY_BYTES])
        if self.lower is not None:
            self.lower.demote_blocks(run, kept)
        if self.announcer is not None:
            self.announcer.remove_blocks(run, kept)
        del run.blocks[kept:], run.hashes[kept:]
        del run.tokens[kept * BLOCK_KEY_BYTES :]
        ghost_tokens = num_blocks * BLOCK_TOKENS + max(run.evicted_children.values(), default=0)
        run.evicted_children.clear()
        run.evicted_children[hash(key)] = ghost_tokens
        self._free_indexed(evicted[::-1])

    def remove_run(self, run: Run) -> None:
        """Remove a childless run of one block from the index, and the snapshots whose tokens only that block holds."""
        parent, lost = run.parent, snapshots_that_need(run)
        if self.lower is not None:
            self.lower.demote_blocks(run, 0)
            for snapshot in lost:
                self.lower.demote_snapshot(snapshot)
        remove_child(run, ghost_tokens=BLOCK_TOKENS)
        if self.announcer is not None:
            self.announcer.remove_blocks(run, 0)
        self._free_indexed(run.blocks[:])
        if parent is None:
            return
        for snapshot in lost:
            self._drop_snapshot(snapshot)
        self.offer(parent)
        if num_own := parent.num_own_snapshots:
            self.offer(parent.snapshots[parent.keys[num_own - 1]])

    def _free_indexed(self, blocks: "array[int]") -> None:
        self.revision += 1
        self.disown(blocks)
        self.num_evictable_blocks -= len(blocks)
        self.free_blocks(blocks)
