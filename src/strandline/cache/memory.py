"""Taking blocks and slots from the arena, evicting what is worth least when it is full.

This is the only place that frees memory of the index. Everything it does to the device is issued as actions.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from strandline.cache.actions import Action, DropBlocks, DropSlot, MoveBlock
from strandline.cache.arena import Arena
from strandline.cache.eviction import Entry, EvictionOrder, EvictionQueue
from strandline.cache.lease import Lease
from strandline.cache.owners import BlockOwners
from strandline.cache.stats import MemoryUse
from strandline.cache.tokens import BLOCK_KEY_BYTES
from strandline.cache.tree import (
    Run,
    Snapshot,
    child_with_prefix,
    first_bare_block,
    remove_child,
    snapshot_above,
    take_snapshot_away,
)
from strandline.ids import BLOCK_TOKENS, SlotId

STRETCH_SHARE: Final = 64
"""No more than this fraction of all blocks go at once that are not needed yet."""


class CacheMemory:
    """The arena together with the index's claims on it.

    Attributes:
        num_evictable_blocks, num_evictable_slots: what eviction could free, kept exact as things change.
    """

    def __init__(self, arena: Arena, order: EvictionOrder, leases: Callable[[], Iterable[Lease]]) -> None:
        self.arena = arena
        self.actions: list[Action] = []
        self.num_evictable_blocks = 0
        self.num_evictable_slots = 0
        self.num_snapshots_evicted = 0
        self.num_blocks_evicted = 0
        self._queue = EvictionQueue(order, _can_evict)
        self._block_queue = self._queue if arena.max_slots is None else EvictionQueue(order, _can_evict)
        self._leases = leases
        self._stretch_blocks = min(arena.blocks_per_slab, arena.num_slabs * arena.blocks_per_slab // STRETCH_SHARE)
        """Of blocks that no snapshot needs so many go at once, though fewer would do."""
        self._owners = BlockOwners(arena.num_slabs * arena.blocks_per_slab)
        self.revision = 0
        """Counts changes of the index: of its runs' tokens and children, and of its snapshots."""
        self.tick = 0
        """How many uses there were: what was used last has the largest."""

    def next_tick(self) -> int:
        """Count a use and return its number."""
        self.tick += 1
        return self.tick

    def use(self) -> MemoryUse:
        """Return how much memory is allocated."""
        arena = self.arena
        return MemoryUse(
            arena.num_slabs,
            arena.num_free_slabs,
            arena.max_block_slabs * arena.blocks_per_slab - 1,
            arena.num_slots,
            arena.num_blocks,
            self.num_evictable_slots,
            self.num_evictable_blocks,
        )

    # What fits

    def can_take(self, num_blocks: int, num_slots: int) -> bool:
        """Return whether so many blocks and slots can be had, if need be by eviction.

        Exact because blocks can be moved together; slab 0 never becomes a slot.
        """
        arena = self.arena
        size = arena.blocks_per_slab
        if arena.max_slots is not None:
            num_slots_left = arena.max_slots - arena.num_slots + self.num_evictable_slots
            num_blocks_left = arena.max_block_slabs * size - 1 - arena.num_blocks + self.num_evictable_blocks
            return num_slots <= num_slots_left and num_blocks <= num_blocks_left
        if num_blocks <= arena.num_free_blocks and num_slots <= arena.num_free_slabs:
            return True
        slabs_for_slots = arena.num_free_slabs + self.num_evictable_slots
        room = arena.num_free_blocks + self.num_evictable_blocks + slabs_for_slots * size
        if not num_slots:
            return num_blocks <= room
        # The blocks that stay must fit beside the slots; those of slab 0 can only ever be blocks.
        blocks_that_stay = arena.num_blocks - self.num_evictable_blocks + num_blocks
        slots_that_stay = arena.num_slots - self.num_evictable_slots + num_slots
        slabs_needed = -(-max(blocks_that_stay - (size - 1), 0) // size) + slots_that_stay
        return slabs_needed <= arena.num_slabs - 1

    # Taking

    def take_blocks(self, num_blocks: int) -> "array[int]":
        """Return so many blocks, evicting if need be; fewer when everything else is in use."""
        taken = self.arena.take_blocks(num_blocks)
        while len(taken) < num_blocks and self._evict_one(self._block_queue, num_blocks - len(taken)):
            taken += self.arena.take_blocks(num_blocks - len(taken))
        return taken

    def take_slot(self) -> SlotId | None:
        """Return a slot, evicting and moving blocks together if need be, or None."""
        while True:
            slot = self.arena.take_slot()
            if slot is not None:
                return slot
            if self.arena.max_slots is None and self.arena.can_compact():
                self._compact()
            elif not self._evict_one(self._queue, self.arena.blocks_per_slab - self.arena.num_free_blocks):
                return None

    def free_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.arena.free_blocks(blocks)
            self.actions.append(DropBlocks(tuple(blocks)))

    def free_slot(self, slot: SlotId) -> None:
        self.arena.free_slot(slot)
        self.actions.append(DropSlot(slot))

    # The index's blocks

    def own(self, run: Run, blocks: Sequence[int]) -> None:
        """Record that these, the last blocks of ``run``, belong to it, so that they can be found when they move."""
        self.revision += 1
        self._owners.own(run, blocks)

    def disown(self, blocks: Iterable[int]) -> None:
        self._owners.disown(blocks)

    def owner(self, block: int) -> Run | None:
        """Return the run that a block of the index belongs to."""
        return self._owners.owner(block)

    def _compact(self) -> None:
        moves = self.arena.compact()
        self.actions += [MoveBlock(src, dst) for src, dst in moves]
        self._owners.move(moves, self._leases())

    # Users and readers

    def pin_run(self, run: Run) -> None:
        """Add a user to the run and all above it."""
        node: Run | None = run
        while node is not None:
            node.num_users += 1
            if node.num_users == 1:
                self.num_evictable_blocks -= len(node.blocks)
            node = node.parent

    def unpin_run(self, run: Run) -> None:
        """Take a user from the run and all above it; offer what nobody uses for eviction."""
        node: Run | None = run
        while node is not None:
            node.num_users -= 1
            if node.num_users == 0:
                self.num_evictable_blocks += len(node.blocks)
                if not node.children:
                    self.offer(node)
            node = node.parent

    def join_run(self, run: Run) -> None:
        """Add a user to the run alone: one that uses all above it already."""
        run.num_users += 1
        if run.num_users == 1:
            self.num_evictable_blocks -= len(run.blocks)

    def quit_run(self, run: Run) -> None:
        """Take a user from the run alone."""
        run.num_users -= 1
        if run.num_users == 0:
            self.num_evictable_blocks += len(run.blocks)
            self.offer(run)

    def pin_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.num_readers += 1
        if snapshot.num_readers == 1:
            self.num_evictable_slots -= 1

    def unpin_snapshot(self, snapshot: Snapshot) -> None:
        """Take a reader away; a snapshot that the index has lost meanwhile is freed with its last reader."""
        snapshot.num_readers -= 1
        if snapshot.num_readers:
            return
        if snapshot.is_attached:
            self.num_evictable_slots += 1
            self.offer(snapshot)
        else:
            self.free_slot(snapshot.slot)

    def add_waiter(self, snapshot: Snapshot) -> None:
        """Count a waiting request that will resume from the snapshot."""
        snapshot.num_waiters += 1

    def forget_waiter(self, snapshot: Snapshot) -> None:
        """Take a waiting request away from the snapshot, or from where it would resume now that it is evicted."""
        here = standing(snapshot)
        if here is not None:
            here.num_waiters -= 1
            self.offer(here)
            if (run := _run_that_holds(here)) is not None:
                self.offer(run)

    def offer(self, entry: Entry) -> None:
        """Put an entry in the eviction queue if it may be evicted now."""
        if _can_evict(entry):
            self._queue_of(entry).push(entry)

    def enter_snapshot(self, snapshot: Snapshot) -> None:
        """Take note of a new snapshot of the index.

        Offers again what it has made worth less: the snapshot above it, and the next below it in its run.
        """
        self.revision += 1
        if snapshot.num_readers == 0:
            self.num_evictable_slots += 1
            self.offer(snapshot)
        above = snapshot_above(snapshot)
        if above is not None:
            self.offer(above)
        positions = snapshot.home.positions
        place = bisect_right(positions, snapshot.position)
        if snapshot.stub_key is None and place < len(positions):
            self.offer(snapshot.home.snapshots[positions[place]])

    # Evicting

    def has_lost(self, entry: Entry) -> bool:
        """Return whether an entry could be evicted but is not in the queue: it never would be."""
        return _can_evict(entry) and entry not in self._queue_of(entry)

    def _queue_of(self, entry: Entry) -> EvictionQueue:
        return self._queue if isinstance(entry, Snapshot) else self._block_queue

    def _evict_one(self, queue: EvictionQueue, num_blocks: int) -> bool:
        """Evict the entry of least worth; of a run, ``num_blocks`` or a few more blocks that are worth the same."""
        entry = queue.pop()
        if entry is None:
            return False
        if isinstance(entry, Snapshot):
            self.drop_snapshot(entry)
        else:
            self._trim(entry, num_blocks)
        return True

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from the index; its slot is freed now, or by its last reader.

        Requests that would have resumed there resume at the one above from now on.
        """
        above = snapshot_above(snapshot)
        if above is not None:
            above.replace(snapshot)
        take_snapshot_away(snapshot)
        self.revision += 1
        self.num_snapshots_evicted += 1
        if (bare := _run_that_holds(snapshot)) is not None:
            self.offer(bare)
        if snapshot.num_readers == 0:
            self.num_evictable_slots -= 1
            self.free_slot(snapshot.slot)

    def _trim(self, run: Run, num_blocks: int) -> None:
        """Evict the last block of a childless, unused run, and the snapshots that cannot be resumed without it.

        When no snapshot needs that block, up to ``num_blocks`` go, or as many as make a slot: those that no snapshot
        needs.
        """
        for position in run.positions[bisect_right(run.positions, (run.end_block - 1) * BLOCK_TOKENS) :]:
            self.drop_snapshot(run.snapshots[position])
        num_gone = max(1, min(max(num_blocks, self._stretch_blocks), run.end_block - first_bare_block(run)))
        self.num_blocks_evicted += num_gone
        if num_gone == len(run.blocks):
            self._cut_off(run, num_gone - 1)
            self.remove_run(run)
        else:
            self._cut_off(run, num_gone)
            self.offer(run)

    def _cut_off(self, run: Run, num_blocks: int) -> None:
        """Take the last blocks of a run, not all, out of the index."""
        if not num_blocks:
            return
        kept = len(run.blocks) - num_blocks
        gone = run.blocks[kept:]
        key = bytes(run.tokens[kept * BLOCK_KEY_BYTES : (kept + 1) * BLOCK_KEY_BYTES])
        del run.blocks[kept:]
        del run.tokens[kept * BLOCK_KEY_BYTES :]
        ghost_tokens = num_blocks * BLOCK_TOKENS + max(run.evicted.values(), default=0)
        run.evicted.clear()
        run.evicted[hash(key)] = ghost_tokens
        self._let_go(gone[::-1])

    def remove_run(self, run: Run) -> None:
        """Take a childless run of one block out of the index; stubs that only it could serve go with it."""
        parent, key = run.parent, run.first_key
        remove_child(run, ghost_tokens=BLOCK_TOKENS)
        self._let_go(run.blocks[:])
        if parent is None:
            return
        for stub_key in [k for k in parent.stubs if key.startswith(k)]:
            if child_with_prefix(parent, stub_key) is None:
                self.drop_snapshot(parent.stubs[stub_key])
        self.offer(parent)
        if parent.positions:
            self.offer(parent.snapshots[parent.positions[-1]])

    def _let_go(self, blocks: "array[int]") -> None:
        self.revision += 1
        self.disown(blocks)
        self.num_evictable_blocks -= len(blocks)
        self.free_blocks(blocks)


def standing(snapshot: Snapshot | None) -> Snapshot | None:
    """Return a snapshot, or where those who wait for it would resume now that it is evicted."""
    while snapshot is not None and not snapshot.is_attached:
        snapshot = snapshot.replacement
    return snapshot


def _run_that_holds(snapshot: Snapshot) -> Run | None:
    """Return the run of the last block that a snapshot needs; of several that begin alike, one."""
    home, key = snapshot.home, snapshot.stub_key
    return home if key is None else child_with_prefix(home, key)


def _can_evict(entry: Entry) -> bool:
    if isinstance(entry, Snapshot):
        return entry.is_attached and entry.num_readers == 0
    return entry.parent is not None and not entry.children and entry.num_users == 0 and not entry.is_live
