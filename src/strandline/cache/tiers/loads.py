"""Loads: prefixes whose bytes are on their way into the device's memory, from a store below it or from a peer.

A load is a lease without a request: its blocks and its snapshots' slots are filled by one transfer or several, and
published when all have ended well. Until then a request that needs them follows the load, as it would follow a running
request.

Invariants: what a transfer writes is held until its completion, also if the request that it was begun for has ended;
nothing of a load is published, and so nothing can be read, before all of it has arrived.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import Final, NamedTuple

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.core import PrefixCache
from strandline.cache.holds import Holds
from strandline.cache.lease import Cut, Lead, Lease
from strandline.cache.policy.worth import WorthPerByte
from strandline.cache.resume import NO_MATCH, Match
from strandline.cache.tiers.adoption import adopt, last_address
from strandline.cache.tiers.flush import Flush
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.spills import Spills
from strandline.cache.tiers.stats import LowerStats
from strandline.cache.tiers.stored_windows import ids_of, let_go, num_slabs_for, take_window
from strandline.cache.tiers.tier_announcer import TierAnnouncer
from strandline.cache.tiers.tier_load import TierLoad
from strandline.cache.tiers.tier_tree import PathEnd, TierTree
from strandline.cache.tree import Run, find_home, path_blocks, snapshot_at
from strandline.cache.use import UseHistory
from strandline.cache.walk import Walk, walk
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NULL_SLOT, BlockId, RequestId, TransferId
from strandline.records.account import UNCOUNTED
from strandline.records.actions import CancelTransfer, Completion, LoadIn, MoveBlock, SnapshotCopy, StoreOut
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, TokenBuffer, common_tokens

PIECE_SLABS: Final = 2
"""Size of the transfers of a load whose memory is exchanged (``cache/tiers/tier_load.py``), in slabs."""
MIN_PIECE_BLOCKS: Final = 16
"""Their size in blocks, at least."""


class Loads:
    """The tiers of a cache, and the loads under way from them and from other stores.

    Args:
        lower: memories below the device, nearest first. All but the first are persistent.
        announcer: the one of the cache, which collects the tiers' events as well; None: events are off.
    """

    def __init__(
        self, cache: PrefixCache, lower: Sequence[LowerMemory] = (), *, announcer: Announcer | None = None
    ) -> None:
        parts = cache.internals()
        self._memory = parts.memory
        self._index = parts.index
        self._publisher = parts.publisher
        self._counters = parts.counters.loads
        self._leases = parts.leases
        self._num_slots = parts.states.num_slots
        """Slots that a request needs, and a snapshot that is loaded for it."""
        self._rule = parts.rule
        self._loads: dict[RequestId, _Load] = {}
        """By the name of the lease."""
        self._load_of: dict[TransferId, _Load] = {}
        """By transfer under way."""
        self._num_transfers = 0
        self.tiers = self._new_tiers(lower if cache.is_enabled else (), parts.reuse, announcer)
        """Nearest first."""
        self._tier_of = {tier.store: tier for tier in self.tiers}
        """By the name of its store."""
        holds, issue = Holds(cache), self._memory.issue
        self.spills = tuple(Spills(*pair, issue, holds, self.next_transfer) for pair in pairwise(self.tiers))
        """The spills from each tier to the next."""
        self.flush: Flush | None = None
        """Replaces the spills before the process ends."""
        cache.attach(self)

    @property
    def first_tier(self) -> LowerTier | None:
        """The tier that takes in what the device evicts; None: there are no tiers."""
        return self.tiers[0] if self.tiers else None

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Lease]:
        return (load.lease for load in self._loads.values())

    def next_transfer(self) -> TransferId:
        """Return a number for a transfer, of any kind."""
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def find(self, root: Run | None, tokens: TokenBuffer, beyond: int) -> Lead | None:
        """Return the load that brings the longest prefix of a prompt, if longer than ``beyond``. Changes nothing."""
        best: Lead | None = None
        for load in self._loads.values():
            lease = load.lease
            if lease.root is root:
                for position in load.positions:
                    is_longer = position > (best.position if best else beyond)
                    if is_longer and tokens.data.startswith(lease.tokens.slice(0, position)):
                        best = Lead(lease, position)
        return best

    def _new_tiers(
        self, memories: Sequence[LowerMemory], reuse: UseHistory, announcer: Announcer | None
    ) -> tuple[LowerTier, ...]:
        """Return the tiers below the device, with what their memories hold from an earlier process."""
        addresses = partial(next, count(1 + max((last_address(memory.kept) for memory in memories), default=0)))
        issue, next_transfer, rule = self._memory.issue, self.next_transfer, self._rule
        tree = TierTree(len(memories), next((memory.key for memory in memories if memory.key is not None), None))
        tiers = tuple(
            LowerTier(
                memory, column, WorthPerByte(memory.snapshots.blocks_at, reuse), issue, next_transfer, addresses, rule
            )
            for memory, column in zip(memories, tree.columns, strict=True)
        )
        for tier, memory in zip(tiers, memories, strict=True):
            adopt(tier, memory.kept, reuse)
        if announcer is not None and tiers:
            below = TierAnnouncer(announcer.emit, tree, needs_snapshots=self._rule.needs_snapshots)
            tree.on_entered, tree.on_left = below.enter, below.leave
            announcer.add(below)
        return tiers

    def resumable_tokens(self, salt: str, data: bytearray, match: Match) -> int:
        """Return the deepest position at which a prompt could resume after a load from a tier, or 0."""
        return max(self.positions(salt, data, match).values(), default=0)

    def positions(self, salt: str, data: bytearray, match: Match) -> dict[str, int]:
        """Return the deepest position at which a prompt could resume after a load from each tier, by its store."""
        end = self._end_below(salt, data)
        found = {tier.store: tier.find(end, data, match) for tier in self.tiers} if end is not None else {}
        ends = {store: where.position for store, where in found.items() if where is not None}
        return {store: self._rule.resumes_at(data, position) for store, position in ends.items()}

    def _end_below(self, salt: str, data: bytearray) -> PathEnd | None:
        """Return how much of a prompt the tiers have; None: they have nothing of its salt."""
        if not self.tiers:
            return None
        tree = self.tiers[0].tree
        return tree.walk(tree.name(salt), data, len(data) // BLOCK_KEY_BYTES)

    def stats(self) -> tuple[LowerStats, ...]:
        """Return the figures of the tiers, nearest first."""
        return tuple(tier.stats() for tier in self.tiers)

    def tier_offer(self, tokens: TokenBuffer, salt: str = "") -> Offer | None:
        """Return what a tier has of a prompt, if loading it is faster than computing. Changes nothing.

        Of several tiers, the one whose load saves most time makes the offer; before that is known, the one that has
        most of the prompt.
        """
        end = self._end_below(salt, tokens.data)
        if end is None:
            return None
        match = self._index.match(salt, tokens.data) or NO_MATCH
        best: Offer | None = None
        best_gain = float("-inf"), 0
        for tier in self.tiers:
            offer = tier.offer(end, tokens.data, match)
            if offer is not None and (gain := (tier.gain_s(offer, match), offer.position)) > best_gain:
                best, best_gain = offer, gain
        return best

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took that computed this many tokens of prompts, to weigh loads against."""
        for tier in self.tiers:
            tier.costs.observe_prefill(num_tokens, seconds)

    def begin_spills(self) -> None:
        """Begin to spill what the tiers will have no memory for or, in a flush, all that would be lost."""
        if self.flush is not None:
            self.flush.begin()
            return
        for spills in self.spills:
            spills.begin()

    def begin_flush(self) -> Flush | None:
        """Start writing what only the device or the first tier has to the second, which is persistent; None: none is.

        No step runs and no request is admitted any more.
        """
        if self.spills:
            self.flush = Flush(self._index, self.tiers[0], self.spills[0])
        return self.flush

    def is_lacking(self, tokens: TokenBuffer, offer: Offer, salt: str = "") -> bool:
        """Return whether a prompt could resume at the end of an offer only after loading it. Changes nothing."""
        return self.count_lacking(tokens, offer, salt) is not None

    def count_lacking(self, tokens: TokenBuffer, offer: Offer, salt: str = "") -> tuple[int, int] | None:
        """Return how many blocks and snapshots loading an offer brings; None: it is not lacking. Changes nothing."""
        data = tokens.data[: offer.position * TOKEN_BYTES]
        root = self._index.roots.get(salt) or Run(None, 0, b"", array("i"))
        lacking = _lacking(root, data, offer)
        return None if lacking is None else (len(lacking.addresses), len(lacking.snapshots))

    def find_shared(self, tokens: TokenBuffer, offer: Offer, salt: str = "", *, beyond: int = 0) -> Lead | None:
        """Find the load that brings most blocks of an offer which the device lacks, to load the others after it.

        Args:
            beyond: ignore loads that share no more tokens of the prompt than this.
        """
        root = self._index.roots.get(salt)
        same_root = [load.lease for load in self._loads.values() if load.lease.root is root]
        if root is None or not same_root:
            return None
        data = tokens.data[: offer.position * TOKEN_BYTES]
        num_known = max(walk(root, data).num_blocks * BLOCK_TOKENS, beyond)
        lease = max(same_root, key=lambda each: common_tokens(each.tokens.data, data))
        num_shared = common_tokens(lease.tokens.data, data)
        return Lead(lease, num_shared) if num_shared - num_shared % BLOCK_TOKENS > num_known else None

    def begin(self, tokens: TokenBuffer, offer: Offer, salt: str = "", *, step_tokens: int = 1) -> Lead | None:
        """Begin to load what the device lacks of an offer into newly allocated blocks and slots, by actions.

        A request that needs it follows the returned lead. Once that is not pending any more, what was loaded is found
        by ``lookup`` and ``admit`` like anything cached, or the load has failed (``complete``).

        Args:
            tokens: a prompt that begins with what is offered.
            step_tokens: tokens of the request's first step, for which there must be memory as well, and for a slot.

        Returns:
            None when nothing is lacking (``is_lacking``) or memory does not suffice.
        """
        resumed = self._rule.resumes_at(tokens.data, offer.position) or offer.position
        last = min(len(tokens), resumed + step_tokens)
        num_spare_blocks = -(-last // BLOCK_TOKENS) - resumed // BLOCK_TOKENS
        root = self._index.root(salt)
        data = tokens.data[: offer.position * TOKEN_BYTES]
        lacking = _lacking(root, data, offer)
        if lacking is None:
            return None
        end, addresses, missing = lacking
        memory = self._memory
        upper = self._index.split_at(Walk(end.run, end.num_blocks, None, 0))
        memory.pin_run(upper)
        num_slabs = sum(self._num_slots + num_slabs_for(memory.windows, each.position) for each in missing)
        num_window_blocks = memory.windows.num_to_resume(resumed, last)
        if not memory.can_take(len(addresses) + num_spare_blocks, num_slabs + self._num_slots, num_window_blocks):
            memory.unpin_run(upper)
            return None
        # Before memory is allocated: what the device evicts for it may push out tier entries, also those to be loaded.
        lease = self._new_lease(salt, data, root, upper)
        tier = self._tier_of.get(offer.store)
        read = [*addresses.values(), *(snapshot.address for snapshot in missing)]
        source = None if tier is None else TierLoad(tier, lease, read)
        num_actions = len(memory.actions)
        lease.cuts = [self._new_cut(each) for each in missing]
        load = _Load(lease, source, tuple(x.position for x in missing) or (offer.position,))
        self._loads[lease.request_id] = load
        to_slots = tuple(
            SnapshotCopy(cut.slot, snapshot.address, ids_of(cut.window))
            for cut, snapshot in zip(lease.cuts, missing, strict=True)
        )
        piece_blocks = max(PIECE_SLABS * memory.allocator.blocks_per_slab, MIN_PIECE_BLOCKS)
        is_exchange = source is not None and source.is_exchange
        for some in _pieces(list(addresses.values()), piece_blocks if is_exchange else None):
            self._begin_piece(load, offer.store, some, to_slots)
            to_slots = ()
        if source is not None:
            source.finish_exchange()
            self._mark_held(load, num_actions)
        lease.table += load.blocks
        return Lead(lease, offer.position)

    def _new_cut(self, snapshot: OfferedSnapshot) -> Cut:
        """Allocate what a snapshot is loaded into."""
        slot = self._memory.take_promised_slot() if self._num_slots else NULL_SLOT
        return Cut(snapshot.position, slot, snapshot.kind, take_window(self._memory, snapshot.position))

    def _begin_piece(
        self, load: "_Load", store: str, addresses: Sequence[int], to_slots: tuple[SnapshotCopy, ...]
    ) -> None:
        """Allocate blocks for these addresses, and begin to load them and slots."""
        memory, lease = self._memory, load.lease
        blocks = memory.take_promised_blocks(len(addresses))
        memory.allocator.hold(blocks)
        load.blocks += blocks
        transfer = self.next_transfer()
        lease.transfer = lease.transfer or transfer
        load.pending.add(transfer)
        self._load_of[transfer] = load
        to_blocks = tuple((BlockId(block), address) for block, address in zip(blocks, addresses, strict=True))
        memory.actions.append(LoadIn(transfer, store, to_blocks, to_slots))
        if load.source is not None:
            load.source.exchange([*addresses, *(each.address for each in to_slots)])

    def _mark_held(self, load: "_Load", first: int) -> None:
        """Mark the stores among the actions from ``first`` on whose sources only the load will write."""
        actions, size = self._memory.actions, self._memory.allocator.blocks_per_slab
        slots = {cut.slot for cut in load.lease.cuts} - {NULL_SLOT}
        blocks = set(load.blocks).union(*(range(slot * size, (slot + 1) * size) for slot in slots))
        for index in range(len(actions) - 1, first - 1, -1):
            action = actions[index]
            if isinstance(action, MoveBlock):
                return
            if isinstance(action, StoreOut) and action.path is None:
                sources: list[int] = [block for block, _ in action.blocks]
                for slot, *_ in action.snapshots:
                    sources += range(slot * size, (slot + 1) * size)
                has_window = any(each.window for each in action.snapshots)
                if not has_window and blocks.issuperset(sources):
                    actions[index] = replace(action, is_held=True)

    def _new_lease(self, salt: str, data: bytearray, root: Run, upper: Run) -> Lease:
        tokens = TokenBuffer()
        tokens.data = bytearray(data)
        name = RequestId(f"load {self._num_transfers + 1}")
        lease = self._leases[name] = Lease(name, tokens, salt, root, upper, UNCOUNTED)
        lease.table = path_blocks(upper)
        lease.num_published = len(lease.table)
        lease.kv_start = lease.num_published * BLOCK_TOKENS
        return lease

    def find_lease(self, transfer: TransferId) -> Lease | None:
        """Return the lease of the load that a transfer belongs to; None: it has ended, or is no load."""
        load = self._load_of.get(transfer)
        return None if load is None else load.lease

    def cancel(self, lead: Lead) -> None:
        """Ask for the early end of a load that no request follows any more; its memory is freed on completion."""
        load = self._loads.get(lead.lease.request_id)
        for transfer in sorted(load.pending if load is not None and load.lease is lead.lease else ()):
            self._memory.actions.append(CancelTransfer(transfer))

    def complete(self, completion: Completion) -> "EndedLoad | None":
        """Handle the end of a transfer. After the last one of a load, publish what it has brought or free its memory.

        If one transfer has failed, nothing is published.

        Returns:
            The load that has ended; None if none has.

        Raises:
            CacheInvariantError: no such transfer was begun.
        """
        if not 0 < completion.transfer <= self._num_transfers:
            raise CacheInvariantError(f"transfer {completion.transfer} ended but had not begun")
        load = self._load_of.pop(completion.transfer, None)
        if load is None:
            for spills in self.spills:
                spills.complete(completion)
            return None
        load.pending.remove(completion.transfer)
        load.ended.append(completion)
        if load.pending:
            return None
        del self._loads[load.lease.request_id]
        return self._end(load)

    def _end(self, load: "_Load") -> "EndedLoad":
        lease, blocks, completion = load.lease, load.blocks, load.completion
        memory, counters = self._memory, self._counters
        memory.allocator.let_go(blocks)
        for cut in lease.cuts:
            let_go(memory.windows, cut.window)
        if completion.is_done:
            counters.num_done += 1
            counters.num_blocks += len(blocks)
            lease.computed = lease.folded = len(lease.tokens)
            self._publisher.publish_loaded(lease)
        else:
            counters.num_failed += 1
        for cut in lease.cuts:
            memory.free_cut(cut)
        lease.cuts = []
        del self._leases[lease.request_id]
        lease.is_active = False
        if load.source is not None:
            self._end_in_tier(load.source, load, completion)
        memory.take_back(lease)
        return EndedLoad(lease, is_done=completion.is_done)

    def _end_in_tier(self, source: TierLoad, load: "_Load", completion: Completion) -> None:
        lease, snapshot = load.lease, None
        if completion.is_done and self._rule.needs_snapshots:
            snapshot = snapshot_at(find_home(lease.run, lease.tokens.data, lease.computed), lease.computed)
        source.end(snapshot, completion, len(load.blocks))
        if snapshot is not None:
            self._memory.offer(snapshot)


class EndedLoad(NamedTuple):
    """The end of a load."""

    lease: Lease
    is_done: bool
    """Whether all of it was loaded; else nothing was."""


@dataclass(slots=True)
class _Load:
    """A load under way."""

    lease: Lease
    source: TierLoad | None
    """The load in the tier that it reads; None: another store."""
    positions: tuple[int, ...]
    """Positions of the snapshots that it brings; without snapshots, its end."""
    blocks: "array[int]" = field(default_factory=partial(array, "i"))
    """The blocks that its transfers write."""
    pending: set[TransferId] = field(default_factory=set)
    """Transfers under way."""
    ended: list[Completion] = field(default_factory=list)

    @property
    def completion(self) -> Completion:
        """The end of all transfers, as that of one."""
        seconds = [each.seconds for each in self.ended]
        return Completion(
            self.ended[0].transfer,
            is_done=all(each.is_done for each in self.ended),
            seconds=sum(seconds) if all(seconds) else 0.0,
            lost=tuple(address for each in self.ended for address in each.lost),
        )


class _Lacking(NamedTuple):
    """What the device lacks of an offer."""

    end: Walk
    """How far the device's tokens reach."""
    addresses: dict[int, int]
    """Addresses of the blocks, by their index in the path."""
    snapshots: list[OfferedSnapshot]


def _pieces(addresses: list[int], num_blocks: int | None) -> Iterator[list[int]]:
    """Yield addresses in groups of at most ``num_blocks``, or in one if None; at least one, which may be empty."""
    size = num_blocks or max(len(addresses), 1)
    for start in range(0, max(len(addresses), 1), size):
        yield addresses[start : start + size]


def _lacking(root: Run, data: bytearray, offer: Offer) -> _Lacking | None:
    """Return what the device lacks of an offer; None if it can resume there, or if the offer is not enough for that.

    Args:
        data: the tokens that are offered, encoded.
    """
    end = walk(root, data)
    missing = [snapshot for snapshot in offer.snapshots if not _is_cached(end, data, snapshot.position)]
    if missing[-1:] != list(offer.snapshots[-1:]) or (not missing and end.kv_tokens >= offer.position):
        return None
    addresses = offer.addresses(range(end.num_blocks, -(-offer.position // BLOCK_TOKENS)))
    is_enough = len(data) == offer.position * TOKEN_BYTES and all(addresses.values())
    return _Lacking(end, addresses, missing) if is_enough else None


def _is_cached(end: Walk, data: bytearray, position: int) -> bool:
    """Return whether the device has the snapshot at a position of a walked path."""
    return position <= end.kv_tokens and snapshot_at(find_home(end.run, data, position), position) is not None
