"""Loads: prefixes whose bytes are on their way into the device's memory, from a store below it or from a peer.

A load is a move to the device, whose target is a lease without a request (``device_target.py``): blocks and slots that
are filled by one transfer or several, and published when all have ended well. Until then a request that needs them
follows the load, as it would follow a running request.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Final, NamedTuple

from strandline.cache.announcing.announcer import Announcer
from strandline.cache.core import PrefixCache
from strandline.cache.holds import Holds
from strandline.cache.lease import Lead, Lease
from strandline.cache.policy.worth import WorthPerByte
from strandline.cache.resume import Match
from strandline.cache.tiers.adoption import adopt, adopt_paths, forget_paths, last_address
from strandline.cache.tiers.demotion import Demotion
from strandline.cache.tiers.device_target import DeviceTarget, num_slabs_for
from strandline.cache.tiers.flush import Flush
from strandline.cache.tiers.known_paths import FoundPath, LostPath
from strandline.cache.tiers.lower_memory import LowerMemory
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.moves import Move, Moves
from strandline.cache.tiers.spills import Spills
from strandline.cache.tiers.tier_sources import ExchangedCopy, RetainedCopy
from strandline.cache.tiers.tier_tree import TierTree
from strandline.cache.tree import Run, find_home
from strandline.cache.use import UseHistory
from strandline.cache.walk import Walk, walk
from strandline.ids import BLOCK_TOKENS, RequestId, TransferId
from strandline.records.account import UNCOUNTED
from strandline.records.actions import (
    CancelTransfer,
    Completion,
    EnterFiles,
    FoundFile,
    LoadIn,
    SnapshotCopy,
)
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.tier_stats import TierStats
from strandline.records.tokens import TOKEN_BYTES, TokenBuffer, common_tokens

PIECE_SLABS: Final = 2
"""Size of the transfers of a load whose memory is exchanged (``cache/tiers/tier_sources.py``), in slabs."""
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
        parts = self._parts = cache.internals()
        self._memory = parts.memory
        self._index = parts.index
        self._num_slots = parts.states.num_slots
        """Slots that a request needs, and a snapshot that is loaded for it."""
        self._rule = parts.rule
        self.moves = Moves(self._memory.issue)
        self._loads: dict[RequestId, Move[DeviceTarget]] = {}
        """By the name of the lease."""
        self.tiers = self._new_tiers(lower if cache.is_enabled else (), parts.reuse, announcer)
        """Nearest first."""
        self._tier_of = {tier.store: tier for tier in self.tiers}
        """By the name of its store."""
        self.first_tier = Demotion(self.tiers[0], self.moves) if self.tiers else None
        holds = Holds(cache)
        self.spills = tuple(Spills(*pair, self.moves, holds) for pair in pairwise(self.tiers))
        """The spills from each tier to the next."""
        self.flush: Flush | None = None
        """Replaces the spills before the process ends."""
        cache.attach(self)

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Lease]:
        return (load.target.lease for load in self._loads.values())

    def find(self, root: Run | None, tokens: TokenBuffer, beyond: int) -> Lead | None:
        """Return the load that brings the longest prefix of a prompt, if longer than ``beyond``. Changes nothing."""
        best: Lead | None = None
        for load in self._loads.values():
            lease = load.target.lease
            if lease.root is root:
                for position in load.target.positions:
                    is_longer = position > (best.position if best else beyond)
                    if is_longer and tokens.data.startswith(lease.tokens.slice(0, position)):
                        best = Lead(lease, position)
        return best

    def _new_tiers(
        self, memories: Sequence[LowerMemory], reuse: UseHistory, announcer: Announcer | None
    ) -> tuple[LowerTier, ...]:
        """Return the tiers below the device, with what their memories hold from an earlier process."""
        addresses = partial(next, count(1 + max((last_address(memory.persisted) for memory in memories), default=0)))
        key = next((memory.key for memory in memories if memory.key is not None), None)
        if not memories:
            return ()
        tree = TierTree(len(memories), key, self._index, self._memory, announcer)
        tiers = tuple(
            LowerTier(
                memory,
                tree,
                column,
                WorthPerByte(memory.snapshots.blocks_at, reuse),
                self._memory.issue,
                addresses,
                self._rule,
            )
            for memory, column in zip(memories, tree.columns, strict=True)
        )
        for tier, memory in zip(tiers, memories, strict=True):
            adopt(tier, memory.persisted, reuse)
        return tiers

    def known_roots(self) -> tuple[Run, ...]:
        """Return the roots of the trees of the tiers whose salts are known."""
        return self.tiers[0].tree.known_roots() if self.tiers else ()

    def resumable_tokens(self, data: bytearray, match: Match) -> int:
        """Return the deepest position at which a prompt could resume after a load from a tier, or 0."""
        return max(self.positions(data, match).values(), default=0)

    def positions(self, data: bytearray, match: Match) -> dict[str, int]:
        """Return the deepest position at which a prompt could resume after a load from each tier, by its store."""
        found = {tier.store: tier.find(data, match) for tier in self.tiers}
        ends = {store: where.position for store, where in found.items() if where is not None}
        return {store: self._rule.resumes_at(data, position) for store, position in ends.items()}

    def adopt(self, store: str, files: tuple[FoundFile, ...], paths: Sequence[FoundPath]) -> None:
        """Enter what other engines have stored in a store that they share.

        Args:
            files: new ones.
            paths: those that are whole with these files, and that the tier may have.
        """
        if files:
            self.moves.issue(EnterFiles(store, files))
        adopt_paths(self._tier_of[store], paths, self._parts.reuse)

    def forget(self, store: str, files: tuple[FoundFile, ...], lost: Sequence[LostPath]) -> Sequence[LostPath]:
        """Forget what is gone from a store that engines share.

        Args:
            files: those that are gone, and that hold nothing which the tier still has.
            lost: what they held, and the tier may have.

        Returns:
            What is lost and has not been forgotten; unless that is nothing, the files have not been either.
        """
        left = forget_paths(self._tier_of[store], lost)
        if files and not left:
            self.moves.issue(EnterFiles(store, (), files))
        return left

    def stats(self) -> tuple[TierStats, ...]:
        """Return the figures of the tiers, nearest first."""
        return tuple(tier.stats() for tier in self.tiers)

    def tier_offer(self, tokens: TokenBuffer, salt: str = "") -> Offer | None:
        """Return what a tier has of a prompt, if loading it is faster than computing. Changes nothing.

        Of several tiers, the one whose load saves most time makes the offer; before that is known, the one that has
        most of the prompt.
        """
        match = self._index.match(salt, tokens.data) if self.tiers else None
        if match is None:
            return None
        best: Offer | None = None
        best_gain = float("-inf"), 0
        for tier in self.tiers:
            offer = tier.offer(tokens.data, match)
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

        No step runs and no request is admitted any more. What loads under way bring is not written, and nothing is
        after a reset: no other process would find it.
        """
        if self.spills and not self.tiers[0].tree.epoch:
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
        same_root = [lease for lease in self if lease.root is root]
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
        num_window_blocks = -(-last // BLOCK_TOKENS) - resumed // BLOCK_TOKENS
        if not memory.can_take(len(addresses) + num_spare_blocks, num_slabs + self._num_slots, num_window_blocks):
            memory.unpin_run(upper)
            return None
        # Before memory is allocated: what the device evicts for it may push out tier entries, also those to be loaded.
        lease = self._new_lease(salt, data, root, upper)
        source = self._new_source(offer.store, salt, data, list(addresses.values()))
        positions = tuple(each.position for each in missing) or (offer.position,)
        target = DeviceTarget(self._parts, lease, positions, None if source is None else source.copy)
        load = self._loads[lease.request_id] = Move(source, target)
        num_actions = len(memory.actions)
        snapshots = target.take_snapshots(missing)
        for some in _pieces(list(addresses.values()), self._piece_blocks(source)):
            self._begin_piece(load, offer, some, snapshots)
            snapshots = ()
        if isinstance(source, ExchangedCopy):
            source.leave()
        if source is not None:
            target.mark_held(num_actions)
        lease.table += target.blocks
        return Lead(lease, offer.position)

    def _new_source(self, store: str, salt: str, data: bytearray, blocks: list[int]) -> "_Source | None":
        """Pin what is loaded from a tier; None: another store is read."""
        tier = self._tier_of.get(store)
        if tier is None:
            return None
        copy = tier.needing(tier.tree.name(salt), data)
        return (RetainedCopy if tier.is_persistent else ExchangedCopy)(tier, copy, data, blocks)

    def _piece_blocks(self, source: "_Source | None") -> int | None:
        """Return how many blocks a transfer of a load brings at most; None: all."""
        if not isinstance(source, ExchangedCopy):
            return None
        return max(PIECE_SLABS * self._memory.allocator.blocks_per_slab, MIN_PIECE_BLOCKS)

    def _begin_piece(
        self, load: Move[DeviceTarget], offer: Offer, addresses: Sequence[int], snapshots: tuple[SnapshotCopy, ...]
    ) -> None:
        """Allocate blocks for these addresses, and begin to load them and snapshots."""
        lease, blocks = load.target.lease, load.target.take_blocks(addresses)
        transfer = self.moves.next_transfer()
        lease.transfer = lease.transfer or transfer
        self.moves.begin(load, transfer)
        self.moves.issue(LoadIn(transfer, offer.store, blocks, snapshots, offer.limit_s))
        if isinstance(load.source, ExchangedCopy):
            load.source.free([*addresses, *(each.address for each in snapshots)])

    def _new_lease(self, salt: str, data: bytearray, root: Run, upper: Run) -> Lease:
        tokens = TokenBuffer()
        tokens.data = bytearray(data)
        name = RequestId(f"load {self.moves.next_number}")
        lease = self._parts.leases[name] = Lease(name, tokens, salt, root, upper, UNCOUNTED)
        lease.kv_start = lease.num_published * BLOCK_TOKENS
        return lease

    def find_lease(self, transfer: TransferId) -> Lease | None:
        """Return the lease of the load that a transfer belongs to; None: it has ended, or is no load."""
        move = self.moves.find(transfer)
        return move.target.lease if move is not None and isinstance(move.target, DeviceTarget) else None

    def cancel(self, lead: Lead) -> None:
        """Ask for the early end of a load that no request follows any more; its memory is freed on completion."""
        load = self._loads.get(lead.lease.request_id)
        for transfer in sorted(load.transfers if load is not None and load.target.lease is lead.lease else ()):
            self.moves.issue(CancelTransfer(transfer))

    def complete(self, completion: Completion) -> "EndedLoad | None":
        """Handle the end of a transfer, and of its move if it was the last one.

        Returns:
            The load that has ended; None if none has.

        Raises:
            CacheInvariantError: no such transfer was begun.
        """
        move = self.moves.complete(completion)
        if move is None or not isinstance(move.target, DeviceTarget):
            return None
        lease = move.target.lease
        del self._loads[lease.request_id]
        return EndedLoad(lease, is_done=move.completion.is_done)


class EndedLoad(NamedTuple):
    """The end of a load."""

    lease: Lease
    is_done: bool
    """Whether all of it was loaded; else nothing was."""


_Source = RetainedCopy | ExchangedCopy
"""The source of a load from a tier."""


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
    run, key = find_home(end.run, data, position)
    return position <= end.kv_tokens and key in run.snapshots
