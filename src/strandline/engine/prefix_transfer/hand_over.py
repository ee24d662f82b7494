"""Hand-over of prefixes between engines: what this one gives, what it fetches, and the port that others connect to."""

from secrets import token_hex
from typing import Final

from strandline.device.executor import Executor
from strandline.device.stores.arena_copies import Copies
from strandline.device.stores.peer_store import PEERS, PeerStore
from strandline.engine.prefix_transfer.prefix_pulls import PrefixPulls
from strandline.engine.prefix_transfer.prefix_source import PrefixSource
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.ids import RequestId
from strandline.kv_transfer_config import KVTransferConfig
from strandline.records.events import FinishReason, HandedOver, HandOverStats
from strandline.records.transfer_params import read_transfer_params
from strandline.transfer.counters import TransferCounters
from strandline.transfer.engine_calls import EngineCalls
from strandline.transfer.layout import layout_of
from strandline.transfer.messages import Hello
from strandline.transfer.movers import Mover, SocketMover
from strandline.transfer.nixl_mover import CONNECTOR, NixlMover
from strandline.transfer.server import PullServer

ID_BYTES: Final = 8


class HandOver:
    """Gives and fetches prefixes, depending on the configuration. Belongs to the engine's thread.

    Args:
        weights: a digest of the model's weights.

    Raises:
        ConfigError: the address is not there, or taken.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        executor: Executor,
        scheduler: Scheduler,
        *,
        weights: str,
        is_deterministic: bool,
    ) -> None:
        cache, copies, facts = scheduler.cache, executor.copies, executor.facts
        spec, blocks_per_slab = facts.spec.whole, facts.spec.blocks_per_slab
        self.calls = EngineCalls()
        self._config = config
        self._engine_id = config.engine_id or token_hex(ID_BYTES)
        self._mover = self._new_mover(copies)
        layout = layout_of(
            spec,
            weights=weights,
            is_deterministic=is_deterministic,
            connector=self._mover.connector,
            # Ranks add up in another order than one, which is all that makes a difference.
            num_ranks=facts.num_ranks if is_deterministic else 1,
        )
        hello = Hello(self._engine_id, layout)
        self._source = PrefixSource(
            cache,
            copies,
            lambda: executor.carry_out(cache.take_actions()),
            blocks_per_slab=blocks_per_slab,
            window_blocks_per_slab=facts.spec.window_blocks_per_slab,
            lease_s=config.lease_s,
        )
        self._store = PeerStore(copies, executor.stores.completions)
        executor.stores.attach(PEERS, self._store)
        self._pulls = PrefixPulls(
            scheduler,
            self._store,
            self.calls,
            hello,
            spec,
            self._mover,
            blocks_per_slab=blocks_per_slab,
            timeout_s=config.timeout_s,
        )
        self._server: PullServer | None = None
        if config.is_producer:
            self._server = PullServer(
                (config.kv_ip, config.kv_port),
                hello,
                self.calls,
                self._source,
                spec,
                self._mover,
                timeout_s=config.timeout_s,
                patience_s=config.lease_s,
            )

    def _new_mover(self, copies: Copies) -> Mover:
        if self._config.kv_connector == CONNECTOR:
            # An engine that was restarted has another agent, though it may have the same id.
            return NixlMover(f"{self._engine_id} {token_hex(ID_BYTES)}", copies.region, self._config.backends)
        return SocketMover()

    @property
    def num_waiting(self) -> int:
        """Requests that are not queued yet, as a peer is asked for their prefixes."""
        return len(self._pulls)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when ``turn`` has work."""
        return self.calls.fileno()

    def turn(self) -> None:
        """Do what peers have asked for, and queue the requests whose peers have answered. Between two steps."""
        self._source.fence()
        self.calls.run()
        self._source.expire()
        self._pulls.end_unneeded()

    def add(self, request: Request) -> bool:
        """Take a request whose prefix another engine has, to queue it later; False: it is none."""
        params = request.submission.transfer
        if params is None or not params.is_remote_prefill:
            return False
        self._pulls.begin(request, params)
        return True

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a step took that computed this many tokens of prompts, to weigh pulls against."""
        self._pulls.costs.observe_prefill(num_tokens, seconds)

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that is not queued yet. Unknown ids are ignored."""
        self._pulls.forget(request_id)

    def keep(self, request: Request) -> HandedOver | None:
        """Keep what a request has computed, if it has ended without an error and another engine is to continue it."""
        transfer = request.submission.transfer
        is_wanted = transfer is not None and transfer.is_remote_decode
        if not is_wanted or request.finish_reason in (None, FinishReason.ERROR) or self._server is None:
            return None
        kept = self._source.keep(request.tokens, request.salt)
        if kept is None:
            return None
        params = self._source.params(kept, self._server.host, self._server.port, self._engine_id)
        return HandedOver(request.request_id, params)

    def give_up(self) -> bool:
        """End the oldest lease, as its memory is needed; False: there is none."""
        return self._source.give_up()

    def drop(self, handed_over: HandedOver) -> None:
        """End the lease of params that were not sent."""
        params = read_transfer_params(handed_over.params)
        if params is not None:
            self._source.drop(params.lease_id)

    def stats(self) -> HandOverStats:
        """Return what was given and fetched so far."""
        fetched = self._store.counters.read()
        given = TransferCounters().read() if self._server is None else self._server.counters.read()
        return HandOverStats(
            pulls=fetched.outcomes,
            gives=given.outcomes,
            fetched_bytes=fetched.num_bytes,
            fetched_s=fetched.seconds,
            given_bytes=given.num_bytes,
            given_s=given.seconds,
            num_leases=self._source.num_leases,
            leases_ended=dict(self._source.ended),
        )

    def describe(self) -> str:
        """Return in a line what is handed over."""
        gives = "" if self._server is None else f"given on {self._server.host}:{self._server.port}"
        takes = "fetched from other engines" if self._config.is_consumer else ""
        return f"prefixes: {' and '.join(filter(None, (gives, takes)))}; this is engine {self._engine_id}"

    def close(self) -> None:
        """End all connections."""
        self.calls.close()
        self._pulls.close()
        if self._server is not None:
            self._server.close()
        self._mover.close()
