"""Sources of moves in a tier: copies that are pinned there until the move has ended.

| source | move | what is read is freed |
| --- | --- | --- |
| ``SpilledCopy`` | to the next tier | when it has arrived |
| ``RetainedCopy`` | from a persistent tier to the device | never |
| ``ExchangedCopy`` | from the first tier to the device | as soon as a transfer that reads it has been issued |

In an exchange the store reads an address before it writes anything else there. So what the device evicts for a load
takes the place of what is loaded, and neither memory evicts more. For that, a load is split into pieces (``loads.py``):
each frees its addresses before the device evicts for the next one. Until the load has ended, its blocks are
*returning*: neither in the tier nor on the device. Other demoted snapshots may need them, and cannot be loaded or
spilled in the meantime. If the load fails, they are evicted.
"""

from collections.abc import Iterable, Sequence

from strandline.cache.holds import Holds
from strandline.cache.lease import Lease
from strandline.cache.tiers.device_entry import Sources
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.path_blocks import PathBlocks
from strandline.cache.tiers.paths import pieces
from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.ids import NO_ADDRESS, BlockId, RequestId
from strandline.records.actions import Completion, StoredPath
from strandline.records.tokens import BLOCK_KEY_BYTES


class SpilledCopy:
    """A copy that leaves its tier for the next one, where blocks may be read that the first tier lacks: on the device.

    Args:
        path: where it and those blocks go that the next tier lacks.
        name: of a hold of those on the device.
    """

    def __init__(self, tier: LowerTier, copy: Copy, path: StoredPath, holds: Holds, name: RequestId) -> None:
        self._tier = tier
        self.copy = copy
        self._holds = holds
        addresses, own = path.addresses, tier.column.addresses(copy.snapshot.end)
        pairs = [(own[index], address) for index, address in addresses.items()]
        pairs += [(copy.address, path.address), (copy.tail_address, path.tail_address)]
        stored = tuple(pair for pair in pairs if pair[0] != NO_ADDRESS)
        on_device = [index for index in addresses if own[index] == NO_ADDRESS]
        self._hold: Lease | None = None
        """Keeps the blocks on the device."""
        blocks: tuple[tuple[BlockId, int], ...] = ()
        if on_device:
            salt = tier.tree.roots[path.tree].salt
            self._hold = holds.keep_blocks(name, salt, path.data, on_device[-1] + 1)
            blocks = tuple((BlockId(self._hold.table[index]), addresses[index]) for index in on_device)
        self.sources = Sources(blocks, (), stored)
        self._addresses = tuple(address for address, _ in stored)
        tier.begin_reading(self._addresses)
        copy.num_moves += 1
        self._num_leaving = tier.num_freed_by(copy)
        tier.num_leaving += self._num_leaving

    def end(self, completion: Completion) -> None:
        tier, copy = self._tier, self.copy
        tier.num_leaving -= self._num_leaving
        if self._hold is not None:
            self._holds.drop(self._hold)
        tier.end_reading(self._addresses)
        copy.num_moves -= 1
        if copy.num_moves == 0 and copy.column is not None:
            if completion.is_done:
                tier.remove(copy, is_elsewhere=True)
            else:
                tier.evict(copy)


class RetainedCopy:
    """A copy that is loaded and stays in its tier.

    Args:
        data: the tokens of what is loaded, encoded.
        blocks: the addresses of the blocks that are read.
    """

    def __init__(self, tier: LowerTier, copy: Copy, data: bytearray, blocks: Sequence[int]) -> None:
        self._tier = tier
        self.copy = copy
        self.pinned = _pin(tier, copy, data)
        self._num_blocks = len(blocks) + tier.snapshot_blocks(self.pinned.position)
        self._addresses = (*blocks, copy.address)
        tier.begin_reading(self._addresses)
        copy.num_moves += 1

    def end(self, completion: Completion) -> None:
        tier, copy = self._tier, self.copy
        tier.count_load(self._num_blocks, completion)
        tier.end_reading(self._addresses)
        if completion.lost:
            self._forget_lost(set(completion.lost))
        copy.num_moves -= 1
        if completion.is_done:
            copy.use = copy.use.next(tier.now)
        tier.push(copy)
        tier.tree.unpin(self.pinned)

    def _forget_lost(self, lost: set[int]) -> None:
        """Evict the snapshots that need addresses which could not be read."""
        tier, end = self._tier, self.pinned.end
        gone = {index for index, address in enumerate(tier.column.addresses(end)) if address in lost}
        for copy in list(tier.column.copies_after(end.run, end.depth)):
            if not lost.isdisjoint((copy.address, copy.tail_address)):
                tier.evict(copy)
        for index, block in self.pinned.locate(gone).items():
            if tier.is_needed(*block):
                tier.cut_off(block[0], index + 1)


