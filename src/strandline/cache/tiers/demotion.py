"""Demotion: the moves of what the device evicts to the first tier.

A snapshot and the blocks on its path leave the device at different times: the snapshot is demoted first, and the tier
*needs* the blocks from then on, which are demoted when the device evicts them.
"""

from strandline.cache.tiers.device_entry import device_copy, device_entry
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.moves import Moves
from strandline.cache.tiers.neighbours import saved_tokens
from strandline.cache.tiers.tier_target import new_target
from strandline.cache.tree import Run, Snapshot
from strandline.ids import BlockId
from strandline.records.actions import StoreOut


class Demotion:
    """Stores what the device evicts in a tier. Implements ``FirstTier``."""

    def __init__(self, tier: LowerTier, moves: Moves) -> None:
        self._tier = tier
        self._moves = moves

    def demote_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot that the device evicts, if it is worth more than what would be evicted for it."""
        tier, entry = self._tier, device_entry(snapshot)
        demoted = entry.copy
        known = tier.column.copy(snapshot.home, snapshot.key)
        if known is not None:
            known.use, known.is_shared = demoted.use, demoted.is_shared
            tier.push(known)
            return
        demoted.saved_tokens = saved_tokens(tier.column, demoted.snapshot, at_most=demoted.saved_tokens)
        if not tier.make_room(tier.blocks_of(demoted.snapshot), tier.worth(demoted)):
            tier.num_snapshots_refused += 1
            return
        target = new_target(tier, demoted, range(0))
        target.arrive()
        tier.num_snapshots_demoted += 1
        self._moves.issue(StoreOut(self._moves.next_transfer(), tier.store, *entry.sources(target.path)))

    def demote_blocks(self, run: Run, kept: int) -> None:
        """Store the blocks of a childless run from ``kept`` on, as far as demoted snapshots need them.

        Without snapshots all are needed: the end of the blocks counts as a snapshot without memory.
        """
        if run.is_tail:
            return
        tier = self._tier
        if not tier.has_snapshots and kept < len(run.blocks) and tier.column.num_blocks_in(run) < len(run.blocks):
            tier.enter(device_copy(run, kept=kept))
        if missing := self._missing(run, kept):
            self._store_blocks(run, kept, missing)
        tier.tree.leave_below(run, kept)

    def _store_blocks(self, run: Run, kept: int, missing: list[int]) -> None:
        """Store blocks of a run, given by their indices in it, as far as there is memory."""
        tier = self._tier
        num_evicted = tier.num_snapshots_evicted
        tier.make_room(len(missing), ANY_WORTH)
        if tier.num_snapshots_evicted > num_evicted:
            # Some may not be needed any more.
            missing = self._missing(run, kept)
        num_free = tier.num_blocks - tier.num_used
        for own in missing[num_free:]:
            tier.cut_off(run, run.start_block + own + 1)
        pairs = []
        for own in missing[:num_free]:
            if tier.is_needed(run, own):
                address = tier.column.addresses_in(run)[own] = tier.take(1)
                pairs.append((BlockId(run.blocks[own]), address))
        tier.num_blocks_demoted += len(pairs)
        if pairs:
            self._moves.issue(StoreOut(self._moves.next_transfer(), tier.store, tuple(pairs), ()))

    def _missing(self, run: Run, kept: int) -> list[int]:
        """Return which blocks of a run from ``kept`` on are needed and not in the tier."""
        return [own for own in range(kept, self._tier.column.num_blocks_in(run)) if self._tier.is_lacking(run, own)]
