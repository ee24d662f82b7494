"""A tier below the device: decides which evicted entries it stores, and which to load back.

A store (``device/stores/transfers.py``) carries out the decisions. What the device evicts is *demoted* to the first
tier, in host memory, if it is worth more than what the tier would evict for it. A snapshot and the blocks on its path
leave the device at different times, but leave the tier together: it stores a block exactly as long as a demoted
snapshot needs the block, and both return to the device in one load (``tier_load.py``). The first tier drops what
returns, so the two memories hold different entries.

Further tiers are *persistent*, and each gets what leaves the one above it (``spills.py``). They store whole paths, as
nothing else outlives the process, and retain what has returned to the device, as reading is cheaper than writing again.

Memory is counted in blocks; a slot takes as many as its encoded bytes need. Neither has a static share.

Where attention has windows, a snapshot needs only the blocks of its window, and the tier stores no others.

All tiers share one tree (``tier_tree.py``).

Invariants, held by ``cache/inspection/invariants.py``: every block that a demoted snapshot needs is in the tier, on the
device or being loaded to it; in a persistent tier, it is in the tier or being written to it. Accounting is exact.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from strandline.cache.eviction import EvictionQueue
from strandline.cache.policy.resume_rules import first_gap
from strandline.cache.policy.worth import WorthPerByte
from strandline.cache.resume import Match, first_block_seen
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.stats import LowerStats
from strandline.cache.tiers.tier_tree import (
    NO_ADDRESS,
    Column,
    Copy,
    TierBlock,
    TierSnapshot,
    copy_of_device,
    descend,
    find_block,
    nearest_above,
    next_below,
    nodes_from,
    position_above,
)
from strandline.cache.tree import Snapshot, path_blocks
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, BlockId, SlotId, TransferId
from strandline.records.account import SnapshotKind
from strandline.records.actions import Action, Completion, DropStored, StoreOut
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, resumable_end

ANY_WORTH = float("inf")


class TierEnd(NamedTuple):
    """Where a prompt could resume."""

    block: TierBlock
    """The last whole block before it."""
    copy: Copy | None
    """None for models that keep no states."""
    position: int


class LowerTier:
    """The entries of one tier.

    Args:
        column: what the tier has of the tree of all tiers.
        worth: ranks entries for eviction.
        issue: takes actions.
        next_transfer: returns an unused transfer id.
        next_address: returns an unused address.
        window_tokens: tokens before a snapshot that resuming there reads, itself among them; None: all.
    """

    def __init__(
        self,
        memory: LowerMemory,
        column: Column,
        worth: WorthPerByte,
        issue: Callable[[Action], None],
        next_transfer: Callable[[], TransferId],
        next_address: Callable[[], int],
        window_tokens: int | None = None,
    ) -> None:
        self.store = memory.store
        self.num_blocks = memory.num_blocks
        self.num_spare_blocks = memory.num_spare_blocks
        self.is_persistent = memory.key is not None
        self.num_used = 0
        self.slot_blocks = memory.slot_blocks
        self.block_bytes = memory.block_bytes
        self.costs = memory.costs
        self.tree = column.tree
        self.column = column
        self.num_snapshots = 0
        self.num_snapshots_demoted = 0
        self.num_blocks_demoted = 0
        self.num_snapshots_evicted = 0
        self.num_snapshots_refused = 0
        self.num_loads = 0
        self.num_loaded_bytes = 0
        self.num_failed_loads = 0
        self.has_windows = window_tokens is not None
        self._window_tokens = window_tokens or sys.maxsize
        self._worth = worth
        self._issue = issue
        self._next_transfer = next_transfer
        self._queue = EvictionQueue[Copy](worth, _can_evict)
        self._next_address = next_address
        self.returning = Counter[TierBlock]()
        """Number of loads, by block that they bring to the device: it has left the tier and not arrived yet."""
        self._readers = Counter[int]()
        """Number of transfers that read each address."""
        self.to_free: dict[int, int] = {}
        """Sizes of addresses to free when the transfers that read them have ended."""

    # What is needed

    def first_needed(self, position: int) -> int:
        """Return the first block that resuming at a position reads."""
        return first_block_seen(position, self._window_tokens)

    def needed_blocks(self, demoted: TierSnapshot) -> list[TierBlock]:
        """Return the whole blocks that a snapshot needs, in order."""
        return demoted.last_blocks(demoted.position // BLOCK_TOKENS - self.first_needed(demoted.position))

    def is_needed(self, node: TierBlock) -> bool:
        """Whether a snapshot of the tier needs a block."""
        return self.column.num_needers[node.row] > 0 if self.has_windows else node in self.column

    def address(self, node: TierBlock) -> int:
        """Return the address of a block; ``NO_ADDRESS``: it is not stored."""
        return self.column.addresses[node.row]

    def is_lacking(self, node: TierBlock) -> bool:
        """Whether a snapshot of the tier needs a block that is not stored."""
        return self.address(node) == NO_ADDRESS and self.is_needed(node)

    # Demoting

    def demote_snapshot(self, snapshot: Snapshot, salt: str, data: bytes, tail: int | None) -> None:
        """Store a snapshot that the device evicts, if it is worth more than what would be evicted for it.

        Args:
            snapshot: it, while it is still in the device's index.
            data: the tokens before it, encoded.
            tail: the device's block that contains its position; None: the position is at a block's end.
        """
        tree = self.tree.open(salt)
        root = self.tree.roots.get(tree)
        above = snapshot.position - snapshot.saved_tokens
        above = position_above(self.column, root, data, snapshot.position, down_to=above)
        whole = snapshot.position // BLOCK_TOKENS
        key = data[whole * BLOCK_KEY_BYTES :]
        known = self.copy_of(find_block(root, data, whole), key)
        if known is not None:
            known.use, known.is_shared = snapshot.use, snapshot.is_shared
            self._queue.push(known)
            return
        demoted = copy_of_device(snapshot, key, snapshot.position - above)
        if not self.make_room(self.slot_blocks + (tail is not None), self.worth(demoted)):
            self.num_snapshots_refused += 1
            return
        self.enter(demoted, tree, data)
        demoted.address = self.take(self.slot_blocks)
        blocks: tuple[tuple[BlockId, int], ...] = ()
        if tail is not None:
            demoted.tail_address = self.take(1)
            blocks = ((BlockId(tail), demoted.tail_address),)
        self.num_snapshots_demoted += 1
        self._issue(StoreOut(self._next_transfer(), self.store, blocks, ((SlotId(snapshot.slot), demoted.address),)))

    def demote_blocks(
        self, salt: str, data: bytes, first: int, blocks: Sequence[int], *, use: Use, is_shared: bool
    ) -> None:
        """Store those blocks of a path that the device evicts and that demoted snapshots need.

        Without states all are needed: the end of the blocks counts as a snapshot without memory.

        Args:
            data: the tokens of the path to the end of the blocks, encoded.
            first: the index of the first one in the path.
            blocks: null blocks stand for those that stay on the device or are not there.
            use, is_shared: those of the run that they belong to.
        """
        tree = self.tree.open(salt)
        if not self.slot_blocks and blocks:
            last = find_block(self.tree.roots.get(tree), data, first + len(blocks))
            if last is None or last not in self.column:
                end, num_tokens = TierSnapshot(len(data) // TOKEN_BYTES, b""), BLOCK_TOKENS * len(blocks)
                self.enter(Copy(end, SnapshotKind.GENERATION_END, use, num_tokens, is_shared=is_shared), tree, data)
        missing = self._missing(tree, data, first, blocks)
        if not missing:
            return
        num_evicted = self.num_snapshots_evicted
        self.make_room(len(missing), ANY_WORTH)
        if self.num_snapshots_evicted > num_evicted:
            # Some may not be needed any more.
            missing = self._missing(tree, data, first, blocks)
        num_free = self.num_blocks - self.num_used
        for index, node in missing[num_free:]:
            self.cut_off(node, first + index + 1)
        pairs = []
        for index, node in missing[:num_free]:
            if self.is_needed(node):
                address = self.column.addresses[node.row] = self.take(1)
                pairs.append((BlockId(blocks[index]), address))
        self.num_blocks_demoted += len(pairs)
        if pairs:
            self._issue(StoreOut(self._next_transfer(), self.store, tuple(pairs), ()))

    def copy_of(self, block: TierBlock | None, key: bytes) -> Copy | None:
        """Return the tier's copy of a snapshot after a block, if it has one."""
        snapshot = None if block is None else block.snapshots.get(key)
        return None if snapshot is None else snapshot.copies[self.column.index]

    def _missing(self, tree: str, data: bytes, first: int, blocks: Sequence[int]) -> list[tuple[int, TierBlock]]:
        """Return the nodes of these blocks that are needed and not in the tier, each with its index in ``blocks``."""
        node = find_block(self.tree.roots.get(tree), data, first)
        missing = []
        for index, block in enumerate(blocks):
            start = (first + index) * BLOCK_KEY_BYTES
            node = None if node is None else node.children.get(data[start : start + BLOCK_KEY_BYTES])
            if node is None:
                break
            if block != NULL_BLOCK and self.is_lacking(node):
                missing.append((index, node))
        return missing

    def enter(self, demoted: Copy, tree: str, data: bytes) -> None:
        """Put a copy of a snapshot into the tier.

        Args:
            tree: the name of the tree.
            data: the tokens before the snapshot, encoded.
        """
        block = self.tree.add_block(tree, data, demoted.position // BLOCK_TOKENS)
        snapshot = demoted.snapshot = self.tree.attach(demoted.snapshot, tree, block)
        self.column.enter(demoted)
        for node in self.needed_blocks(snapshot) if self.has_windows else ():
            self.column.num_needers[node.row] += 1
        for below in next_below(self.column, block, snapshot):
            below.saved_tokens = min(below.saved_tokens, below.position - demoted.position)
        self.num_snapshots += 1
        self._queue.push(demoted)

    def is_whole(self, demoted: TierSnapshot) -> bool:
        """Whether all blocks that a snapshot needs are in the tier or, unless it is persistent, on the device."""
        if self.is_persistent:
            return all(map(self.address, self.needed_blocks(demoted)))
        return not self.returning or self.returning.keys().isdisjoint(self.needed_blocks(demoted))

    # Evicting

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._worth.now

    def worth(self, demoted: Copy) -> float:
        """Return what a snapshot is worth, to compare with others."""
        return self._worth.worth(demoted)

    def make_room(self, num_blocks: int, worth: float) -> bool:
        """Evict what is worth less until there is room; False: that did not suffice."""
        while self.num_blocks - self.num_used < num_blocks:
            victim = self._queue.pop()
            if victim is None:
                return False
            if self.worth(victim) >= worth:
                self._queue.push(victim)
                return False
            self.evict(victim)
        return True

    def pop(self) -> Copy | None:
        """Take the snapshot of least worth out of the queue and return it; None: none can be evicted."""
        return self._queue.pop()

    def push(self, demoted: Copy) -> None:
        """Put a snapshot into the eviction queue, if it is still in the tier."""
        if demoted.column is not None:
            self._queue.push(demoted)

    def evict(self, demoted: Copy) -> None:
        """Remove a snapshot, and count that."""
        self.num_snapshots_evicted += 1
        self.remove(demoted)

    def cut_off(self, node: TierBlock, num_blocks: int) -> None:
        """Remove the snapshots that need a lost block.

        Args:
            num_blocks: number of blocks up to and including the lost one.
        """
        for copy in list(self.column.below(node)):
            if self.first_needed(copy.position) < num_blocks:
                self.evict(copy)

    def remove(self, demoted: Copy, *, is_elsewhere: bool = False) -> None:
        """Remove a copy of a snapshot, and the blocks that it alone needs.

        Unless it is on the device again or in another tier, the next snapshots below now save its tokens as well.
        """
        snapshot, block, column = demoted.snapshot, demoted.snapshot.block, self.column
        if demoted.column is None or block is None:
            return
        freed = {demoted.address: self.slot_blocks, demoted.tail_address: 1}
        needed = self.needed_blocks(snapshot) if self.has_windows else ()
        for node in needed:
            column.num_needers[node.row] -= 1
        unneeded = [node for node in needed if not column.num_needers[node.row]]
        node, left = column.leave(demoted, block)
        self.num_snapshots -= 1
        if not is_elsewhere:
            self.pass_savings(block, demoted)
        for gone in (*unneeded, *left):
            freed[column.addresses[gone.row]], column.addresses[gone.row] = 1, NO_ADDRESS
        self.tree.detach(snapshot)
        above = nearest_above(column, node, block, snapshot)
        if above is not None:
            above.is_interior = is_elsewhere
            self._queue.push(above)
        self.free(freed)

    def pass_savings(self, block: TierBlock, gone: Copy) -> None:
        """Add the tokens that a removed snapshot saved to those below it whose nearest snapshot above it was."""
        for below in next_below(self.column, block, gone.snapshot):
            if below.saved_tokens == below.position - gone.position:
                below.saved_tokens += gone.saved_tokens

    def take(self, num_blocks: int) -> int:
        """Allocate memory; return its address."""
        self.num_used += num_blocks
        return self._next_address()

    def free(self, sizes: dict[int, int]) -> None:
        """Free addresses of these sizes: now, or when the transfers that read them have ended."""
        sizes.pop(NO_ADDRESS, None)
        for address in [address for address in sizes if address in self._readers]:
            self.to_free[address] = sizes.pop(address)
        if sizes:
            self.num_used -= sum(sizes.values())
            self._issue(DropStored(self.store, tuple(sizes)))

    def begin_reading(self, addresses: Iterable[int]) -> None:
        """Keep addresses from being freed until they have been read."""
        self._readers.update(addresses)

    def end_reading(self, addresses: Iterable[int]) -> None:
        """Free those addresses that were to be freed in the meantime and are no longer read."""
        addresses = tuple(addresses)
        self._readers.subtract(addresses)
        self._readers = +self._readers
        self.free({address: self.to_free.pop(address) for address in addresses if self._can_free(address)})

    def _can_free(self, address: int) -> bool:
        return address in self.to_free and address not in self._readers

    # Loading

    def offer(self, salt: str, data: bytearray, match: Match) -> Offer | None:
        """Return what the tier has of a prompt beyond its hit on the device, if loading it pays. Changes nothing."""
        found = self.find(salt, data, match)
        if found is None:
            return None
        node, copy, position = found
        whole, first_needed = position // BLOCK_TOKENS, self.first_needed(position)
        held = min(match.end.num_blocks, whole)
        first = max(first_needed, first_gap(match.end.run, held, first_needed))
        num_blocks = whole - first
        if copy is not None:
            num_blocks += self.slot_blocks + copy.snapshot.has_tail
        if not self.costs.pays(num_blocks * self.block_bytes, position - match.position):
            return None
        addresses = list(map(self.address, nodes_from(node, whole - first))) if whole > first else []
        for index, block in enumerate(path_blocks(match.end.run)[first:held] if first < held else ()):
            if block != NULL_BLOCK:
                addresses[index] = NO_ADDRESS
        offered: tuple[OfferedSnapshot, ...] = ()
        if copy is not None:
            offered = (OfferedSnapshot(position, copy.address, copy.kind),)
            if copy.tail_address:
                addresses.append(copy.tail_address)
        return Offer(self.store, position, first, tuple(addresses), offered)

    def gain_s(self, offer: Offer, match: Match) -> float:
        """Return how much sooner loading an offer ends than computing; infinity before that is known."""
        num_bytes = (len(offer.blocks) - offer.blocks.count(NO_ADDRESS) + self.slot_blocks) * self.block_bytes
        return self.costs.gain_s(num_bytes, offer.position - match.position)

    def find(self, salt: str, data: bytearray, match: Match) -> TierEnd | None:
        """Return the deepest position at which a prompt could resume beyond its hit on the device, or None."""
        root = self.tree.roots.get(self.tree.name(salt))
        if root is None:
            return None
        node, depth = self.column.last_on_path(*descend(root, data, len(data) // BLOCK_KEY_BYTES))
        best: TierEnd | None = None
        first = 0
        while depth >= match.position // BLOCK_TOKENS:
            if best is None:
                best = self._end_at(node, depth, data, match)
                first = 0 if best is None else self.first_needed(best.position)
            elif not self.is_persistent:
                break  # In the first tier, what it needs and the tier does not have is on the device.
            if depth <= first:
                break
            num_held = min(match.end.num_blocks, depth)
            if self.address(node) == NO_ADDRESS and first_gap(match.end.run, num_held, depth - 1) < depth:
                best = None
            if node.parent is None:
                break
            node, depth = node.parent, depth - 1
        return best

    def _end_at(self, node: TierBlock, depth: int, data: bytearray, match: Match) -> TierEnd | None:
        """Return where a prompt could resume between the end of the block at this depth and that of the next."""
        if not self.slot_blocks:
            position = depth * BLOCK_TOKENS
            return TierEnd(node, None, position) if resumable_end(data, position) > match.end.kv_tokens else None
        copies = self.column.copies_at(node) if node.snapshots else ()
        for copy in sorted(copies, key=lambda copy: -copy.position):
            is_deeper = copy.position > match.position
            if copy.address and is_deeper and data.startswith(copy.snapshot.key, depth * BLOCK_KEY_BYTES):
                return TierEnd(node, copy, copy.position)
        return None

    def count_load(self, num_blocks: int, completion: Completion) -> None:
        """Count the end of a load of this many blocks and, with states, a slot."""
        if completion.is_done:
            num_bytes = (num_blocks + self.slot_blocks) * self.block_bytes
            self.num_loads += 1
            self.num_loaded_bytes += num_bytes
            self.costs.observe_load(num_bytes, completion.seconds)
        else:
            self.num_failed_loads += 1

    # Reading

    def stats(self) -> LowerStats:
        """Return all figures of the tier."""
        return LowerStats(
            self.store,
            self.num_blocks,
            self.num_used,
            self.num_snapshots,
            self.num_snapshots_demoted,
            self.num_blocks_demoted,
            self.num_snapshots_evicted,
            self.num_snapshots_refused,
            self.num_loads,
            self.num_loaded_bytes,
            self.num_failed_loads,
        )

    def is_queued(self, demoted: Copy) -> bool:
        """Whether a snapshot can be evicted: it is in the queue, or the end of a transfer will put it there."""
        return demoted in self._queue or demoted.num_loads > 0

    def snapshots(self) -> Iterator[Copy]:
        """Yield all snapshots of the tier."""
        for root in self.tree.roots.values():
            yield from self.column.below(root)


def _can_evict(demoted: Copy) -> bool:
    return demoted.column is not None and demoted.num_loads == 0
