"""Spills: copies of snapshots from a tier to the persistent one below it, made before the upper one is full.

A spill begins while memory is left, with the snapshot of least worth, and frees its memory when it has ended. Until
then its source is pinned in the upper tier and on the device, which may have blocks that the first tier lacks: the
lower tier needs all of them. What the lower tier has already is not copied again, and what takes longer to load than
to compute is not stored.

Invariants: nothing can be loaded before it has been written; a spill that fails leaves nothing in the tier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from strandline.cache.holds import Holds
from strandline.cache.lease import Lease
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.tier_lookups import position_above
from strandline.cache.tiers.tier_tree import NO_ADDRESS, TierBlock, TierSnapshot, descend, find_block, nodes_from
from strandline.ids import BLOCK_TOKENS, BlockId, RequestId, SlotId, TransferId
from strandline.records.actions import Action, Completion, StoredBlocks, StoredPath, StoreOut

SPARE_SHARE: Final = 16
"""One in this many blocks of host memory is left free."""
SPARE_SLABS: Final = 6
"""The least that is left free, in slabs, up to half of a small memory: one prompt evicts several snapshots between two
steps, and those for which there is no memory are dropped."""
MAX_SPILLS: Final = 32
"""Most spills at once."""
MAX_TOGETHER: Final = 8
"""Where attention has windows, most blocks that are stored together: they are not needed equally long."""
MAX_BEGUN: Final = 2
"""Most snapshots that are spilled or dropped between two steps: each takes time in proportion to its path."""


def spare_blocks(num_blocks: int, blocks_per_slab: int) -> int:
    """Return how many blocks of host memory to leave free."""
    least = min(SPARE_SLABS * blocks_per_slab, num_blocks // 2)
    return max(num_blocks // SPARE_SHARE, least)


class DeviceEntry(NamedTuple):
    """A snapshot of the device or, without states, the end of a path, with what it needs."""

    demoted: TierSnapshot
    """Its entry in a tier, with the salt instead of the name of its tree."""
    data: bytes
    """The tokens before it, encoded."""
    blocks: tuple[BlockId, ...]
    """The whole blocks before it, with null blocks for gaps that it does not need."""
    slot: SlotId
    tail: BlockId
    """The block that contains its position, or the null block."""


@dataclass(frozen=True, slots=True)
class _Spill:
    """A spill under way."""

    leaving: TierSnapshot | None
    """The entry in the tier above; None: it stays on the device."""
    read: tuple[int, ...]
    """Addresses in the tier above."""
    num_leaving: int
    """Blocks of that tier's memory that its end frees."""
    arriving: TierSnapshot
    nodes: tuple[TierBlock, ...]
    """Blocks that arrive with it."""
    path: StoredPath
    hold: Lease | None
    """Keeps the blocks that are on the device."""


class OnTheirWay(NamedTuple):
    """Entries of the persistent tier that are being written."""

    num_blocks: int
    """The memory that they take."""
    blocks: set[TierBlock]
    snapshots: set[TierSnapshot]


NOTHING_ON_ITS_WAY: Final = OnTheirWay(0, set(), set())


