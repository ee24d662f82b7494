"""Loads from a tier below the device: what they keep there, and what becomes of it when they have ended.

A persistent tier keeps what is loaded. Memory of the other kind is *exchanged*: what a load reads is freed as soon as
the load has been told to read it, and the store reads it before it writes anything else there. So what the device
evicts for the load takes the place of what is loaded, and neither memory evicts anything but that. Loads come in pieces
for that reason (``cache/loads.py``): each frees its places before the device evicts for the next one.

Until the load has ended, its blocks are *returning*: neither at rest nor on the device. Other snapshots at rest may
need them, and cannot be loaded or spilled meanwhile. If the load fails, they are evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strandline.cache.lease import Lease
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.resting import NO_PLACE, RestingBlock, RestingSnapshot, find_block
from strandline.cache.tiers.resting_announcer import Claim
from strandline.cache.tree import Snapshot, path_blocks
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.actions import Completion
from strandline.records.tokens import BLOCK_KEY_BYTES


@dataclass(slots=True)
class _TierLoad:
    """A load under way."""

    block: RestingBlock | None
    """The last whole block of what is loaded."""
    keeper: RestingSnapshot | None
    """The snapshot whose presence keeps what is loaded."""
    places: tuple[int, ...]
    """What it reads, and a persistent tier keeps."""
    nodes: dict[int, tuple[int, RestingBlock]] = field(default_factory=dict)
    """By place that it reads: a whole block, and its index in the path."""
    returning: list[tuple[int, RestingBlock]] = field(default_factory=list)
    """Those of them that do not rest any more."""
    claim: Claim | None = None
    """What stays announced until it has ended."""


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

    def begin(self, lease: Lease, places: Iterable[int]) -> None:
        """Keep what a load is going to read, and what it needs to resume."""
        block = self._last_block(lease)
        load = self._loads[lease.request_id] = _TierLoad(block, self._keeper(lease, block), tuple(places))
        if load.keeper is not None:
            load.keeper.num_loads += 1
        if self._tier.announcer is not None and load.keeper is not None and block is not None and self.is_exchange:
            load.claim = self._tier.announcer.claim(block, load.keeper)
        if not self.is_exchange:
            self._tier.begin_reading(load.places)
        elif block is not None:
            whole, wanted = len(lease.tokens) // BLOCK_TOKENS, set(load.places)
            nodes = enumerate(block.ancestry(), 1)
            load.nodes = {node.place: (whole - depth, node) for depth, node in nodes if node.place in wanted}

    def exchange(self, lease: Lease, places: Iterable[int]) -> None:
        """Free places that the load has been told to read, unless they are to stay."""
        load, tier = self._loads[lease.request_id], self._tier
        if not self.is_exchange:
            return
        freed, keeper = dict[int, int](), load.keeper
        for place in places:
            if place in load.nodes:
                index, node = load.nodes[place]
                node.place, freed[place] = NO_PLACE, 1
                tier.returning[node] += 1
                load.returning.append((index, node))
            elif keeper is not None and place == keeper.place:
                keeper.place, freed[place] = NO_PLACE, tier.slot_blocks
            elif keeper is not None and place == keeper.tail_place:
                keeper.tail_place, freed[place] = NO_PLACE, 1
        tier.free(freed)

    def finish_exchange(self, lease: Lease) -> None:
        """Remove the snapshot that is loaded, once the load has been told to read all, unless it is to stay."""
        keeper = self._loads[lease.request_id].keeper
        if keeper is None or not self.is_exchange:
            return
        keeper.num_loads -= 1
        if self._tier.slot_blocks:
            self._tier.remove(keeper, is_elsewhere=True)
        else:
            self._tier.push(keeper)

    def end(self, lease: Lease, snapshot: Snapshot | None, completion: Completion, num_bytes: int) -> None:
        """Forget what a load has brought to the device, or what it could not bring; a persistent tier keeps the former.

        Args:
            snapshot: that of the device at the end of the load; None without states, or if it failed.
            completion: of all its transfers together.
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
        tier.end_reading(load.places)
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
            if node.place == NO_PLACE and tier.is_needed(node):
                tier.cut_off(node, index + 1)
        if keeper is not None and load.block is not None and tier.slot_blocks:
            tier.pass_savings(load.block, keeper)

    def _keeper(self, lease: Lease, block: RestingBlock | None) -> RestingSnapshot | None:
        if block is None:
            return None
        if self._tier.slot_blocks:
            whole = len(lease.tokens) // BLOCK_TOKENS
            return block.snapshots.get(bytes(lease.tokens.data[whole * BLOCK_KEY_BYTES :]))
        return next(block.below(), None)

    def _last_block(self, lease: Lease) -> RestingBlock | None:
        """Return the node of the last whole block of what is loaded."""
        tier, whole = self._tier, len(lease.tokens) // BLOCK_TOKENS
        return find_block(tier.roots.get(tier.tree_name(lease.salt)), lease.tokens.data, whole)

    def _forget_lost(self, lease: Lease, lost: Sequence[int]) -> None:
        """Remove what needs places that could not be read."""
        block, tier = self._last_block(lease) if lost else None, self._tier
        if block is None:
            return
        places, whole = set(lost), len(lease.tokens) // BLOCK_TOKENS
        nodes = [(node, whole - index) for index, node in enumerate(block.ancestry()) if node.place in places]
        for snapshot in list(block.snapshots.values()):
            if not places.isdisjoint((snapshot.place, snapshot.tail_place)):
                tier.evict(snapshot)
        for node, num_blocks in reversed(nodes):
            if tier.is_needed(node):
                tier.cut_off(node, num_blocks)

    def _forget_returned(self, lease: Lease) -> None:
        """Free the blocks that the device has again; without states, remove the ends before them too."""
        block, tier = self._last_block(lease), self._tier
        path = [] if block is None else list(block.ancestry())
        returned = [
            node for node, held in zip(path, reversed(path_blocks(lease.run)[: len(path)]), strict=True) if held
        ]
        freed = {node.place: 1 for node in returned}
        for node in returned:
            node.place = NO_PLACE
        tier.free(freed)
        if not tier.slot_blocks:
            for node in path:
                for end in list(node.snapshots.values()):
                    if end.num_loads == 0:
                        tier.remove(end, is_elsewhere=True)