class ExchangedCopy:
    """A copy that is loaded and makes room in its tier for what the device evicts. Arguments are as above."""

    def __init__(self, tier: LowerTier, copy: Copy, data: bytearray, blocks: Sequence[int]) -> None:
        self._tier = tier
        self.copy = copy
        self.pinned = _pin(tier, copy, data)
        self._num_blocks = len(blocks) + tier.snapshot_blocks(self.pinned.position)
        own, wanted = tier.column.addresses(self.pinned.end), set(blocks)
        self._index_at = {address: index for index, address in enumerate(own) if address in wanted}
        """By address that is read: the index of a whole block in the path."""
        self._returning = PathBlocks(self.pinned, [])
        """Those blocks that have left the tier."""
        tier.returning.append(self._returning)
        copy.num_moves += 1

    def free(self, addresses: Iterable[int]) -> None:
        """Free addresses that an issued transfer reads."""
        tier, copy, freed = self._tier, self.copy, dict[int, int]()
        located = self.pinned.locate(set(self._index_at.values()))
        for address in addresses:
            if address in self._index_at:
                index = self._index_at[address]
                run, own = located[index]
                tier.column.addresses_in(run)[own], freed[address] = NO_ADDRESS, 1
                self._returning.indices.append(index)
            elif address == copy.address:
                copy.address, freed[address] = NO_ADDRESS, tier.snapshot_blocks(copy.position)
            elif address == copy.tail_address:
                copy.tail_address, freed[address] = NO_ADDRESS, 1
        tier.free(freed)

    def leave(self) -> None:
        """Remove the copy, once all transfers are issued."""
        self.copy.num_moves -= 1
        if self._tier.has_snapshots:
            self._tier.remove(self.copy, is_elsewhere=True)
        else:
            self._tier.push(self.copy)

    def end(self, completion: Completion) -> None:
        tier = self._tier
        tier.count_load(self._num_blocks, completion)
        tier.returning = [blocks for blocks in tier.returning if blocks is not self._returning]
        if completion.is_done:
            self._free_returned()
        else:
            tier.cut_off_lost(self._returning)
            if tier.has_snapshots:
                tier.pass_savings(self.copy)
        tier.tree.unpin(self.pinned)

    def _free_returned(self) -> None:
        """Free the blocks that the device has again; without snapshots, also remove the ends before them.

        Nothing is done if the last block has left the tier: blocks before it are there for other snapshots.
        """
        tier, end, freed = self._tier, self.pinned.end, dict[int, int]()
        if tier.column.last_on_path(end) != end:
            return
        for run, start, stop in pieces(end)[::-1]:
            addresses = tier.column.addresses_in(run)
            for index in range(stop - 1, start - 1, -1):
                freed[addresses[index]], addresses[index] = 1, NO_ADDRESS
        tier.free(freed)
        if not tier.has_snapshots:
            for copy in list(tier.column.copies_on(end, self.pinned.path())):
                if copy.num_moves == 0:
                    tier.remove(copy, is_elsewhere=True)


def _pin(tier: LowerTier, copy: Copy, data: bytearray) -> TierSnapshot:
    """Pin in the tree what is loaded: a snapshot or, without snapshots, the end of a block."""
    snapshot = copy.snapshot
    if not tier.has_snapshots:
        depth = len(data) // BLOCK_KEY_BYTES
        home = next(run for run in snapshot.home.ancestry() if run.start_block < depth)
        snapshot = tier.tree.attach(TierSnapshot(home, (depth, b"")))
    tier.tree.pin(snapshot)
    return snapshot
