"""Requests whose prompts' prefixes other engines have: what those offer is asked before such a request is queued.

What a peer keeps under a lease for a request is fetched, unless it is cached here. What it happens to have cached is
fetched if that takes less time than computing, by the measured rates of transfers and of prefills.

A request that asks is not queued yet. Once it is, it has an offer, which is loaded as from any store; or it has none
and computes its prompt; its account reports a failed load if one was promised.
"""

import logging
from dataclasses import dataclass, field
from threading import Thread
from typing import Final

from strandline.cache import PrefixCache
from strandline.cache.holds import useful_positions
from strandline.cache.placement import RESERVE_SHARE
from strandline.cache.tiers import LoadCosts
from strandline.device.stores.peer_store import PEERS, PeerStore
from strandline.engine.requests.request import Request, Status
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.transfer_params import TransferParams
from strandline.specs import ModelSpec
from strandline.transfer import messages
from strandline.transfer.client import Peer, Pull
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.counters import NOT_NEEDED, NOTHING, SLOWER
from strandline.transfer.engine_calls import EngineCalls
from strandline.transfer.movers import Mover

LOGGER: Final = logging.getLogger("strandline.transfer")
KINDS: Final = frozenset(SnapshotKind)


@dataclass(slots=True, eq=False)
class Asked:
    """A pull, and the requests that it is for: the outputs of one request."""

    pull: Pull
    ask: messages.Ask
    num_promised: int
    """Tokens that the peer should have; 0: unknown."""
    requests: list[Request] = field(default_factory=list)
    first_address: int | None = None
    """Where its addresses begin in the store, once it has an offer."""


