"""A tier below the device: what becomes of evicted blocks and snapshots, and what is loaded again.

The tier decides; a store (``device/transfers.py``) obeys. What the device evicts is *demoted* to the first tier, in
host memory, if it is worth more than what that would evict for it. A snapshot and the blocks on its path leave the
device at different times, but rest together: a block is kept exactly as long as a resting snapshot needs it, and they
return to the device in one load (``cache/tier_loads.py``). What returns does not rest any more, so that both memories
hold different things.

The second tier, a *persistent* one, gets what leaves the first (``cache/spills.py``). It holds whole paths, as nothing
else outlives the process, and keeps what has returned to the device, as reading is cheaper than writing again.

Memory is counted in blocks; a slot takes as many as its bytes at rest need. There is no static share of either.

Where attention has windows, a snapshot needs the blocks of its window alone, and no others rest.

Invariants, held by ``cache/inspection/invariants.py``: every block that a resting snapshot needs is at rest, on the
device or on its way there, in a persistent tier at rest or on its way there; accounting is exact.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

from strandline.cache.eviction import EvictionQueue
from strandline.cache.policy.resume_rules import first_gap
from strandline.cache.resume import Match, first_block_seen
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.resting import (
    NO_PLACE,
    RestingBlock,
    RestingSnapshot,
    add_block,
    find_block,
    nearest_above,
    next_below,
    nodes_from,
)
from strandline.cache.tiers.resting_announcer import RestingAnnouncer
from strandline.cache.tiers.resting_lookups import RestingEnd, find_end, position_above
from strandline.cache.tiers.stats import LowerStats
from strandline.cache.tiers.worth import RestingWorth
from strandline.cache.tree import Snapshot, path_blocks
from strandline.cache.use import Use
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, BlockId, SlotId, TransferId
from strandline.records.account import SnapshotKind
from strandline.records.actions import Action, DropStored, StoreOut
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

CERTAIN = float("inf")


class LowerTier:
    """What rests below the device.

    Args:
        worth: ranks what is evicted.
        issue: takes actions.
        next_transfer: numbers transfers.
        next_place: numbers places.
        window_tokens: tokens before a snapshot that resuming there reads, itself among them; None: all.
    """

    def __init__(
        self,
        memory: LowerMemory,
        worth: RestingWorth,
        issue: Callable[[Action], None],
        next_transfer: Callable[[], TransferId],
        next_place: Callable[[], int],
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
        self.roots: dict[str, RestingBlock] = {}
        self.announcer: RestingAnnouncer | None = None
        """Emits events of what rests; None: there are none."""
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
        self._queue = EvictionQueue[RestingSnapshot](worth, _can_evict)
        self._next_place = next_place
        self.returning = Counter[RestingBlock]()
        """Blocks that loads bring to the device: they do not rest any more, and are not there yet. By number of loads.
        """
        self._readers = Counter[int]()
        """Transfers that read a place."""
        self.doomed: dict[int, int] = {}
        """Sizes of places that are to be freed when they are not read any more."""

    def tree_name(self, salt: str) -> str:
        """Return the name of a salt's tree: the salt or, where files outlive the process, a keyed hash of it."""
        if self._key is None:
            return salt
        return blake2b(salt.encode(errors="surrogatepass"), key=self._key, digest_size=16).hexdigest()

    # What is needed

    def first_needed(self, position: int) -> int:
        """Return the first block that resuming at a position reads."""
        return first_block_seen(position, self._window_tokens)

    def needed_blocks(self, resting: RestingSnapshot) -> list[RestingBlock]:
        """Return the whole blocks that a snapshot needs, in order."""
        return resting.last_blocks(resting.position // BLOCK_TOKENS - self.first_needed(resting.position))

    def is_needed(self, node: RestingBlock) -> bool:
        """Whether a resting snapshot needs a block."""
        return node.num_needers > 0 if self.has_windows else node.parent is not None

    # Demoting

    def demote_snapshot(
        self, snapshot: Snapshot, salt: str, data: bytes, tail: int | None, above: int, *, is_interior: bool
    ) -> None:
        """Take in a snapshot that the device evicts, if it is worth it.

        Args:
            data: the tokens before it, encoded.
            tail: the device's block that it lies inside; None: it lies at a block's end.
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
        resting = RestingSnapshot(
            snapshot.position,
            key,
            snapshot.kind,
            snapshot.use,
            snapshot.position - above,
            is_shared=snapshot.is_shared,
            is_superseded=snapshot.is_superseded,
            is_interior=is_interior,
        )
        if not self.make_room(self.slot_blocks + (tail is not None), self.worth(resting)):
            self.num_snapshots_refused += 1
            return
        self.enter(resting, salt, data)
        resting.place = self.take(self.slot_blocks)
        blocks: tuple[tuple[BlockId, int], ...] = ()
        if tail is not None:
            resting.tail_place = self.take(1)
            blocks = ((BlockId(tail), resting.tail_place),)
        self.num_snapshots_demoted += 1
        self._issue(StoreOut(self._next_transfer(), self.store, blocks, ((SlotId(snapshot.slot), resting.place),)))

    def demote_blocks(
        self, salt: str, data: bytes, first: int, blocks: Sequence[int], *, use: Use, is_shared: bool
    ) -> None:
        """Take in those of a path's blocks that the device evicts and that resting snapshots need.

        Without states all are needed: their end counts as a snapshot that takes no memory.

        Args:
            data: the tokens of the path to the end of the blocks, encoded.
            first: the index of the first one in the path.
            blocks: with null blocks for those that stay on the device, or are not there.
            use, is_shared: of the run that they belong to.
        """
        if not self.slot_blocks and blocks:
            num_tokens = BLOCK_TOKENS * len(blocks)
            end = RestingSnapshot(
                len(data) // TOKEN_BYTES, b"", SnapshotKind.GENERATION_END, use, num_tokens, is_shared=is_shared
            )
            if find_block(self.roots.get(salt), data, first + len(blocks)) is None:
                self.enter(end, salt, data)
        missing = self._missing(salt, data, first, blocks)
        if not missing:
            return
        num_evicted = self.num_snapshots_evicted
        self.make_room(len(missing), CERTAIN)
        if self.num_snapshots_evicted > num_evicted:
            # Some may not be needed any more.
            missing = self._missing(salt, data, first, blocks)
        num_free = self.num_blocks - self.num_used
        for index, node in missing[num_free:]:
            self.cut_off(node, first + index + 1)
        pairs = []
        for index, node in missing[:num_free]:
            if self.is_needed(node):
                node.place = self.take(1)
                pairs.append((BlockId(blocks[index]), node.place))
        self.num_blocks_demoted += len(pairs)
        if pairs:
            self._issue(StoreOut(self._next_transfer(), self.store, tuple(pairs), ()))

    def _missing(self, salt: str, data: bytes, first: int, blocks: Sequence[int]) -> list[tuple[int, RestingBlock]]:
        """Return the nodes of these blocks that are needed and not at rest, each with its index among them."""
        node = find_block(self.roots.get(salt), data, first)
        missing = []
        for index, block in enumerate(blocks):
            start = (first + index) * BLOCK_KEY_BYTES
            node = None if node is None else node.children.get(data[start : start + BLOCK_KEY_BYTES])
            if node is None:
                break
            if node.place == NO_PLACE and block != NULL_BLOCK and self.is_needed(node):
                missing.append((index, node))
        return missing

    def enter(self, resting: RestingSnapshot, salt: str, data: bytes) -> None:
        """Put a snapshot into a salt's tree.

        Args:
            salt: the name of the tree.
            data: the tokens before the snapshot, encoded.
        """
        root = self.roots.setdefault(salt, RestingBlock(None, b""))
        block = add_block(root, data, resting.position // BLOCK_TOKENS)
        resting.block, resting.salt = block, salt
        block.snapshots[resting.key] = resting
        for node in self.needed_blocks(resting) if self.has_windows else ():
            node.num_needers += 1
        for below in next_below(block, resting):
            below.saved_tokens = min(below.saved_tokens, below.position - resting.position)
        self.num_snapshots += 1
        self._queue.push(resting)
        if self.announcer is not None:
            self.announcer.enter(resting)

    def is_whole(self, resting: RestingSnapshot) -> bool:
        """Whether all blocks that a snapshot needs are at rest or on the device."""
        return not self.returning or self.returning.keys().isdisjoint(self.needed_blocks(resting))

    # Evicting

    @property
    def now(self) -> int:
        """The time of the reuse history."""
        return self._worth.now

    def worth(self, resting: RestingSnapshot) -> float:
        """Return what a snapshot is worth, to compare with others."""
        return self._worth.worth(resting)

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

    def pop(self) -> RestingSnapshot | None:
        """Return the snapshot that is worth least, and take it out of the queue; None: none can be evicted."""
        return self._queue.pop()

    def push(self, resting: RestingSnapshot) -> None:
        """Put a snapshot into the queue, unless it does not rest any more."""
        if resting.block is not None:
            self._queue.push(resting)

    def evict(self, resting: RestingSnapshot) -> None:
        """Remove a snapshot, and count that."""
        self.num_snapshots_evicted += 1
        self.remove(resting)

    def cut_off(self, node: RestingBlock, num_blocks: int) -> None:
        """Remove the snapshots that need a block which is lost.

        Args:
            num_blocks: of the path to its end.
        """
        for snapshot in list(node.below()):
            if self.first_needed(snapshot.position) < num_blocks:
                self.evict(snapshot)

    def remove(self, snapshot: RestingSnapshot, *, is_elsewhere: bool = False) -> None:
        """Remove a snapshot and the blocks that it alone needs.

        Unless it is on the device again, or in another tier, the next ones below save what it saved from now on, too.
        """
        block = snapshot.block
        if block is None:
            return
        del block.snapshots[snapshot.key]
        freed = {snapshot.place: self.slot_blocks, snapshot.tail_place: 1}
        for node in self.needed_blocks(snapshot) if self.has_windows else ():
            node.num_needers -= 1
            if not node.num_needers:
                freed[node.place], node.place = 1, NO_PLACE
        snapshot.block = None
        snapshot.last_push = 0
        self.num_snapshots -= 1
        if not is_elsewhere:
            self.pass_savings(block, snapshot)
        node, unlinked = block, list[RestingBlock]()
        while (parent := node.parent) is not None and not node.children and not node.snapshots:
            freed[node.place] = 1
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

    def pass_savings(self, block: RestingBlock, gone: RestingSnapshot) -> None:
        """Let the next snapshots below one that lay after a block save what it saved, if it was the nearest above."""
        for below in next_below(block, gone):
            if below.saved_tokens == below.position - gone.position:
                below.saved_tokens += gone.saved_tokens

    def take(self, num_blocks: int) -> int:
        """Allocate memory; return its place."""
        self.num_used += num_blocks
        return self._next_place()

    def free(self, sizes: dict[int, int]) -> None:
        """Free places of these sizes: now, or when the transfers that read them have ended."""
        sizes.pop(NO_PLACE, None)
        for place in [place for place in sizes if place in self._readers]:
            self.doomed[place] = sizes.pop(place)
        if sizes:
            self.num_used -= sum(sizes.values())
            self._issue(DropStored(self.store, tuple(sizes)))

    def begin_reading(self, places: Iterable[int]) -> None:
        """Keep places until they have been read."""
        self._readers.update(places)

    def end_reading(self, places: Iterable[int]) -> None:
        """Free those of the places that were to be freed meanwhile."""
        places = tuple(places)
        self._readers.subtract(places)
        self._readers = +self._readers
        self.free({place: self.doomed.pop(place) for place in places if self._is_unread_and_doomed(place)})

    def _is_unread_and_doomed(self, place: int) -> bool:
        return place in self.doomed and place not in self._readers

    # Loading

    def offer(self, salt: str, data: bytearray, match: Match) -> Offer | None:
        """Return what rests of a prompt beyond its hit on the device, if loading it pays. Changes nothing."""
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
        places = [block.place for block in nodes_from(node, whole - first)] if whole > first else []
        for index, block in enumerate(path_blocks(match.end.run)[first:held] if first < held else ()):
            if block != NULL_BLOCK:
                places[index] = NO_PLACE
        offered: tuple[OfferedSnapshot, ...] = ()
        if snapshot is not None:
            offered = (OfferedSnapshot(position, snapshot.place, snapshot.kind),)
            if snapshot.tail_place:
                places.append(snapshot.tail_place)
        return Offer(self.store, position, first, tuple(places), offered)

    def gain_s(self, offer: Offer, match: Match) -> float:
        """Return how much sooner loading an offer ends than computing; infinity before that is known."""
        num_bytes = (len(offer.blocks) - offer.blocks.count(NO_PLACE) + self.slot_blocks) * self.block_bytes
        return self.costs.gain_s(num_bytes, offer.position - match.position)

    def find(self, salt: str, data: bytearray, match: Match) -> RestingEnd | None:
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

    def is_queued(self, snapshot: RestingSnapshot) -> bool:
        """Whether a snapshot can be evicted some day: it is in the queue, or a transfer's end will put it there."""
        return snapshot in self._queue or snapshot.num_loads > 0

    def snapshots(self) -> Iterator[RestingSnapshot]:
        """Yield all that rest."""
        for root in self.roots.values():
            yield from root.below()


def _can_evict(snapshot: RestingSnapshot) -> bool:
    return snapshot.block is not None and snapshot.num_loads == 0
