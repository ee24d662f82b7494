"""Spills: copies of snapshots from a tier to the persistent one below it, made before the upper one is full.

A spill begins while memory is left, with the snapshot of least worth, and frees its memory when it has ended. Until
then its source is pinned in the upper tier and on the device, which may have blocks that the first tier lacks: the
lower tier needs all of them. What the lower tier has already is not copied again, and what takes longer to load than
to compute is not stored.

Invariants: nothing can be loaded before it has been written; a spill that fails leaves nothing in the tier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from strandline.cache.holds import Holds
from strandline.cache.lease import Lease
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.neighbours import position_above
from strandline.cache.tiers.part import NO_ADDRESS
from strandline.cache.tiers.tier_tree import Copy, PathBlocks, TierRun, TierSnapshot
from strandline.ids import BlockId, RequestId, SlotId, TransferId
from strandline.records.actions import Action, Completion, SnapshotCopy, StoredBlocks, StoredPath, StoreOut

SPARE_SHARE: Final = 16
"""One in this many blocks of host memory is left free."""
SPARE_SNAPSHOTS: Final = 6
"""The least that is left free, in snapshots or slabs, up to half of a small memory: one prompt evicts several snapshots
between two steps, and those for which there is no memory are dropped."""
MAX_SPILLS: Final = 32
"""Most spills at once."""
MAX_BEGUN: Final = 2
"""Most snapshots that are spilled or dropped between two steps: each takes time in proportion to its path."""


def spare_blocks(num_blocks: int, blocks_per_slab: int, snapshot_blocks: int) -> int:
    """Return how many blocks of host memory to leave free."""
    least = min(SPARE_SNAPSHOTS * max(blocks_per_slab, snapshot_blocks), num_blocks // 2)
    return max(num_blocks // SPARE_SHARE, least)


class Sources(NamedTuple):
    """Where a transfer reads, as in ``StoreOut``."""

    blocks: tuple[tuple[BlockId, int], ...]
    slots: tuple[SnapshotCopy, ...]
    stored: tuple[tuple[int, int], ...] = ()
    hold: Lease | None = None
    """Keeps the blocks that are on the device; None: nothing can evict them."""


class DeviceEntry(NamedTuple):
    """A snapshot of the device or, without snapshots, the end of a path, with what it needs."""

    demoted: Copy
    """Its copy for a tier."""
    salt: str
    data: bytes
    """The tokens before it, encoded."""
    blocks: tuple[BlockId, ...]
    """The whole blocks before it."""
    slot: SlotId
    window: tuple[BlockId, ...]
    tail: BlockId
    """The block that contains its position, or the null block."""

    def sources(self, path: StoredPath) -> Sources:
        """Return where it is read."""
        pairs = [
            *((self.blocks[index], address) for index, address in path.addresses.items()),
            (self.tail, path.tail_address),
        ]
        slots = (SnapshotCopy(self.slot, path.address, self.window),) if path.address else ()
        return Sources(tuple(pair for pair in pairs if pair[1] != NO_ADDRESS), slots)


@dataclass(frozen=True, slots=True)
class _Spill:
    """A spill under way."""

    leaving: Copy
    """The copy in the upper tier, or in none: it stays on the device."""
    read: tuple[int, ...]
    """Addresses in the upper tier."""
    num_leaving: int
    """Blocks of that tier's memory that its end frees."""
    arriving: Copy
    path: StoredPath
    hold: Lease | None
    """Keeps the blocks that are on the device."""

    @property
    def blocks(self) -> PathBlocks:
        """The whole blocks that arrive with it."""
        return PathBlocks(self.path.tree, self.path.data, list(self.path.addresses))