class PrefixPulls:
    """The pulls of one engine. All methods belong to its thread, but those that run in a pull's own.

    Args:
        hello: the description of this engine that peers receive.
        spec: spec of the model on one rank, as peers send it.
        blocks_per_slab: in the memory of a rank.
        timeout_s: how long a peer may send nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: PeerStore,
        calls: EngineCalls,
        hello: messages.Hello,
        spec: ModelSpec,
        mover: Mover,
        *,
        blocks_per_slab: int,
        timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._cache: PrefixCache = scheduler.cache
        self._store = store
        self._calls = calls
        self._hello = hello
        self._spec = spec
        self._mover = mover
        self._blocks_per_slab, self._timeout_s = blocks_per_slab, timeout_s
        self.costs = LoadCosts()
        """The mean rates of transfers, from any peer, and of prefills. What a pull costs beside is the answer to its
        question, which has come when it is decided whether to fetch."""
        self._observed = (0, 0.0)
        """The bytes and seconds of transfers that the rates contain."""
        self._asking: list[Asked] = []
        """Those without an answer."""
        self._offered: list[Asked] = []
        """Those whose offers may still be loaded."""

    def __len__(self) -> int:
        """Return how many requests are not queued yet."""
        return sum(len(asked.requests) for asked in self._asking)

    def begin(self, request: Request, params: TransferParams) -> None:
        """Ask for a request's prefix, then queue it. If it needs none, queue it at once and notify the peer."""
        peer = Peer(params.host, params.port, params.engine_id)
        ask = messages.Ask(params.lease_id, request.salt, bytes(request.tokens.data))
        hit = self._cache.hit_tokens(request.tokens, request.salt)
        is_needed = request.params.prompt_logprobs is None and hit < (params.num_tokens or len(request.tokens))
        same = [asked for asked in self._asking if (asked.pull.peer, asked.ask) == (peer, ask)]
        if not is_needed:
            self._scheduler.add(request)
        elif same:
            same[0].requests.append(request)
            return
        pull = Pull(peer, self._hello, self._spec, self._mover, timeout_s=self._timeout_s)
        asked = Asked(pull, ask, params.num_tokens, [request] if is_needed else [])
        self._asking.append(asked)
        Thread(target=self._run, args=[asked], name="kv-transfer", daemon=True).start()

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that is not queued yet. Unknown ids are ignored."""
        for asked in self._asking:
            asked.requests = [request for request in asked.requests if request.request_id != request_id]

    def end_unneeded(self) -> None:
        """End the pulls whose requests went on without them."""
        for asked in list(self._offered):
            if all(request.status is not Status.WAITING for request in asked.requests):
                self._offered.remove(asked)
                if asked.first_address is not None:
                    self._store.forget(asked.first_address)

    def close(self) -> None:
        """End what has no offer yet; the store ends the others."""
        for asked in self._asking:
            asked.pull.close()

    def _run(self, asked: Asked) -> None:
        """Ask the peer, in a thread."""
        try:
            offer = asked.pull.ask(asked.ask)
            if not offer.num_tokens and asked.num_promised:
                raise TransferError(Cause.GONE, "the lease has expired, and the prefix is not cached any more")
            if not KINDS.issuperset(kind for _, kind in offer.snapshots):
                raise TransferError(Cause.GARBLED, "an offer has snapshots of unknown kinds")
        except TransferError as error:
            asked.pull.close()
            self._calls.submit(self._fail, asked, error)
        else:
            self._calls.submit(self._take, asked, offer)

    def _fail(self, asked: Asked, error: TransferError) -> None:
        """Queue the requests of a pull that has failed."""
        peer = asked.pull.peer
        LOGGER.warning("no prefix could be fetched from %s:%d: %s", peer.host, peer.port, error)
        self._store.counters.count(error.cause)
        for request in asked.requests:
            request.loads.failed_end = asked.num_promised or len(request.tokens)
        self._queue(asked)

    def _take(self, asked: Asked, found: messages.Offer) -> None:
        """Queue the requests of a pull with what the peer has offered."""
        is_useful = found.num_tokens > 0 and bool(found.snapshots) == self._spec.needs_snapshots
        if not asked.requests or not is_useful:
            asked.pull.enough()
            self._store.counters.count(NOT_NEEDED if found.num_tokens else NOTHING)
            self._queue(asked)
            return
        first_address = self._store.open(asked.pull)
        offer = self._offer(found, first_address)
        if not asked.ask.lease_id and not self._pays(asked.requests[0], offer):
            self._store.forget(first_address, SLOWER)
            self._queue(asked)
            return
        asked.first_address = first_address
        for request in asked.requests:
            request.loads.offer = offer
        self._offered.append(asked)
        self._queue(asked)

    def _pays(self, request: Request, offer: Offer) -> bool:
        """Return whether fetching what an offer brings takes less time than computing it."""
        lacking = self._scheduler.loading.loads.count_lacking(request.tokens, offer, request.salt)
        if lacking is None:
            return True  # the request finds out when it is its turn
        counts = self._store.counters.read()
        num_bytes, seconds = self._observed
        if counts.num_bytes > num_bytes:
            self.costs.observe_load(counts.num_bytes - num_bytes, counts.seconds - seconds)
            self._observed = (counts.num_bytes, counts.seconds)
        spec = self._spec
        snapshot_bytes = spec.raw_slot_bytes * spec.has_states
        snapshot_bytes += sum(window.max_blocks * window.block_bytes for window in spec.window_sizes)
        size = lacking[0] * spec.raw_block_bytes + lacking[1] * snapshot_bytes
        return self.costs.pays(size, offer.position - self._cache.hit_tokens(request.tokens, request.salt))

    def _queue(self, asked: Asked) -> None:
        self._asking.remove(asked)
        for request in asked.requests:
            self._scheduler.add(request)

    def _offer(self, found: messages.Offer, first_address: int) -> Offer:
        memory = self._cache.memory_use()
        wanted_slabs = found.num_blocks // self._blocks_per_slab
        num_spare = memory.num_free_slabs - wanted_slabs - int(RESERVE_SHARE * memory.num_slabs)
        if self._spec.has_window_blocks:
            sizes = zip(self._spec.window_sizes, self._spec.window_blocks_per_slab, strict=True)
            num_window_slabs = sum(-(-window.max_blocks // blocks_per_slab) for window, blocks_per_slab in sizes)
            num_spare //= self._spec.has_states + num_window_slabs
        kinds = {position: SnapshotKind(kind) for position, kind in found.snapshots}
        positions = useful_positions(kinds, num_spare)
        blocks = range(first_address, first_address + found.num_blocks)
        snapshots = tuple(OfferedSnapshot(p, first_address + p, kinds[p]) for p in positions)
        return Offer(PEERS, found.num_tokens, 0, tuple(blocks), snapshots)
