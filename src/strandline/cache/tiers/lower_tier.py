"""A tier below the device: decides which evicted entries it stores, and which to load back.

A store (``device/transfers.py``) carries out the decisions. What the device evicts is *demoted* to the first tier, in
host memory, if it is worth more than what the tier would evict for it. A snapshot and the blocks on its path leave the
device at different times, but leave the tier together: it stores a block exactly as long as a demoted snapshot needs
the block, and both return to the device in one load (``tier_loads.py``). The first tier drops what returns, so the two
memories hold different entries.

Further tiers are *persistent*, and each gets what leaves the one above it (``spills.py``). They store whole paths, as
nothing else outlives the process, and retain what has returned to the device, as reading is cheaper than writing again.

Memory is counted in blocks; a slot takes as many as its encoded bytes need. Neither has a static share.

Where attention has windows, a snapshot needs only the blocks of its window, and the tier stores no others.

Invariants, held by ``cache/inspection/invariants.py``: every block that a demoted snapshot needs is in the tier, on the
device or being loaded to it; in a persistent tier, it is in the tier or being written to it. Accounting is exact.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

from strandline.cache.eviction import EvictionQueue
from strandline.cache.policy.resume_rules import first_gap
from strandline.cache.resume import Match, first_block_seen
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.stats import LowerStats
from strandline.cache.tiers.tier_announcer import TierAnnouncer
from strandline.cache.tiers.tier_lookups import TierEnd, find_end, position_above
from strandline.cache.tiers.tier_tree import (
    NO_ADDRESS,
    TierBlock,
    TierSnapshot,
    add_block,
    find_block,
    nearest_above,
    next_below,
    nodes_from,
)
from strandline.cache.tiers.worth import TierWorth
from strandline.cache.tree import Snapshot, path_blocks
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, BlockId, SlotId, TransferId
from strandline.records.account import SnapshotKind
from strandline.records.actions import Action, DropStored, StoreOut
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

ANY_WORTH = float("inf")


class LowerTier:
    """The entries of one tier.

    Args:
        worth: ranks entries for eviction.
        issue: takes actions.
        next_transfer: returns an unused transfer id.
        next_address: returns an unused address.
        window_tokens: tokens before a snapshot that resuming there reads, itself among them; None: all.
    """

    def __init__(
        self,
        memory: LowerMemory,
        worth: TierWorth,
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
        self.roots: dict[str, TierBlock] = {}
        self.announcer: TierAnnouncer | None = None
        """Announces the entries; None: events are off."""
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
        self._key = memory.key
        self._worth = worth
        self._issue = issue
        self._next_transfer = next_transfer
        self._queue = EvictionQueue[TierSnapshot](worth, _can_evict)
        self._next_address = next_address
        self.returning = Counter[TierBlock]()
        """Number of loads, by block that they bring to the device: it has left the tier and not arrived yet."""
        self._readers = Counter[int]()
        """Number of transfers that read each address."""
        self.to_free: dict[int, int] = {}
        """Sizes of addresses to free when the transfers that read them have ended."""

    def tree_below(self, upper: "LowerTier", tree: str) -> str:
        """Return the name of a tree of the tier above in this one: persistent tiers have the same key."""
        return tree if upper.is_persistent else self.tree_name(tree)

    def tree_name(self, salt: str) -> str:
        """Return the name of a salt's tree: the salt or, where files outlive the process, a keyed hash of it."""
        if self._key is None:
            return salt
        return blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).hexdigest()

    # What is needed

    def first_needed(self, position: int) -> int:
        """Return the first block that resuming at a position reads."""
        return first_block_seen(position, self._window_tokens)

    def needed_blocks(self, demoted: TierSnapshot) -> list[TierBlock]:
        """Return the whole blocks that a snapshot needs, in order."""
        return demoted.last_blocks(demoted.position // BLOCK_TOKENS - self.first_needed(demoted.position))

    def is_needed(self, node: TierBlock) -> bool:
        """Whether a demoted snapshot needs a block."""
        return node.num_needers > 0 if self.has_windows else node.parent is not None

    # Demoting

    def demote_snapshot(
        self, snapshot: Snapshot, salt: str, data: bytes, tail: int | None, above: int, *, is_interior: bool
    ) -> None:
        """Store a snapshot that the device evicts, if it is worth more than what would be evicted for it.

        Args:
            data: the tokens before it, encoded.
            tail: the device's block that contains its position; None: the position is at a block's end.
            above: the position of the nearest snapshot above on the device, or 0.
        """
        above = position_above(self.roots.get(salt), data, snapshot.position, down_to=above)
        whole = snapshot.position // BLOCK_TOKENS
        key = data[whole * BLOCK_KEY_BYTES :]
        block = find_block(self.roots.get(salt), data, whole)
        if block is not None and (known := block.snapshots.get(key)) is not None:
            known.use, known.is_shared = snapshot.use, snapshot.is_shared
            self._queue.push(known)
            return
        demoted = TierSnapshot(
            snapshot.position,
            key,
            snapshot.kind,
            snapshot.use,
            snapshot.position - above,
            is_shared=snapshot.is_shared,
            is_superseded=snapshot.is_superseded,
            is_interior=is_interior,
        )
        if not self.make_room(self.slot_blocks + (tail is not None), self.worth(demoted)):
            self.num_snapshots_refused += 1
            return
        self.enter(demoted, salt, data)
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
        if not self.slot_blocks and blocks:
            num_tokens = BLOCK_TOKENS * len(blocks)
            end = TierSnapshot(
                len(data) // TOKEN_BYTES, b"", SnapshotKind.GENERATION_END, use, num_tokens, is_shared=is_shared
            )
            if find_block(self.roots.get(salt), data, first + len(blocks)) is None:
                self.enter(end, salt, data)
        missing = self._missing(salt, data, first, blocks)
        if not missing:
            return
        num_evicted = self.num_snapshots_evicted
        self.make_room(len(missing), ANY_WORTH)
        if self.num_snapshots_evicted > num_evicted:
            # Some may not be needed any more.
            missing = self._missing(salt, data, first, blocks)
        num_free = self.num_blocks - self.num_used
        for index, node in missing[num_free:]:
            self.cut_off(node, first + index + 1)
        pairs = []
        for index, node in missing[:num_free]:
            if self.is_needed(node):
                node.address = self.take(1)
                pairs.append((BlockId(blocks[index]), node.address))
        self.num_blocks_demoted += len(pairs)
        if pairs:
            self._issue(StoreOut(self._next_transfer(), self.store, tuple(pairs), ()))

    def _missing(self, salt: str, data: bytes, first: int, blocks: Sequence[int]) -> list[tuple[int, TierBlock]]:
        """Return the nodes of these blocks that are needed and not in the tier, each with its index in ``blocks``."""
        node = find_block(self.roots.get(salt), data, first)
        missing = []
        for index, block in enumerate(blocks):
            start = (first + index) * BLOCK_KEY_BYTES
            node = None if node is None else node.children.get(data[start : start + BLOCK_KEY_BYTES])
            if node is None:
                break
            if node.address == NO_ADDRESS and block != NULL_BLOCK and self.is_needed(node):
                missing.append((index, node))
        return missing

    def enter(self, demoted: TierSnapshot, salt: str, data: bytes) -> None:
        """Put a snapshot into a salt's tree.

        Args:
            salt: the name of the tree.
            data: the tokens before the snapshot, encoded.
        """
        root = self.roots.setdefault(salt, TierBlock(None, b""))
        block = add_block(root, data, demoted.position // BLOCK_TOKENS)
        demoted.block, demoted.salt = block, salt
        block.snapshots[demoted.key] = demoted
        for node in self.needed_blocks(demoted) if self.has_windows else ():
            node.num_needers += 1
        for below in next_below(block, demoted):
            below.saved_tokens = min(below.saved_tokens, below.position - demoted.position)
        self.num_snapshots += 1
        self._queue.push(demoted)
        if self.announcer is not None:
            self.announcer.enter(demoted)

    def is_whole(self, demoted: TierSnapshot) -> bool:
        """Whether all blocks that a snapshot needs are in the tier or, unless it is persistent, on the device."""
        if self.is_persistent:
            return all(node.address != NO_ADDRESS for node in self.needed_blocks(demoted))
        return not self.returning or self.returning.keys().isdisjoint(self.needed_blocks(demoted))

    # Evicting

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._worth.now

    def worth(self, demoted: TierSnapshot) -> float:
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

    def pop(self) -> TierSnapshot | None:
        """Take the snapshot of least worth out of the queue and return it; None: none can be evicted."""
        return self._queue.pop()

    def push(self, demoted: TierSnapshot) -> None:
        """Put a snapshot into the eviction queue, if it is still in the tier."""
        if demoted.block is not None:
            self._queue.push(demoted)

    def evict(self, demoted: TierSnapshot) -> None:
        """Remove a snapshot, and count that."""
        self.num_snapshots_evicted += 1
        self.remove(demoted)

    def cut_off(self, node: TierBlock, num_blocks: int) -> None:
        """Remove the snapshots that need a lost block.

        Args:
            num_blocks: number of blocks up to and including the lost one.
        """
        for snapshot in list(node.below()):
            if self.first_needed(snapshot.position) < num_blocks:
                self.evict(snapshot)

    def remove(self, snapshot: TierSnapshot, *, is_elsewhere: bool = False) -> None:
        """Remove a snapshot and the blocks that it alone needs.

        Unless it is on the device again or in another tier, the next snapshots below now save its tokens as well.
        """
        block = snapshot.block
        if block is None:
            return
        del block.snapshots[snapshot.key]
        freed = {snapshot.address: self.slot_blocks, snapshot.tail_address: 1}
        for node in self.needed_blocks(snapshot) if self.has_windows else ():
            node.num_needers -= 1
            if not node.num_needers:
                freed[node.address], node.address = 1, NO_ADDRESS
        snapshot.block = None
        snapshot.last_push = 0
        self.num_snapshots -= 1
        if not is_elsewhere:
            self.pass_savings(block, snapshot)
        node, unlinked = block, list[TierBlock]()
        while (parent := node.parent) is not None and not node.children and not node.snapshots:
            freed[node.address] = 1
            node.unlink()
            unlinked.append(node)
            node = parent
        if self.announcer is not None:
            self.announcer.leave(snapshot, unlinked)
        above = nearest_above(node, block, snapshot)
        if above is not None:
            above.is_interior = is_elsewhere
            self._queue.push(above)
        self.free(freed)

    def pass_savings(self, block: TierBlock, gone: TierSnapshot) -> None:
        """Add the tokens that a removed snapshot saved to those below it whose nearest snapshot above it was."""
        for below in next_below(block, gone):
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
        node, snapshot, position = found
        whole, first_needed = position // BLOCK_TOKENS, self.first_needed(position)
        held = min(match.end.num_blocks, whole)
        first = max(first_needed, first_gap(match.end.run, held, first_needed))
        num_blocks = whole - first
        if snapshot is not None:
            num_blocks += self.slot_blocks + snapshot.has_tail
        if not self.costs.pays(num_blocks * self.block_bytes, position - match.position):
            return None
        addresses = [block.address for block in nodes_from(node, whole - first)] if whole > first else []
        for index, block in enumerate(path_blocks(match.end.run)[first:held] if first < held else ()):
            if block != NULL_BLOCK:
                addresses[index] = NO_ADDRESS
        offered: tuple[OfferedSnapshot, ...] = ()
        if snapshot is not None:
            offered = (OfferedSnapshot(position, snapshot.address, snapshot.kind),)
            if snapshot.tail_address:
                addresses.append(snapshot.tail_address)
        return Offer(self.store, position, first, tuple(addresses), offered)

    def gain_s(self, offer: Offer, match: Match) -> float:
        """Return how much sooner loading an offer ends than computing; infinity before that is known."""
        num_bytes = (len(offer.blocks) - offer.blocks.count(NO_ADDRESS) + self.slot_blocks) * self.block_bytes
        return self.costs.gain_s(num_bytes, offer.position - match.position)

    def find(self, salt: str, data: bytearray, match: Match) -> TierEnd | None:
        """Return where a prompt could resume beyond its hit on the device."""
        root = self.roots.get(self.tree_name(salt))
        if root is None:
            return None
        window_tokens, has_slots = self._window_tokens, self.slot_blocks > 0
        return find_end(root, data, match, window_tokens, has_slots=has_slots, is_persistent=self.is_persistent)

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

    def is_queued(self, snapshot: TierSnapshot) -> bool:
        """Whether a snapshot can be evicted: it is in the queue, or the end of a transfer will put it there."""
        return snapshot in self._queue or snapshot.num_loads > 0

    def snapshots(self) -> Iterator[TierSnapshot]:
        """Yield all snapshots of the tier."""
        for root in self.roots.values():
            yield from root.below()


def _can_evict(snapshot: TierSnapshot) -> bool:
    return snapshot.block is not None and snapshot.num_loads == 0
