"""Loads from a tier: pin what a load reads in the tier, and free or retain it when the load ends.

A persistent tier retains what is loaded. In the other kind, memory is *exchanged*: an address is freed as soon as the
load that reads it has been issued, and the store reads it before it writes anything else there. So what the device
evicts for the load takes the place of what is loaded, and neither memory evicts more. For that, a load is split into
pieces (``loads.py``): each frees its addresses before the device evicts for the next one.

Until the load has ended, its blocks are *returning*: neither in the tier nor on the device. Other demoted snapshots may
need them, and cannot be loaded or spilled in the meantime. If the load fails, they are evicted.
"""

from collections.abc import Iterable, Sequence

from strandline.cache.lease import Lease
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.part import NO_ADDRESS
from strandline.cache.tiers.tier_tree import Copy, PathBlocks, PathEnd, TierSnapshot, pieces
from strandline.cache.tree import Snapshot
from strandline.ids import BLOCK_TOKENS
from strandline.records.actions import Completion


class TierLoad:
    """A load from a tier: pins what it is going to read, and what resuming from it needs.

    Args:
        addresses: those that it is going to read.
    """

    def __init__(self, tier: LowerTier, lease: Lease, addresses: Iterable[int]) -> None:
        self._tier = tier
        self._lease = lease
        self._addresses = tuple(addresses)
        self._tree = tier.tree.name(lease.salt)
        self._num_blocks = len(lease.tokens) // BLOCK_TOKENS
        self._keeper = self._find_keeper()
        """The snapshot that needs what is loaded, and so keeps it in the tier."""
        self._pinned: TierSnapshot | None = None
        """What stays in the tree until the load has ended."""
        self._index_at: dict[int, int] = {}
        """By address that an exchange reads: the index of a whole block in the path."""
        self._returning = PathBlocks(self._tree, lease.tokens.data, [])
        """Those blocks that have left the tier."""
        if self._keeper is not None:
            self._keeper.num_loads += 1
            self._pinned = self._pin(self._keeper.snapshot)
        if not self.is_exchange:
            tier.begin_reading(self._addresses)
        elif (end := self._end()) is not None:
            wanted = set(self._addresses)
            addresses = tier.column.addresses(end)
            self._index_at = {address: index for index, address in enumerate(addresses) if address in wanted}
            tier.returning.append(self._returning)

    @property
    def is_exchange(self) -> bool:
        """Whether what is loaded makes room for what the device evicts."""
        return not self._tier.is_persistent

    def _end(self) -> PathEnd | None:
        """Return the end of the whole blocks of what is loaded; None: no tier has it."""
        return self._tier.tree.find(self._tree, self._lease.tokens.data, self._num_blocks)

    def _find_keeper(self) -> Copy | None:
        if self._tier.has_snapshots:
            return self._tier.copy_of(self._tree, self._lease.tokens.data, len(self._lease.tokens))
        end = self._end()
        return None if end is None else next(self._tier.column.below(*end), None)

    def _pin(self, snapshot: TierSnapshot) -> TierSnapshot:
        """Pin what is loaded in the tree: a snapshot or, without snapshots, the end of a block before it."""
        if not self._tier.has_snapshots:
            end = TierSnapshot(self._num_blocks * BLOCK_TOKENS, b"")
            snapshot = self._tier.tree.attach(end, snapshot.tree, self._lease.tokens.data)
        snapshot.num_pins += 1
        return snapshot

    def exchange(self, addresses: Iterable[int]) -> None:
        """Free addresses that an issued transfer reads, unless the tier is persistent."""
        if not self.is_exchange:
            return
        tier, keeper, freed = self._tier, self._keeper, dict[int, int]()
        located = tier.tree.locate(self._returning._replace(indices=list(self._index_at.values())))
        for address in addresses:
            if address in self._index_at:
                index = self._index_at[address]
                run, own = located[index]
                tier.column.part(run).addresses[own], freed[address] = NO_ADDRESS, 1
                self._returning.indices.append(index)
            elif keeper is not None and address == keeper.address:
                keeper.address, freed[address] = NO_ADDRESS, tier.snapshot_blocks(keeper.position)
            elif keeper is not None and address == keeper.tail_address:
                keeper.tail_address, freed[address] = NO_ADDRESS, 1
        tier.free(freed)

    def finish_exchange(self) -> None:
        """Remove the loaded snapshot once all transfers are issued, unless the tier is persistent."""
        keeper = self._keeper
        if keeper is None or not self.is_exchange:
            return
        keeper.num_loads -= 1
        if self._tier.has_snapshots:
            self._tier.remove(keeper, is_elsewhere=True)
        else:
            self._tier.push(keeper)

    def end(self, snapshot: Snapshot | None, completion: Completion, num_blocks: int) -> None:
        """End the load: free what it has brought to the device, unless the tier is persistent, or what it has lost.

        Args:
            snapshot: the one that now is on the device; None without snapshots, or if the load failed.
            completion: the common end of all its transfers.
            num_blocks: how many blocks were to be loaded.
        """
        tier, keeper = self._tier, self._keeper
        tier.count_load(num_blocks + tier.snapshot_blocks(len(self._lease.tokens)), completion)
        if snapshot is not None and keeper is not None:
            snapshot.use, snapshot.is_shared = keeper.use, keeper.is_shared
            snapshot.is_superseded = keeper.is_superseded
        if self.is_exchange:
            self._end_exchange(is_done=completion.is_done)
        else:
            tier.end_reading(self._addresses)
            self._forget_lost(completion.lost)
            if keeper is not None:
                keeper.num_loads -= 1
                keeper.use = keeper.use.next(tier.now) if completion.is_done else keeper.use
                tier.push(keeper)
        if self._pinned is not None:
            self._pinned.num_pins -= 1
            tier.tree.detach(self._pinned)

    def _end_exchange(self, *, is_done: bool) -> None:
        tier, keeper = self._tier, self._keeper
        tier.returning = [path for path in tier.returning if path is not self._returning]
        if is_done:
            self._forget_returned()
            return
        for index, block in tier.tree.locate(self._returning).items():
            if tier.is_lacking(*block):
                tier.cut_off(block[0], index + 1)
        if keeper is not None and tier.has_snapshots:
            tier.pass_savings(keeper)

    def _forget_lost(self, lost: Sequence[int]) -> None:
        """Evict the snapshots that need addresses which could not be read."""
        end, tier, addresses = self._end(), self._tier, set(lost)
        if end is None or not lost:
            return
        gone = [index for index, address in enumerate(tier.column.addresses(end)) if address in addresses]
        for copy in list(tier.column.copies_after(end.run, end.depth)):
            if not addresses.isdisjoint((copy.address, copy.tail_address)):
                tier.evict(copy)
        for index, block in tier.tree.locate(self._returning._replace(indices=gone)).items():
            if tier.is_needed(*block):
                tier.cut_off(block[0], index + 1)

    def _forget_returned(self) -> None:
        """Free the blocks that the device has again; without snapshots, also remove the ends before them.

        Nothing is done if the last block has left the tier: blocks before it are there for other snapshots.
        """
        tier, end, freed = self._tier, self._end(), dict[int, int]()
        if end is None or tier.column.last_on_path(end) != end:
            return
        for run, start, stop in pieces(end)[::-1]:
            addresses = tier.column.part(run).addresses
            for index in range(stop - 1, start - 1, -1):
                freed[addresses[index]], addresses[index] = 1, NO_ADDRESS
        tier.free(freed)
        if not tier.has_snapshots:
            for copy in list(tier.column.copies_on(end, self._lease.tokens.data)):
                if copy.num_loads == 0:
                    tier.remove(copy, is_elsewhere=True)
