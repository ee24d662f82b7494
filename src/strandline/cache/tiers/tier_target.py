"""The target of a move in a tier."""

from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.path_blocks import PathBlocks
from strandline.cache.tiers.stored import Copy
from strandline.ids import NO_ADDRESS
from strandline.records.actions import Completion, StoredBlocks, StoredPath


class TierTarget:
    """A copy of a snapshot that has entered a tier, with memory for it and for the blocks before it that are lacking.

    It cannot be loaded or evicted before it has arrived.

    Args:
        path: what arrives, and its addresses.
    """

    def __init__(self, tier: LowerTier, copy: Copy, path: StoredPath) -> None:
        self.tier = tier
        self.copy = copy
        self.path = path
        tier.enter(copy)
        copy.num_moves += 1
        self.pinned = copy.snapshot
        tier.tree.pin(self.pinned)
        self.blocks = PathBlocks(self.pinned, list(path.addresses))
        """The whole blocks that arrive."""
        tier.arriving.append(self.blocks)

    @property
    def sizes(self) -> dict[int, int]:
        """The sizes of its addresses, in blocks."""
        path = self.path
        sizes = dict.fromkeys(path.addresses.values(), 1)
        sizes |= {path.address: self.tier.snapshot_blocks(self.copy.position), path.tail_address: 1}
        sizes.pop(NO_ADDRESS, None)
        return sizes

    def end(self, completion: Completion) -> None:
        tier = self.tier
        tier.max_free_bytes = completion.max_free_bytes
        if completion.is_done:
            self.arrive()
            tier.num_snapshots_demoted += tier.has_snapshots
            tier.num_blocks_demoted += len(self.path.addresses)
            tier.num_blocks_written += len(self.path.addresses) + tier.blocks_of(self.copy.snapshot)
        else:
            self._fail()
            tier.num_failed_stores += 1
            tier.failure = completion.cause

    def arrive(self) -> None:
        """Let what has arrived be loaded; free what is no longer needed."""
        tier, copy, path, unneeded = self.tier, self.copy, self.path, dict[int, int]()
        located = self.blocks.locate()
        self._let_go()
        for index, address in path.addresses.items():
            run, own = located[index]
            if tier.is_lacking(run, own):
                tier.column.addresses_in(run)[own] = address
            else:
                unneeded[address] = 1
        if copy.column is None:
            unneeded |= {path.address: tier.snapshot_blocks(copy.position), path.tail_address: 1}
        else:
            copy.address, copy.tail_address = path.address, path.tail_address
            tier.push(copy)
        tier.free(unneeded)
        tier.tree.unpin(self.pinned)

    def _fail(self) -> None:
        """Remove what did not arrive, and what needs it, unless another move brings the same."""
        tier = self.tier
        self._let_go()
        tier.remove(self.copy)
        tier.cut_off_lost(self.blocks)
        tier.free(self.sizes)
        tier.tree.unpin(self.pinned)

    def _let_go(self) -> None:
        self.copy.num_moves -= 1
        self.tier.arriving = [blocks for blocks in self.tier.arriving if blocks is not self.blocks]


def new_target(tier: LowerTier, copy: Copy, missing: range) -> TierTarget:
    """Return the target of a move to a tier, in memory that the tier has; only persistent ones record tokens.

    Args:
        copy: one that is not in the tier.
        missing: the indices of the blocks that arrive with it.
    """
    path = StoredPath(
        tier.tree.name_of(copy.snapshot.home),
        copy.snapshot.path() if tier.is_persistent else b"",
        StoredBlocks(missing.start, tuple([tier.take(1) for _ in missing])) if missing else None,
        tier.take(tier.snapshot_blocks(copy.position)) if tier.has_snapshots else NO_ADDRESS,
        tier.take(1) if copy.snapshot.has_tail else NO_ADDRESS,
        copy.kind,
        copy.use.interarrival_bin,
        copy.is_shared,
    )
    return TierTarget(tier, copy, path)