class Spills:
    """The spills between two tiers.

    Args:
        upper: loses what is worth least.
        lower: the persistent tier below it.
        issue: takes actions.
        next_transfer: numbers transfers.
    """

    def __init__(
        self,
        upper: LowerTier,
        lower: LowerTier,
        issue: Callable[[Action], None],
        holds: Holds,
        next_transfer: Callable[[], TransferId],
    ) -> None:
        self._upper = upper
        self._lower = lower
        self._issue = issue
        self._holds = holds
        self._next_transfer = next_transfer
        self._spills: dict[TransferId, _Spill] = {}
        self._num_leaving = 0
        self.is_final = False
        """Whether the process ends soon."""
        self.num_failed = 0
        self.failure = ""
        """Why the last one failed."""

    def __len__(self) -> int:
        return len(self._spills)

    def on_their_way(self) -> OnTheirWay:
        """Return the entries that are being written."""
        sizes, blocks, snapshots = dict[int, int](), set[TierBlock](), set[TierSnapshot]()
        for spill in self._spills.values():
            sizes |= self._sizes(spill.path)
            blocks.update(spill.nodes)
            snapshots.add(spill.arriving)
        return OnTheirWay(sum(sizes.values()), blocks, snapshots)

    def begin(self) -> None:
        """Begin up to ``MAX_BEGUN`` spills if the tier above is short of memory."""
        upper = self._upper
        for _ in range(MAX_BEGUN):
            is_short = upper.num_blocks - upper.num_used + self._num_leaving < upper.num_spare_blocks
            if not is_short or len(self._spills) >= MAX_SPILLS or (leaving := upper.pop()) is None:
                return
            self.spill(leaving)

    def spill(self, leaving: TierSnapshot) -> None:
        """Begin to spill a snapshot, or drop it if the tier has it, it is worth too little or it would not be loaded.

        While a load brings blocks that it needs to the device, or they are being written to the upper tier, it stays.
        """
        if not self._upper.is_whole(leaving):
            self._upper.push(leaving)
            return
        if not self._pays(leaving):
            self._refuse(leaving)
            return
        data, tree = leaving.path(), self._lower.tree_below(self._upper, leaving.salt)
        if self._is_known(leaving, tree, data):
            self._upper.remove(leaving, is_elsewhere=True)
        elif (missing := self._make_room(leaving, tree, data)) is None:
            self._refuse(leaving)
        else:
            self._begin(leaving, tree, data, missing)

    def save(self, entry: DeviceEntry) -> None:
        """Begin to store an entry of the device, unless the tier has it, it is worth too little or too slow to load.

        The caller pins the entry until the transfer has ended.
        """
        lower, demoted, data = self._lower, entry.demoted, entry.data
        tree = lower.tree_name(demoted.salt)
        if not self._pays(demoted) or self._is_known(demoted, tree, data):
            return
        missing = self._make_room(demoted, tree, data)
        if missing is None:
            lower.num_snapshots_refused += 1
            return
        transfer = self._next_transfer()
        arriving, nodes, path = self._enter(demoted, tree, data, missing)
        blocks = [
            *((entry.blocks[index], address) for index, address in path.addresses.items()),
            (entry.tail, path.tail),
        ]
        slots = ((entry.slot, path.slot),) if path.slot else ()
        self._spills[transfer] = _Spill(None, (), 0, arriving, nodes, path, None)
        self._issue(
            StoreOut(transfer, lower.store, tuple(x for x in blocks if x[1]), slots, (), path, is_final=self.is_final)
        )

    def _pays(self, leaving: TierSnapshot) -> bool:
        """Return whether loading a snapshot would pay."""
        lower, whole = self._lower, leaving.position // BLOCK_TOKENS
        num_blocks = lower.slot_blocks + whole - lower.first_needed(leaving.position) + leaving.has_tail
        return lower.costs.pays(num_blocks * lower.block_bytes, leaving.position)

    def _is_known(self, leaving: TierSnapshot, tree: str, data: bytes) -> bool:
        """Return whether the persistent tier has a snapshot or is getting it; if so, update its last use."""
        block = find_block(self._lower.roots.get(tree), data, leaving.position // BLOCK_TOKENS)
        known = None if block is None else block.snapshots.get(leaving.key)
        if known is not None:
            known.use = leaving.use
        return known is not None

    def _refuse(self, leaving: TierSnapshot) -> None:
        self._lower.num_snapshots_refused += 1
        self._upper.evict(leaving)

    def _make_room(self, leaving: TierSnapshot, tree: str, data: bytes) -> Sequence[int] | None:
        """Evict what is worth less than a snapshot and the blocks that it needs.

        Returns:
            The indices of the blocks that the persistent tier lacks; None: the snapshot is worth too little.
        """
        lower = self._lower
        while True:
            missing = self._missing(leaving, tree, data)
            num_blocks = lower.slot_blocks + leaving.has_tail + len(missing)
            if lower.num_blocks - lower.num_used >= num_blocks:
                return missing
            # This may evict what had some of the blocks.
            if not lower.make_room(num_blocks, lower.worth(leaving)):
                return None

    def _missing(self, leaving: TierSnapshot, tree: str, data: bytes) -> Sequence[int]:
        """Return which blocks a snapshot needs that the persistent tier neither has nor is getting."""
        lower, whole = self._lower, leaving.position // BLOCK_TOKENS
        first, root = lower.first_needed(leaving.position), lower.roots.get(tree)
        node, depth = (None, 0) if root is None else descend(root, data, whole)
        if node is None or depth <= first or not lower.has_windows:
            return range(max(first, depth), whole)
        known = enumerate(nodes_from(node, depth - first), first)
        return [*(index for index, block in known if not lower.is_needed(block)), *range(depth, whole)]

    def _enter(
        self, leaving: TierSnapshot, tree: str, data: bytes, missing: Sequence[int]
    ) -> tuple[TierSnapshot, tuple[TierBlock, ...], StoredPath]:
        """Put a snapshot into the persistent tier, and allocate memory for it and the blocks that are lacking."""
        lower = self._lower
        above = position_above(lower.roots.get(tree), data, leaving.position)
        arriving = leaving.copy(tree, leaving.position - above)
        arriving.num_loads = 1
        lower.enter(arriving, tree, data)
        nodes = _nodes_at(arriving, missing)
        most = MAX_TOGETHER if lower.has_windows else len(missing)
        path = StoredPath(
            tree,
            data,
            _together([(index, lower.take(1)) for index in missing], most),
            lower.has_windows,
            lower.take(lower.slot_blocks) if lower.slot_blocks else NO_ADDRESS,
            lower.take(1) if leaving.has_tail else NO_ADDRESS,
            leaving.kind,
            leaving.use.interarrival_bin,
            leaving.is_shared,
        )
        return arriving, tuple(nodes), path

    def _begin(self, leaving: TierSnapshot, tree: str, data: bytes, missing: Sequence[int]) -> None:
        lower, transfer = self._lower, self._next_transfer()
        arriving, nodes, path = self._enter(leaving, tree, data, missing)
        addresses, sources = path.addresses, _nodes_at(leaving, missing)
        here = [index for index, node in zip(missing, sources, strict=True) if node.address == NO_ADDRESS]
        hold = None
        blocks: tuple[tuple[BlockId, int], ...] = ()
        if here:
            name = RequestId(f"spill {transfer}")
            hold = self._holds.keep_blocks(name, leaving.salt, data, here[-1] + 1)
            blocks = tuple((BlockId(hold.table[index]), addresses[index]) for index in here)
        pairs = [
            (node.address, address) for node, address in zip(sources, addresses.values(), strict=True) if node.address
        ]
        pairs += [(leaving.address, path.slot), (leaving.tail_address, path.tail)]
        stored = tuple(pair for pair in pairs if pair[0] != NO_ADDRESS)
        read = tuple(source for source, _ in stored)
        self._upper.begin_reading(read)
        leaving.num_loads += 1
        num_leaving = self._num_freed_by(leaving)
        self._num_leaving += num_leaving
        self._spills[transfer] = _Spill(leaving, read, num_leaving, arriving, nodes, path, hold)
        self._issue(StoreOut(transfer, lower.store, blocks, (), stored, path, is_final=self.is_final))

    def _num_freed_by(self, leaving: TierSnapshot) -> int:
        """Return how much memory of the tier above a snapshot and the blocks that it alone needs take."""
        num_blocks = self._upper.slot_blocks + leaving.has_tail
        if self._upper.has_windows:
            needed = self._upper.needed_blocks(leaving)
            return num_blocks + sum(node.address != NO_ADDRESS and node.num_needers == 1 for node in needed)
        for node in leaving.block.ancestry() if leaving.block is not None else ():
            num_needed_by = len(node.children) + len(node.snapshots)
            if num_needed_by > 1:
                break
            num_blocks += node.address != NO_ADDRESS
        return num_blocks

    def complete(self, completion: Completion) -> bool:
        """Handle the end of a transfer; False: it is no spill."""
        spill = self._spills.pop(completion.transfer, None)
        if spill is None:
            return False
        upper = self._upper
        self._num_leaving -= spill.num_leaving
        if spill.hold is not None:
            self._holds.drop(spill.hold)
        upper.end_reading(spill.read)
        spill.arriving.num_loads -= 1
        if completion.is_done:
            self._arrive(spill)
        else:
            self.num_failed += 1
            self.failure = completion.cause
            self._fail(spill)
        leaving = spill.leaving
        if leaving is None:
            return True
        leaving.num_loads -= 1
        if leaving.num_loads == 0 and leaving.block is not None:
            if completion.is_done:
                upper.remove(leaving, is_elsewhere=True)
            else:
                upper.evict(leaving)
        return True

    def _arrive(self, spill: _Spill) -> None:
        """Make what has been written loadable; free what is no longer needed."""
        lower, path, arriving = self._lower, spill.path, spill.arriving
        unneeded = dict[int, int]()
        for node, address in zip(spill.nodes, path.addresses.values(), strict=True):
            if node.address != NO_ADDRESS or not lower.is_needed(node):
                unneeded[address] = 1
            else:
                node.address = address
        if arriving.block is None:
            unneeded |= {path.slot: lower.slot_blocks, path.tail: 1}
        else:
            arriving.address, arriving.tail_address = path.slot, path.tail
            lower.push(arriving)
        lower.num_snapshots_demoted += lower.slot_blocks > 0
        lower.num_blocks_demoted += len(spill.nodes)
        lower.free(unneeded)

    def _fail(self, spill: _Spill) -> None:
        """Remove what did not arrive, and what needs it."""
        lower = self._lower
        lower.remove(spill.arriving)
        for node, index in zip(spill.nodes, spill.path.addresses, strict=True):
            if node.address == NO_ADDRESS and lower.is_needed(node):
                lower.cut_off(node, index + 1)
        lower.free(self._sizes(spill.path))

    def _sizes(self, path: StoredPath) -> dict[int, int]:
        sizes = dict.fromkeys(path.addresses.values(), 1) | {path.slot: self._lower.slot_blocks, path.tail: 1}
        sizes.pop(NO_ADDRESS, None)
        return sizes


def _nodes_at(demoted: TierSnapshot, indices: Sequence[int]) -> tuple[TierBlock, ...]:
    """Return the nodes of these whole blocks before a snapshot."""
    first = indices[0] if indices else 0
    nodes = demoted.last_blocks(demoted.position // BLOCK_TOKENS - first) if indices else []
    return tuple(nodes[index - first] for index in indices)


def _together(addresses: Sequence[tuple[int, int]], most: int) -> tuple[StoredBlocks, ...]:
    """Group blocks, each given by its index and its address, into consecutive ones, at most ``most`` together."""
    groups = list[list[tuple[int, int]]]()
    for index, address in addresses:
        if not groups or index != groups[-1][-1][0] + 1 or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append((index, address))
    return tuple(StoredBlocks(group[0][0], tuple(address for _, address in group)) for group in groups)
