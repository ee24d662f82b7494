"""A tier below the device: decides which evicted entries it stores, and which to load back.

A store (``device/stores/transfers.py``) carries out the decisions. What the device evicts is *demoted* to the first
tier, in host memory, if it is worth more than what the tier would evict for it (``demotion.py``). A snapshot and the
blocks on its path leave the device at different times, but leave the tier together: it stores a block exactly as long
as a demoted snapshot needs the block, and both return to the device in one load. The first tier drops what returns, so
the two memories hold different entries.

Further tiers are *persistent*, and each gets what leaves the one above it (``spills.py``). They store whole paths, as
nothing else outlives the process, and retain what has returned to the device, as reading is cheaper than writing again.

What enters and leaves a tier are moves (``moves.py``).

Memory is counted in blocks; a snapshot counts as many as its bytes take. Neither has a static share.

All tiers share the tree of the index (``tier_tree.py``).

Invariants, held by ``cache/inspection/invariants.py``: every block that a demoted snapshot needs is in the tier, on the
device or being loaded to it; in a persistent tier, it is in the tier or being written to it. Accounting is exact.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from strandline.cache.eviction import EvictionQueue
from strandline.cache.policy.worth import WorthPerByte
from strandline.cache.resume import Match, ResumeRule
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.neighbours import end_above, next_below
from strandline.cache.tiers.path_blocks import PathBlocks, located
from strandline.cache.tiers.paths import pieces
from strandline.cache.tiers.stored import Column, Copy, TierSnapshot
from strandline.cache.tiers.tier_tree import TierTree
from strandline.cache.tree import Run
from strandline.cache.walk import PathEnd
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS
from strandline.records.actions import Action, Completion, DropStored
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tier_stats import TierStats
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

ANY_WORTH = float("inf")


class TierEnd(NamedTuple):
    """Where a prompt could resume: at a snapshot or, without snapshots, at the end of a block."""

    copy: Copy | None
    position: int


class LowerTier:
    """The entries of one tier.

    Args:
        tree: has the column of what is in the tier.
        worth: ranks entries for eviction.
        issue: takes actions.
        next_address: returns an unused address.
        rule: where prompts resume.
    """

    def __init__(
        self,
        memory: LowerMemory,
        tree: TierTree,
        column: Column,
        worth: WorthPerByte,
        issue: Callable[[Action], None],
        next_address: Callable[[], int],
        rule: ResumeRule,
    ) -> None:
        self.store = memory.store
        self.num_blocks = memory.num_blocks
        self.num_spare_blocks = memory.num_spare_blocks
        self.is_persistent = memory.key is not None
        self.num_used = 0
        self.has_snapshots = memory.snapshots.max_blocks > 0
        """Whether prompts resume at snapshots alone."""
        self.snapshot_blocks = memory.snapshots.blocks_at
        """Returns how many blocks a snapshot at a position takes, without the one that it is inside."""
        self.block_bytes = memory.block_bytes
        self.costs = memory.costs
        self.tree = tree
        self.column = column
        self.num_snapshots = 0
        self.num_snapshots_demoted = 0
        self.num_blocks_demoted = 0
        self.num_blocks_written = 0
        """Size of all that has been stored by spills."""
        self.num_snapshots_evicted = 0
        self.num_snapshots_refused = 0
        self.num_loads = 0
        self.num_loaded_bytes = 0
        self.num_failed_loads = 0
        self._rule = rule
        self._worth = worth
        self._issue = issue
        self._queue = EvictionQueue[Copy](worth, _can_evict)
        self._next_address = next_address
        self.returning: list[PathBlocks] = []
        """Blocks on their way to the device, by load: they have left the tier and not arrived yet."""
        self.arriving: list[PathBlocks] = []
        """Blocks that are being written, by move."""
        self.num_leaving = 0
        """Blocks of memory that spills under way will free."""
        self.num_failed_stores = 0
        self.failure = ""
        """Why the last store failed."""
        self.max_free_bytes: int | None = None
        """What the disk had room for when the last store failed; None: it did not fail, or that is unknown."""
        self._readers = Counter[int]()
        """Number of transfers that read each address."""
        self.to_free: dict[int, int] = {}
        """Sizes of addresses to free when the transfers that read them have ended."""

    # What is needed

    def is_needed(self, run: Run, index: int) -> bool:
        """Whether a snapshot of the tier needs a block of a run, given by its index in the run."""
        return index < self.column.num_blocks_in(run)

    def is_lacking(self, run: Run, index: int) -> bool:
        """Whether a snapshot of the tier needs a block that is not stored."""
        return self.is_needed(run, index) and self.column.addresses_in(run)[index] == NO_ADDRESS

    def is_stored(self, demoted: TierSnapshot) -> bool:
        """Whether all blocks that a snapshot needs are stored."""
        return all(
            NO_ADDRESS not in self.column.addresses_in(run)[start:end] for run, start, end in pieces(demoted.end)
        )

    # Finding

    def copy_of(self, tree: str, data: bytes | bytearray, position: int) -> Copy | None:
        """Return the tier's copy of the snapshot at a position of a path of encoded tokens, if it has one."""
        num_blocks = position // BLOCK_TOKENS
        end = self.tree.find(tree, data, num_blocks)
        key = num_blocks, bytes(data[num_blocks * BLOCK_KEY_BYTES : position * TOKEN_BYTES])
        return None if end is None else self.column.copy(end.run, key)

    def needing(self, tree: str, data: bytearray) -> Copy:
        """Return a copy that needs what the tier offers: that at the end or, without snapshots, one at or below it.

        Args:
            data: the tokens of what is offered, encoded.
        """
        num_blocks, copy = len(data) // BLOCK_KEY_BYTES, None
        if self.has_snapshots:
            copy = self.copy_of(tree, data, len(data) // TOKEN_BYTES)
        elif (end := self.tree.find(tree, data, num_blocks)) is not None:
            copy = next(self.column.below(*end), None)
        if copy is None:
            raise CacheInvariantError(f"what {self.store} offered up to block {num_blocks} is not needed there")
        return copy

    # Entering

    def enter(self, demoted: Copy) -> None:
        """Put a copy of a snapshot into the tier."""
        snapshot = demoted.snapshot = self.tree.attach(demoted.snapshot)
        self.column.enter(demoted)
        for below in next_below(self.column, snapshot):
            below.saved_tokens = min(below.saved_tokens, below.position - demoted.position)
        self.num_snapshots += 1
        self._queue.push(demoted)

    def is_whole(self, demoted: TierSnapshot) -> bool:
        """Whether all blocks that a snapshot needs are in the tier or, unless it is persistent, on the device."""
        if self.is_persistent:
            return self.is_stored(demoted)
        returning = located(self.returning)
        needed = pieces(demoted.end) if returning else ()
        return not any((run, index) in returning for run, start, end in needed for index in range(start, end))

    def blocks_of(self, snapshot: TierSnapshot) -> int:
        """Return how many blocks a snapshot takes with the one that it is inside, which is stored whole."""
        return self.snapshot_blocks(snapshot.position) + snapshot.has_tail

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

    def cut_off(self, run: Run, num_blocks: int) -> None:
        """Remove the snapshots that need a lost block of a run.

        Args:
            num_blocks: number of blocks of the path up to and including the lost one.
        """
        for copy in list(self.column.below(run, num_blocks)):
            self.evict(copy)

    def cut_off_lost(self, blocks: PathBlocks) -> None:
        """Remove the snapshots that need those of some blocks that neither are in the tier nor will be."""
        arriving = located(self.arriving)
        for index, block in blocks.locate().items():
            if self.is_lacking(*block) and block not in arriving:
                self.cut_off(block[0], index + 1)

    def remove(self, demoted: Copy, *, is_elsewhere: bool = False) -> None:
        """Remove a copy of a snapshot, and the blocks that it alone needs.

        Unless it is on the device again or in another tier, the next snapshots below now save its tokens as well.
        """
        snapshot, column = demoted.snapshot, self.column
        if demoted.column is None:
            return
        freed = {demoted.address: self.snapshot_blocks(demoted.position), demoted.tail_address: 1}
        alone = column.blocks_for(demoted)
        for run, start, end in alone:
            freed |= dict.fromkeys(reversed(column.addresses_in(run)[start:end]), 1)
        left = column.leave(demoted, alone)
        self.num_snapshots -= 1
        if not is_elsewhere:
            self.pass_savings(demoted)
        above = end_above(column, left, snapshot)
        self.tree.detach(snapshot)
        if above is not None:
            above.is_interior = is_elsewhere
            self._queue.push(above)
        self.free(freed)

    def pass_savings(self, gone: Copy) -> None:
        """Add the tokens that a removed snapshot saved to those below it whose nearest snapshot above it was."""
        for below in next_below(self.column, gone.snapshot):
            if below.saved_tokens == below.position - gone.position:
                below.saved_tokens += gone.saved_tokens

    def num_freed_by(self, demoted: Copy) -> int:
        """Return how much memory removing a snapshot would free, in blocks."""
        num_blocks = self.blocks_of(demoted.snapshot)
        for run, start, end in self.column.blocks_for(demoted):
            addresses = self.column.addresses_in(run)[start:end]
            num_blocks += len(addresses) - addresses.count(NO_ADDRESS)
        return num_blocks

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
        read = [address for address in addresses if address in self.to_free and address not in self._readers]
        self.free({address: self.to_free.pop(address) for address in read})

    # Loading

    def offer(self, data: bytearray, match: Match) -> Offer | None:
        """Return what the tier has of a prompt beyond its hit on the device, if loading it pays. Changes nothing."""
        found = self.find(data, match)
        if found is None:
            return None
        copy, position = found
        whole = position // BLOCK_TOKENS
        first = min(match.walked.num_blocks, whole)
        num_blocks = whole - first
        if copy is not None:
            num_blocks += self.blocks_of(copy.snapshot)
        if not self.costs.pays(num_blocks * self.block_bytes, position - match.position):
            return None
        addresses = self.column.addresses(match.walked.last, first)[: whole - first].tolist()
        offered: tuple[OfferedSnapshot, ...] = ()
        if copy is not None:
            offered = (OfferedSnapshot(position, copy.address, copy.kind),)
            if copy.tail_address:
                addresses.append(copy.tail_address)
        # The first tier drops what it gives, so its loads are not given up.
        limit_s = self.costs.limit_s(position - match.position) if self.is_persistent else float("inf")
        return Offer(self.store, position, first, tuple(addresses), offered, limit_s)

    def gain_s(self, offer: Offer, match: Match) -> float:
        """Return how much sooner loading an offer ends than computing; infinity before that is known."""
        num_blocks = len(offer.blocks) - offer.blocks.count(NO_ADDRESS) + self.snapshot_blocks(offer.position)
        return self.costs.gain_s(num_blocks * self.block_bytes, offer.position - match.position)

    def find(self, data: bytearray, match: Match) -> TierEnd | None:
        """Return the deepest position at which a prompt could resume beyond its hit on the device, or None."""
        end = self.column.last_on_path(match.walked.last)
        addresses, lacking = self.column.addresses(end), end.depth
        for found in self._ends_on(end, data, match):
            num_blocks = found.position // BLOCK_TOKENS
            # In the first tier, what it needs and the tier does not have is on the device, up to the last block.
            first = 0 if self.is_persistent else max(num_blocks - 1, 0)
            if first <= lacking < num_blocks:
                continue
            lacking = first_lacking(addresses, match, first, num_blocks)
            if lacking >= num_blocks:
                return found
        return None

    def _ends_on(self, end: PathEnd, data: bytearray, match: Match) -> Iterator[TierEnd]:
        """Yield where a prompt could resume, as far as that depends on snapshots alone, deepest first."""
        if self.has_snapshots:
            for copy in self.column.copies_on(end, data, beyond=match.position):
                if copy.address and self._rule.resumes_at(data, copy.position) > match.position:
                    yield TierEnd(copy, copy.position)
            return
        for num_blocks in range(end.depth, -1, -1):
            position = num_blocks * BLOCK_TOKENS
            if position <= match.walked.kv_tokens:
                return
            if self._rule.resumes_at(data, position) > match.position:
                yield TierEnd(None, position)

    def count_load(self, num_blocks: int, completion: Completion) -> None:
        """Count the end of a load of this many blocks, snapshots included."""
        if completion.is_done:
            num_bytes = num_blocks * self.block_bytes
            self.num_loads += 1
            self.num_loaded_bytes += num_bytes
            self.costs.observe_load(num_bytes, completion.seconds)
        else:
            self.num_failed_loads += 1
            if not completion.lost:
                self.costs.observe_failure(completion.seconds)

    # Reading

    def stats(self) -> TierStats:
        """Return all figures of the tier."""
        free_bytes = (self.num_blocks - self.num_used) * self.block_bytes
        return TierStats(
            self.store,
            self.num_blocks * self.block_bytes,
            self.num_used * self.block_bytes,
            free_bytes if self.max_free_bytes is None else min(free_bytes, self.max_free_bytes),
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
        return demoted in self._queue or demoted.num_moves > 0

    def snapshots(self) -> Iterator[Copy]:
        """Yield all snapshots of the tier."""
        for root in self.tree.roots.values():
            yield from self.column.below(root)


def first_lacking(addresses: Sequence[int], match: Match, first: int, end: int) -> int:
    """Return the first block in ``[first, end)`` that has no address and is not on the device; else ``end``."""
    for index, address in enumerate(addresses[first:end], first):
        if address == NO_ADDRESS and index >= match.walked.num_blocks:
            return index
    return end


def _can_evict(demoted: Copy) -> bool:
    return demoted.column is not None and demoted.num_moves == 0
