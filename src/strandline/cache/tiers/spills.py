"""Spills: moves of snapshots from a tier to the persistent one below it, made before the upper one is full.

A spill begins while memory is left, with the snapshot of least worth, and frees its memory when it has ended. Until
then its source is pinned in the upper tier and on the device, which may have blocks that the first tier lacks: the
lower tier needs all of them. What the lower tier has already is not copied again, and what takes longer to load than
to compute is not stored.
"""

from typing import Final

from strandline.cache.holds import Holds
from strandline.cache.tiers.device_entry import DeviceEntry
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.moves import Move, Moves
from strandline.cache.tiers.neighbours import saved_tokens
from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.cache.tiers.tier_sources import SpilledCopy
from strandline.cache.tiers.tier_target import new_target
from strandline.ids import RequestId
from strandline.records.actions import StoreOut

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


class Spills:
    """The spills between two tiers.

    Args:
        upper: loses what is worth least.
        lower: the persistent tier below it.
    """

    def __init__(self, upper: LowerTier, lower: LowerTier, moves: Moves, holds: Holds) -> None:
        self._upper = upper
        self.lower = lower
        self._moves = moves
        self._holds = holds
        self.is_final = False
        """Whether the process ends soon."""

    def __len__(self) -> int:
        """Count the spills under way."""
        return len(self.lower.arriving)

    def begin(self) -> None:
        """Begin up to ``MAX_BEGUN`` spills if the tier above is short of memory."""
        upper = self._upper
        for _ in range(MAX_BEGUN):
            is_short = upper.num_blocks - upper.num_used + upper.num_leaving < upper.num_spare_blocks
            if not is_short or len(self) >= MAX_SPILLS or (leaving := upper.pop()) is None:
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
        tree, leaving = self.lower.tree, entry.copy
        snapshot = leaving.snapshot = tree.attach(leaving.snapshot)
        tree.pin(snapshot)
        self._move(leaving, entry)
        tree.unpin(snapshot)

    def _move(self, leaving: Copy, entry: DeviceEntry | None) -> None:
        """Begin to store a snapshot from the upper tier or from the device, if that pays; else remove it from the tier.

        Args:
            entry: it on the device; None: the upper tier has it.
        """
        known = leaving.snapshot.copies[self.lower.column.index]
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
        lower = self.lower
        num_blocks = lower.blocks_of(snapshot) + snapshot.num_blocks
        return lower.costs.pays(num_blocks * lower.block_bytes, snapshot.position)

    def _refuse(self, leaving: Copy) -> None:
        self.lower.num_snapshots_refused += 1
        if leaving.column is not None:
            self._upper.evict(leaving)

    def _make_room(self, leaving: Copy) -> range | None:
        """Evict what is worth less than a snapshot and the blocks that it needs.

        Returns:
            The indices of the blocks that the persistent tier lacks; None: the snapshot is worth too little.
        """
        lower = self.lower
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
        return range(self.lower.column.last_on_path(snapshot.end).depth, snapshot.num_blocks)

    def _begin(self, leaving: Copy, entry: DeviceEntry | None, missing: range) -> None:
        """Put a snapshot and blocks into the persistent tier, and begin to copy them there."""
        lower, snapshot, moves = self.lower, leaving.snapshot, self._moves
        saved = saved_tokens(lower.column, snapshot)
        flags = leaving.is_shared, leaving.is_superseded, leaving.is_interior
        arriving = Copy(snapshot, leaving.kind, leaving.use, saved, *flags)
        target = new_target(lower, arriving, missing)
        transfer = moves.next_transfer()
        if entry is None:
            name = RequestId(f"spill {transfer}")
            source = SpilledCopy(self._upper, leaving, target.path, self._holds, name)
            sources = source.sources
        else:
            source, sources = None, entry.sources(target.path)
        moves.begin(Move(source, target), transfer)
        moves.issue(StoreOut(transfer, lower.store, *sources, target.path, is_final=self.is_final))
