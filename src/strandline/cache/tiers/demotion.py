"""Demotion: the moves of what the device evicts to the first tier.

A snapshot and the blocks on its path leave the device at different times: the snapshot is demoted first, and the tier
*needs* the blocks from then on, which are demoted when the device evicts them.
"""

from strandline.cache.tiers.device_entry import device_copy, device_entry
from strandline.cache.tiers.lower_tier import ANY_WORTH, LowerTier
from strandline.cache.tiers.moves import Moves
from strandline.cache.tiers.neighbours import saved_tokens
from strandline.cache.tiers.tier_target import new_target
from strandline.cache.tiers.tier_tree import Block, pieces
from strandline.cache.tree import Run, Snapshot, path_to
from strandline.ids import BlockId
from strandline.records.actions import StoreOut
from strandline.records.tokens import BLOCK_KEY_BYTES


class Demotion:
    """Stores what the device evicts in a tier. Implements ``FirstTier``."""

    def __init__(self, tier: LowerTier, moves: Moves) -> None:
        self._tier = tier
        self._moves = moves

    def demote_snapshot(self, snapshot: Snapshot) -> None:
        """Store a snapshot that the device evicts, if it is worth more than what would be evicted for it."""
        tier, entry = self._tier, device_entry(snapshot)
        demoted, data, position = entry.copy, entry.data, snapshot.position
        tree = tier.tree.open(entry.salt)
        known = tier.copy_of(tree, data, position)
        if known is not None:
            known.use, known.is_shared = demoted.use, demoted.is_shared
            tier.push(known)
            return
        demoted.saved_tokens = saved_tokens(tier.column, tree, data, position, at_most=demoted.saved_tokens)
        if not tier.make_room(tier.blocks_of(demoted.snapshot), tier.worth(demoted)):
            tier.num_snapshots_refused += 1
            return
        target = new_target(tier, demoted, tree, data, range(0))
        target.arrive()
        tier.num_snapshots_demoted += 1
        self._moves.issue(StoreOut(self._moves.next_transfer(), tier.store, *entry.sources(target.path)))

    def demote_blocks(self, run: Run, kept: int) -> None:
        """Store the whole blocks of a childless run from ``kept`` on, as far as demoted snapshots need them.

        Without snapshots all are needed: the end of the blocks counts as a snapshot without memory.
        """
        if run.is_tail:
            return
        tier, blocks, first = self._tier, run.blocks[kept:], run.start_block + kept
        salt, data = path_to(run)
        tree = tier.tree.open(salt)
        if not tier.has_snapshots and blocks:
            last = tier.tree.find(tree, data, first + len(blocks))
            if last is None or tier.column.last_on_path(last) != last:
                tier.enter(device_copy(run, kept=kept), tree, data)
        missing = self._missing(tree, data, first)
        if not missing:
            return
        num_evicted = tier.num_snapshots_evicted
        tier.make_room(len(missing), ANY_WORTH)
        if tier.num_snapshots_evicted > num_evicted:
            # Some may not be needed any more.
            missing = self._missing(tree, data, first)
        num_free = tier.num_blocks - tier.num_used
        for index, (where, _) in missing[num_free:]:
            tier.cut_off(where, index + 1)
        pairs = []
        for index, (where, own) in missing[:num_free]:
            if tier.is_needed(where, own):
                address = tier.column.addresses_in(where)[own] = tier.take(1)
                pairs.append((BlockId(blocks[index - first]), address))
        tier.num_blocks_demoted += len(pairs)
        if pairs:
            self._moves.issue(StoreOut(self._moves.next_transfer(), tier.store, tuple(pairs), ()))

    def _missing(self, tree: str, data: bytes, first: int) -> list[tuple[int, Block]]:
        """Return the blocks of a path from ``first`` on that are needed and not in the tier, with their indices."""
        end = self._tier.tree.walk(tree, data, len(data) // BLOCK_KEY_BYTES)
        return [
            (run.start_block + own, (run, own))
            for run, start, stop in (pieces(end, first) if end is not None else ())
            for own in range(start, stop)
            if self._tier.is_lacking(run, own)
        ]
