"""The target of a load: blocks and slots of the device."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from strandline.cache.internals import Internals
from strandline.cache.lease import Cut, Lease
from strandline.cache.tiers.stored import Copy
from strandline.cache.tree import find_home
from strandline.cache.window_blocks import Window, WindowBlocks
from strandline.ids import NULL_SLOT, BlockId
from strandline.records.actions import Completion, MoveBlock, SnapshotCopy, StoreOut
from strandline.records.offer import OfferedSnapshot


class DeviceTarget:
    """A lease without a request, whose blocks and slots transfers fill. All of it is published, or nothing.

    Args:
        positions: of the snapshots that are loaded; without snapshots, the end of what is loaded.
        copy: what the tier that is read knows of the deepest snapshot; None: another store is read.
    """

    def __init__(self, cache: Internals, lease: Lease, positions: tuple[int, ...], copy: Copy | None) -> None:
        self.lease = lease
        self.positions = positions
        self.blocks: array[int] = array("i")
        """The blocks that transfers write."""
        self._cache = cache
        self._copy = copy

    def take_snapshots(self, offered: Sequence[OfferedSnapshot]) -> tuple[SnapshotCopy, ...]:
        """Allocate what snapshots are loaded into."""
        memory, copies = self._cache.memory, list[SnapshotCopy]()
        for each in offered:
            slot = memory.take_promised_slot() if self._cache.states.num_slots else NULL_SLOT
            windows = tuple(self._take_window(size, each.position) for size in memory.windows)
            self.lease.cuts.append(Cut(each.position, slot, each.kind, windows))
            copies.append(SnapshotCopy(slot, each.address, tuple(window.ids for window in windows)))
        return tuple(copies)

    def _take_window(self, size: WindowBlocks, position: int) -> Window:
        """Allocate a window of a snapshot, which ``can_take`` has promised.

        Its blocks are not moved before the end. They get slabs of their own, since in shared ones they would keep
        others from being moved, and so slabs from being emptied that were promised.
        """
        self._cache.memory.empty_slabs(_num_slabs(size, position))
        blocks = size.allocator.take_in_free_slabs(size.num_blocks_before(position))
        size.allocator.hold(blocks)
        return Window(size, size.first_seen(position), blocks)

    def take_blocks(self, addresses: Sequence[int]) -> tuple[tuple[BlockId, int], ...]:
        """Allocate blocks for what is stored at these addresses."""
        memory = self._cache.memory
        blocks = memory.take_promised_blocks(len(addresses))
        memory.allocator.hold(blocks)
        self.blocks += blocks
        return tuple((BlockId(block), address) for block, address in zip(blocks, addresses, strict=True))

    def mark_held(self, first: int) -> None:
        """Mark the stores among the actions from ``first`` on whose sources only this load will write."""
        actions, size = self._cache.memory.actions, self._cache.allocator.blocks_per_slab
        slots = {cut.slot for cut in self.lease.cuts} - {NULL_SLOT}
        blocks = set(self.blocks).union(*(range(slot * size, (slot + 1) * size) for slot in slots))
        for index in range(len(actions) - 1, first - 1, -1):
            action = actions[index]
            if isinstance(action, MoveBlock):
                return
            if isinstance(action, StoreOut) and action.path is None:
                sources: list[int] = [block for block, _ in action.blocks]
                for slot, *_ in action.snapshots:
                    sources += range(slot * size, (slot + 1) * size)
                has_window = any(any(each.windows) for each in action.snapshots)
                if not has_window and blocks.issuperset(sources):
                    actions[index] = replace(action, is_held=True)

    def end(self, completion: Completion) -> None:
        lease, memory, counters = self.lease, self._cache.memory, self._cache.counters.loads
        memory.allocator.let_go(self.blocks)
        for cut in lease.cuts:
            for window in cut.windows or ():
                window.size.allocator.let_go(window.held)
        if completion.is_done:
            counters.num_done += 1
            counters.num_blocks += len(self.blocks)
            lease.computed = lease.folded = len(lease.tokens)
            self._cache.publisher.publish_loaded(lease)
        else:
            counters.num_failed += 1
        for cut in lease.cuts:
            memory.free_cut(cut)
        lease.cuts = []
        del self._cache.leases[lease.request_id]
        lease.is_active = False
        if completion.is_done and self._copy is not None and self._cache.rule.needs_snapshots:
            self._inherit(self._copy)
        memory.take_back(lease)

    def _inherit(self, copy: Copy) -> None:
        """Continue what a tier knows of the use of the snapshot that is loaded."""
        lease = self.lease
        run, key = find_home(lease.run, lease.tokens.data, lease.computed)
        snapshot = run.snapshots.get(key)
        if snapshot is not None:
            snapshot.use, snapshot.is_shared, snapshot.is_superseded = copy.use, copy.is_shared, copy.is_superseded
            self._cache.memory.offer(snapshot)


def num_slabs_for(sizes: Iterable[WindowBlocks], position: int) -> int:
    """Return how many slabs the windows of a snapshot at a position take that is loaded."""
    return sum(_num_slabs(size, position) for size in sizes)


def _num_slabs(size: WindowBlocks, position: int) -> int:
    return -(-size.num_blocks_before(position) // size.allocator.blocks_per_slab)
