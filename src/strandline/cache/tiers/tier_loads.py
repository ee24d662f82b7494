"""Loads from a tier: pin what a load reads in the tier, and free or retain it when the load ends.

A persistent tier retains what is loaded. In the other kind, memory is *exchanged*: an address is freed as soon as the
load that reads it has been issued, and the store reads it before it writes anything else there. So what the device
evicts for the load takes the place of what is loaded, and neither memory evicts more. For that, a load is split into
pieces (``loads.py``): each frees its addresses before the device evicts for the next one.

Until the load has ended, its blocks are *returning*: neither in the tier nor on the device. Other demoted snapshots may
need them, and cannot be loaded or spilled in the meantime. If the load fails, they are evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strandline.cache.lease import Lease
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.tier_tree import NO_ADDRESS, Copy, TierBlock, TierSnapshot, find_block
from strandline.cache.tree import Snapshot, path_blocks
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.actions import Completion
from strandline.records.tokens import BLOCK_KEY_BYTES


@dataclass(slots=True)
class _TierLoad:
    """A load under way."""

    block: TierBlock | None
    """The last whole block of what is loaded; None: no tier has it."""
    keeper: Copy | None
    """The snapshot that needs what is loaded, and so keeps it in the tier."""
    addresses: tuple[int, ...]
    """The addresses that it reads; a persistent tier retains them."""
    nodes: dict[int, tuple[int, TierBlock]] = field(default_factory=dict)
    """By address that it reads: a whole block, and its index in the path."""
    returning: list[tuple[int, TierBlock]] = field(default_factory=list)
    """Those blocks that have left the tier."""
    kept: TierSnapshot | None = None
    """What stays in the tree until it has ended."""


class TierLoads:
    """The loads from one tier."""

    def __init__(self, tier: LowerTier) -> None:
        self._tier = tier
        self._loads: dict[RequestId, _TierLoad] = {}

    def __contains__(self, lease: Lease) -> bool:
        return lease.request_id in self._loads

    @property
    def is_exchange(self) -> bool:
        """Whether what is loaded makes room for what the device evicts."""
        return not self._tier.is_persistent

    def begin(self, lease: Lease, addresses: Iterable[int]) -> None:
        """Pin what a load is going to read, and what resuming from it needs."""
        tier, tree, whole = self._tier, self._tier.tree, len(lease.tokens) // BLOCK_TOKENS
        block = find_block(tree.roots.get(tree.name(lease.salt)), lease.tokens.data, whole)
        keeper = self._keeper(lease, block)
        load = self._loads[lease.request_id] = _TierLoad(block, keeper, tuple(addresses))
        if block is not None and keeper is not None:
            keeper.num_loads += 1
            load.kept = self._keep(keeper.snapshot, block, whole)
        if not self.is_exchange:
            tier.begin_reading(load.addresses)
        elif block is not None:
            wanted = set(load.addresses)
            nodes = ((tier.address(node), depth, node) for depth, node in enumerate(block.ancestry(), 1))
            load.nodes = {address: (whole - depth, node) for address, depth, node in nodes if address in wanted}

    def exchange(self, lease: Lease, addresses: Iterable[int]) -> None:
        """Free addresses that an issued transfer reads, unless the tier is persistent."""
        load, tier = self._loads[lease.request_id], self._tier
        if not self.is_exchange:
            return
        freed, keeper = dict[int, int](), load.keeper
        for address in addresses:
            if address in load.nodes:
                index, node = load.nodes[address]
                tier.column.addresses[node.row], freed[address] = NO_ADDRESS, 1
                tier.returning[node] += 1
                load.returning.append((index, node))
            elif keeper is not None and address == keeper.address:
                keeper.address, freed[address] = NO_ADDRESS, tier.slot_blocks
            elif keeper is not None and address == keeper.tail_address:
                keeper.tail_address, freed[address] = NO_ADDRESS, 1
        tier.free(freed)

    def finish_exchange(self, lease: Lease) -> None:
        """Remove the loaded snapshot once all transfers are issued, unless the tier is persistent."""
        keeper = self._loads[lease.request_id].keeper
        if keeper is None or not self.is_exchange:
            return
        keeper.num_loads -= 1
        if self._tier.slot_blocks:
            self._tier.remove(keeper, is_elsewhere=True)
        else:
            self._tier.push(keeper)

    def end(self, lease: Lease, snapshot: Snapshot | None, completion: Completion, num_bytes: int) -> None:
        """End a load: free what it has brought to the device, unless the tier is persistent, or what it has lost.

        Args:
            snapshot: the one that now is on the device; None without states, or if the load failed.
            completion: the common end of all its transfers.
            num_bytes: how much was to be loaded.
        """
        load, tier = self._loads.pop(lease.request_id), self._tier
        keeper = load.keeper
        if completion.is_done:
            tier.num_loads += 1
            tier.num_loaded_bytes += num_bytes
            tier.costs.observe_load(num_bytes, completion.seconds)
        else:
            tier.num_failed_loads += 1
        if snapshot is not None and keeper is not None:
            snapshot.use, snapshot.is_shared = keeper.use, keeper.is_shared
            snapshot.is_superseded = keeper.is_superseded
        if self.is_exchange:
            self._end_exchange(lease, load, is_done=completion.is_done)
        else:
            tier.end_reading(load.addresses)
            self._forget_lost(lease, load, completion.lost)
            if keeper is not None:
                keeper.num_loads -= 1
                keeper.use = keeper.use.next(tier.now) if completion.is_done else keeper.use
                tier.push(keeper)
        if load.kept is not None:
            load.kept.num_pins -= 1
            tier.tree.detach(load.kept)

    def _end_exchange(self, lease: Lease, load: _TierLoad, *, is_done: bool) -> None:
        tier, keeper = self._tier, load.keeper
        tier.returning.subtract(node for _, node in load.returning)
        tier.returning = +tier.returning
        if is_done:
            self._forget_returned(lease, load)
            return
        for index, node in load.returning:
            if tier.is_lacking(node):
                tier.cut_off(node, index + 1)
        if keeper is not None and load.block is not None and tier.slot_blocks:
            tier.pass_savings(load.block, keeper)

    def _keep(self, snapshot: TierSnapshot, block: TierBlock, num_blocks: int) -> TierSnapshot:
        """Keep what is loaded in the tree: a snapshot or, without states, the end of a block before it."""
        if not self._tier.slot_blocks:
            snapshot = self._tier.tree.attach(TierSnapshot(num_blocks * BLOCK_TOKENS, b""), snapshot.tree, block)
        snapshot.num_pins += 1
        return snapshot

    def _keeper(self, lease: Lease, block: TierBlock | None) -> Copy | None:
        if block is None:
            return None
        if self._tier.slot_blocks:
            whole = len(lease.tokens) // BLOCK_TOKENS
            return self._tier.copy_of(block, bytes(lease.tokens.data[whole * BLOCK_KEY_BYTES :]))
        return next(self._tier.column.below(block), None)

    def _forget_lost(self, lease: Lease, load: _TierLoad, lost: Sequence[int]) -> None:
        """Evict the snapshots that need addresses which could not be read."""
        block, tier = load.block, self._tier
        if block is None or not lost:
            return
        addresses, whole = set(lost), len(lease.tokens) // BLOCK_TOKENS
        path = enumerate(block.ancestry())
        nodes = [(node, whole - index) for index, node in path if tier.address(node) in addresses]
        for copy in list(tier.column.copies_at(block)):
            if not addresses.isdisjoint((copy.address, copy.tail_address)):
                tier.evict(copy)
        for node, num_blocks in reversed(nodes):
            if tier.is_needed(node):
                tier.cut_off(node, num_blocks)

    def _forget_returned(self, lease: Lease, load: _TierLoad) -> None:
        """Free the blocks that the device has again; without states, also remove the ends before them."""
        tier = self._tier
        path = [] if load.block is None else list(load.block.ancestry())
        returned = [
            node for node, held in zip(path, reversed(path_blocks(lease.run)[: len(path)]), strict=True) if held
        ]
        freed = {tier.address(node): 1 for node in returned}
        for node in returned:
            tier.column.addresses[node.row] = NO_ADDRESS
        tier.free(freed)
        if not tier.slot_blocks:
            for node in path:
                for end in list(tier.column.copies_at(node)):
                    if end.num_loads == 0:
                        tier.remove(end, is_elsewhere=True)