class OnTheirWay(NamedTuple):
    """Entries of the persistent tier that are being written."""

    num_blocks: int
    """The memory that they take."""
    blocks: set[tuple[TierRun, int]]
    """The run and the index in the run of each whole block."""
    snapshots: set[Copy]


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
        sizes, blocks, snapshots = dict[int, int](), set[tuple[TierRun, int]](), set[Copy]()
        for spill in self._spills.values():
            sizes |= self._sizes(spill.path)
            blocks.update(self._lower.tree.locate(spill.blocks).values())
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

    def spill(self, leaving: Copy) -> None:
        """Begin to spill a snapshot, or drop it if the tier has it, it is worth too little or it would not be loaded.

        While a load brings blocks that it needs to the device, or they are being written to the upper tier, it stays.
        """
        if self._upper.is_whole(leaving.snapshot):
            self._move(leaving, None)
        else:
            self._upper.push(leaving)

    def save(self, entry: DeviceEntry) -> None:
        """Begin to store an entry of the device, unless the tier has it, it is worth too little or too slow to load.

        The caller pins the entry until the transfer has ended.
        """
        lower, leaving = self._lower, entry.demoted
        tree = lower.tree.open(entry.salt)
        snapshot = leaving.snapshot = lower.tree.attach(leaving.snapshot, tree, entry.data)
        snapshot.num_pins += 1
        self._move(leaving, entry)
        snapshot.num_pins -= 1
        lower.tree.detach(snapshot)

    def _move(self, leaving: Copy, entry: DeviceEntry | None) -> None:
        """Begin to store a snapshot from the upper tier or from the device, if that pays; else remove it from the tier.

        Args:
            entry: it on the device; None: the upper tier has it.
        """
        known = leaving.snapshot.copies[self._lower.column.index]
        if not self._pays(leaving.snapshot):
            self._refuse(leaving)
        elif known is not None:
            known.use = leaving.use
            self._upper.remove(leaving, is_elsewhere=True)
        elif (missing := self._make_room(leaving)) is None:
            self._refuse(leaving)
        else:
            self._begin(leaving, entry, missing)

    def _pays(self, snapshot: TierSnapshot) -> bool:
        """Return whether loading a snapshot would pay."""
        lower = self._lower
        num_blocks = lower.blocks_of(snapshot) + snapshot.num_blocks
        return lower.costs.pays(num_blocks * lower.block_bytes, snapshot.position)

    def _refuse(self, leaving: Copy) -> None:
        self._lower.num_snapshots_refused += 1
        if leaving.column is not None:
            self._upper.evict(leaving)

    def _make_room(self, leaving: Copy) -> range | None:
        """Evict what is worth less than a snapshot and the blocks that it needs.

        Returns:
            The indices of the blocks that the persistent tier lacks; None: the snapshot is worth too little.
        """
        lower = self._lower
        while True:
            missing = self._missing(leaving.snapshot)
            num_blocks = lower.blocks_of(leaving.snapshot) + len(missing)
            if lower.num_blocks - lower.num_used >= num_blocks:
                return missing
            # This may evict what had some of the blocks.
            if not lower.make_room(num_blocks, lower.worth(leaving)):
                return None

    def _missing(self, snapshot: TierSnapshot) -> range:
        """Return which blocks a snapshot needs that the persistent tier neither has nor is getting."""
        if snapshot.end is None:
            return range(0)
        return range(self._lower.column.last_on_path(snapshot.end).depth, snapshot.num_blocks)

    def _begin(self, leaving: Copy, entry: DeviceEntry | None, missing: range) -> None:
        """Put a snapshot and blocks into the persistent tier, and begin to copy them there."""
        lower, upper, snapshot = self._lower, self._upper, leaving.snapshot
        data = snapshot.path()
        above = position_above(lower.column, lower.tree.root(snapshot.tree), data, leaving.position)
        flags = leaving.is_shared, leaving.is_superseded, leaving.is_interior
        arriving = Copy(snapshot, leaving.kind, leaving.use, leaving.position - above, *flags, num_loads=1)
        lower.enter(arriving, snapshot.tree, data)
        transfer, path = self._next_transfer(), self._new_path(leaving, data, missing)
        sources = self._sources(leaving, path, transfer) if entry is None else entry.sources(path)
        read = tuple(source for source, _ in sources.stored)
        upper.begin_reading(read)
        leaving.num_loads += 1
        num_leaving = self._num_freed_by(leaving) if entry is None else 0
        self._num_leaving += num_leaving
        self._spills[transfer] = _Spill(leaving, read, num_leaving, arriving, path, sources.hold)
        blocks, slots, stored, _ = sources
        self._issue(StoreOut(transfer, lower.store, blocks, slots, stored, path, is_final=self.is_final))

    def _new_path(self, leaving: Copy, data: bytes, missing: range) -> StoredPath:
        """Allocate memory for a snapshot and the blocks that are lacking."""
        lower = self._lower
        return StoredPath(
            leaving.snapshot.tree,
            data,
            StoredBlocks(missing.start, tuple([lower.take(1) for _ in missing])) if missing else None,
            lower.take(lower.snapshot_blocks(leaving.position)) if lower.has_snapshots else NO_ADDRESS,
            lower.take(1) if leaving.snapshot.has_tail else NO_ADDRESS,
            leaving.kind,
            leaving.use.interarrival_bin,
            leaving.is_shared,
        )

    def _sources(self, leaving: Copy, path: StoredPath, transfer: TransferId) -> Sources:
        """Return where the upper tier and the device have what arrives; hold what the device has."""
        addresses, end = path.addresses, leaving.snapshot.end
        upper = () if end is None else self._upper.column.addresses(end)
        pairs = [(upper[index], address) for index, address in addresses.items()]
        pairs += [(leaving.address, path.address), (leaving.tail_address, path.tail_address)]
        stored = tuple(pair for pair in pairs if pair[0] != NO_ADDRESS)
        here = [index for index, (source, _) in zip(addresses, pairs, strict=False) if source == NO_ADDRESS]
        if not here:
            return Sources((), (), stored)
        name, salt = RequestId(f"spill {transfer}"), self._lower.tree.salts[path.tree]
        hold = self._holds.keep_blocks(name, salt, path.data, here[-1] + 1)
        return Sources(tuple((BlockId(hold.table[index]), addresses[index]) for index in here), (), stored, hold)

    def _num_freed_by(self, leaving: Copy) -> int:
        """Return how much memory of the tier above a snapshot and the blocks that it alone needs take."""
        upper, snapshot, column = self._upper, leaving.snapshot, self._upper.column
        num_blocks = upper.blocks_of(snapshot)
        for run, start, end in column.blocks_for(leaving):
            addresses = column.part(run).addresses[start:end]
            num_blocks += len(addresses) - addresses.count(NO_ADDRESS)
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
        leaving.num_loads -= 1
        if leaving.num_loads == 0 and leaving.column is not None:
            if completion.is_done:
                upper.remove(leaving, is_elsewhere=True)
            else:
                upper.evict(leaving)
        return True

    def _arrive(self, spill: _Spill) -> None:
        """Make what has been written loadable; free what is no longer needed."""
        lower, path, arriving = self._lower, spill.path, spill.arriving
        unneeded, located = dict[int, int](), lower.tree.locate(spill.blocks)
        for index, address in path.addresses.items():
            if index in located and lower.is_lacking(*located[index]):
                run, own = located[index]
                lower.column.part(run).addresses[own] = address
            else:
                unneeded[address] = 1
        if arriving.column is None:
            unneeded |= {path.address: lower.snapshot_blocks(arriving.position), path.tail_address: 1}
        else:
            arriving.address, arriving.tail_address = path.address, path.tail_address
            lower.push(arriving)
        lower.num_snapshots_demoted += lower.has_snapshots
        lower.num_blocks_demoted += len(path.addresses)
        lower.num_blocks_written += len(path.addresses) + lower.blocks_of(arriving.snapshot)
        lower.free(unneeded)

    def _fail(self, spill: _Spill) -> None:
        """Remove what did not arrive, and what needs it, unless another spill brings the same."""
        lower, still_coming = self._lower, self.on_their_way().blocks
        lower.remove(spill.arriving)
        for index, block in lower.tree.locate(spill.blocks).items():
            if lower.is_lacking(*block) and block not in still_coming:
                lower.cut_off(block[0], index + 1)
        lower.free(self._sizes(spill.path))

    def _sizes(self, path: StoredPath) -> dict[int, int]:
        num_blocks = self._lower.snapshot_blocks(path.position)
        sizes = dict.fromkeys(path.addresses.values(), 1) | {path.address: num_blocks, path.tail_address: 1}
        sizes.pop(NO_ADDRESS, None)
        return sizes
