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
from strandline.cache.tiers.tier_announcer import Claim
from strandline.cache.tiers.tier_tree import NO_ADDRESS, TierBlock, TierSnapshot, find_block
from strandline.cache.tree import Snapshot, path_blocks
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.actions import Completion
from strandline.records.tokens import BLOCK_KEY_BYTES


@dataclass(slots=True)
class _TierLoad:
    """A load under way."""

    block: TierBlock | None
    """The last whole block of what is loaded."""
    keeper: TierSnapshot | None
    """The snapshot that needs what is loaded, and so keeps it in the tier."""
    addresses: tuple[int, ...]
    """The addresses that it reads; a persistent tier retains them."""
    nodes: dict[int, tuple[int, TierBlock]] = field(default_factory=dict)
    """By address that it reads: a whole block, and its index in the path."""
    returning: list[tuple[int, TierBlock]] = field(default_factory=list)
    """Those blocks that have left the tier."""
    claim: Claim | None = None
    """The entries that stay announced until it has ended."""


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
        block = self._last_block(lease)
        load = self._loads[lease.request_id] = _TierLoad(block, self._keeper(lease, block), tuple(addresses))
        if load.keeper is not None:
            load.keeper.num_loads += 1
        if self._tier.announcer is not None and load.keeper is not None and block is not None and self.is_exchange:
            load.claim = self._tier.announcer.claim(block, load.keeper)
        if not self.is_exchange:
            self._tier.begin_reading(load.addresses)
        elif block is not None:
            whole, wanted = len(lease.tokens) // BLOCK_TOKENS, set(load.addresses)
            nodes = enumerate(block.ancestry(), 1)
            load.nodes = {node.address: (whole - depth, node) for depth, node in nodes if node.address in wanted}

    def exchange(self, lease: Lease, addresses: Iterable[int]) -> None:
        """Free addresses that an issued transfer reads, unless the tier is persistent."""
        load, tier = self._loads[lease.request_id], self._tier
        if not self.is_exchange:
            return
        freed, keeper = dict[int, int](), load.keeper
        for address in addresses:
            if address in load.nodes:
                index, node = load.nodes[address]
                node.address, freed[address] = NO_ADDRESS, 1
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
            if tier.announcer is not None and load.claim is not None:
                tier.announcer.release(load.claim)
            return
        tier.end_reading(load.addresses)
        self._forget_lost(lease, completion.lost)
        if keeper is not None:
            keeper.num_loads -= 1
            keeper.use = keeper.use.next(tier.now) if completion.is_done else keeper.use
            tier.push(keeper)

    def _end_exchange(self, lease: Lease, load: _TierLoad, *, is_done: bool) -> None:
        tier, keeper = self._tier, load.keeper
        tier.returning.subtract(node for _, node in load.returning)
        tier.returning = +tier.returning
        if is_done:
            self._forget_returned(lease)
            return
        for index, node in load.returning:
            if node.address == NO_ADDRESS and tier.is_needed(node):
                tier.cut_off(node, index + 1)
        if keeper is not None and load.block is not None and tier.slot_blocks:
            tier.pass_savings(load.block, keeper)

    def _keeper(self, lease: Lease, block: TierBlock | None) -> TierSnapshot | None:
        if block is None:
            return None
        if self._tier.slot_blocks:
            whole = len(lease.tokens) // BLOCK_TOKENS
            return block.snapshots.get(bytes(lease.tokens.data[whole * BLOCK_KEY_BYTES :]))
        return next(block.below(), None)

    def _last_block(self, lease: Lease) -> TierBlock | None:
        """Return the node of the last whole block of what is loaded."""
        tier, whole = self._tier, len(lease.tokens) // BLOCK_TOKENS
        return find_block(tier.roots.get(tier.tree_name(lease.salt)), lease.tokens.data, whole)

    def _forget_lost(self, lease: Lease, lost: Sequence[int]) -> None:
        """Evict the snapshots that need addresses which could not be read."""
        block, tier = self._last_block(lease) if lost else None, self._tier
        if block is None:
            return
        addresses, whole = set(lost), len(lease.tokens) // BLOCK_TOKENS
        nodes = [(node, whole - index) for index, node in enumerate(block.ancestry()) if node.address in addresses]
        for snapshot in list(block.snapshots.values()):
            if not addresses.isdisjoint((snapshot.address, snapshot.tail_address)):
                tier.evict(snapshot)
        for node, num_blocks in reversed(nodes):
            if tier.is_needed(node):
                tier.cut_off(node, num_blocks)

    def _forget_returned(self, lease: Lease) -> None:
        """Free the blocks that the device has again; without states, also remove the ends before them."""
        block, tier = self._last_block(lease), self._tier
        path = [] if block is None else list(block.ancestry())
        returned = [
            node for node, held in zip(path, reversed(path_blocks(lease.run)[: len(path)]), strict=True) if held
        ]
        freed = {node.address: 1 for node in returned}
        for node in returned:
            node.address = NO_ADDRESS
        tier.free(freed)
        if not tier.slot_blocks:
            for node in path:
                for end in list(node.snapshots.values()):
                    if end.num_loads == 0:
                        tier.remove(end, is_elsewhere=True)
