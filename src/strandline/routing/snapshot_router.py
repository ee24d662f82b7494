"""The router that knows snapshots: sends a request where the tokens to recompute and the load are least together.

The tokens to recompute are known from the replicas' events, to the token; what tiers below a device have counts as
cached. They delay all requests of a replica, so they count as often as there are requests everywhere: among busy
replicas little is moved, and an idle one still gets its part. Where they and the load are about the same, a replica
that has computed more of the prompt, though it cannot resume there, is preferred. A request's tokens are reserved when
it is routed, so that the next one, which may come before the replica has heard of the first, sees them. Prompts on
their way count as cached where they were sent: an engine computes a prefix once for all requests that wait for it.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from strandline.events.resumable import PromptHashes
from strandline.events.wire import WireEvent
from strandline.ids import BLOCK_TOKENS
from strandline.routing.fleet_index import FleetIndex
from strandline.routing.loads import Loads
from strandline.routing.pending_prompts import PendingPrompts
from strandline.routing.router import Names, NoReplicaError

DECODE_TOKENS: Final = 64
"""Load of a request whose prompt is computed: what it costs others while it decodes, in prompt tokens."""

SHARED_WORTH: Final = 0.5
"""Worth of a token that is cached after the last snapshot that serves a prompt. It saves nothing now, but where two
prompts diverge, a snapshot is taken if the same replica computes both, and serves the third."""

LEAST_SHARE: Final = 0.1
"""Share of a prompt that must be cached to count. The few tokens that all prompts begin with would draw all of them to
few replicas, whose memory then holds less of each."""


class SnapshotRouter:
    """Follows the events of all replicas, and their loads.

    Args:
        decode_tokens: load of a request whose prompt is computed, in prompt tokens.
    """

    follows_events = True

    def __init__(self, decode_tokens: int = DECODE_TOKENS) -> None:
        self._decode_tokens = decode_tokens
        self._names = Names()
        self._index = FleetIndex()
        self._loads = Loads()
        self._pending = PendingPrompts()

    def add(self, replica: str) -> None:
        """Add a replica, whose cache is empty until its events say otherwise."""
        number = self._names.add(replica)
        if number is not None:
            self._index.add(number)
            self._loads.add(number)

    def remove(self, replica: str) -> list[str]:
        """Forget a replica; return its unfinished requests, which are forgotten too. Unknown replicas are ignored."""
        number = self._names.remove(replica)
        if number is None:
            return []
        self._index.remove(number)
        self._pending.remove_replica(number)
        return self._loads.remove(number)

    def apply(self, replica: str, events: Iterable[WireEvent]) -> None:
        """Record events of a replica's cache. Those of unknown replicas are ignored."""
        number = self._names.number(replica)
        if number is not None:
            for event in events:
                self._index.apply(number, event)
            self._loads.fill(number, self._index.num_held(number))

    def clear(self, replica: str) -> None:
        """Forget what a replica's events have said: some of them were missed."""
        number = self._names.number(replica)
        if number is not None:
            self._index.clear(number)
            self._loads.fill(number, 0)

    def route(self, request_id: str, prompt: PromptHashes, avoided: Iterable[str] = ()) -> str:
        """Return the replica for a request, and reserve its tokens there.

        Args:
            avoided: replicas that get it only if there are no others. Unknown ones are ignored.

        Raises:
            NoReplicaError: no replica was added.
        """
        replicas = self._index.replicas
        if not replicas:
            raise NoReplicaError("there is no replica")
        others = replicas
        for number in map(self._names.number, avoided):
            others &= ~(0 if number is None else 1 << number)
        number, num_hit = self._choose(prompt, others or replicas)
        self._loads.reserve(request_id, number, prompt.num_tokens - num_hit + self._decode_tokens)
        self._pending.add(request_id, number, prompt.blocks, num_hit // BLOCK_TOKENS)
        return self._names.name(number)

    def begin(self, request_id: str) -> None:
        """Record that a request's first token was sampled. Unknown requests are ignored."""
        self._loads.shrink(request_id, self._decode_tokens)

    def finish(self, request_id: str) -> None:
        """Record that a request has ended. Unknown requests are ignored."""
        self._loads.release(request_id)

    def forget(self, request_id: str) -> None:
        """Leave it to events what a request that has ended left in a cache. Unknown requests are ignored."""
        self._pending.remove(request_id)

    def in_order(self) -> Iterator[str]:
        """Yield the replicas, the least loaded first."""
        return map(self._names.name, self._loads)

    def _choose(self, prompt: PromptHashes, replicas: int) -> tuple[int, int]:
        """Return the one of some replicas where a prompt costs least, and how many of its tokens it would hit there.

        Hits come deepest first, and no load is below the least one, so most of them need not be looked at.
        """
        chosen, chosen_hit, least_cost = -1, 0, float("inf")
        weight = 1 + self._loads.least_requests
        least_load = self._loads.least_load
        least = LEAST_SHARE * prompt.num_tokens
        shared = [each for each in self._index.shared_prefixes(prompt) if each[0] >= least]
        shared.append((0, self._index.replicas & ~sum(mask for _, mask in shared)))
        most_shared = shared[0][0]
        for hits in (self._pending.hits(prompt), self._index.hits(prompt), iter([(0, self._index.replicas)])):
            for num_hit, mask in hits:
                if 0 < num_hit < least or (
                    weight * _to_compute(prompt.num_tokens, num_hit, most_shared) + least_load >= least_cost
                ):
                    break
                for num_shared, sharing in shared:
                    if candidates := mask & sharing & replicas:
                        replica = self._loads.least_of(candidates)
                        to_compute = _to_compute(prompt.num_tokens, num_hit, num_shared)
                        cost = weight * to_compute + self._loads.load(replica)
                        if cost < least_cost:
                            chosen, chosen_hit, least_cost = replica, num_hit, cost
        return chosen, chosen_hit


def _to_compute(num_tokens: int, num_hit: int, num_shared: int) -> float:
    """Return how many tokens of a prompt a replica has to compute, less what it is worth that it has some of them.

    Args:
        num_shared: number of its tokens whose keys and values the replica has.
    """
    return num_tokens - num_hit - SHARED_WORTH * max(num_shared - num_hit, 0)
