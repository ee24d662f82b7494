"""Notes on the loads of a replay: which part of its prompt each request waited for, and where that came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from strandline.bench.simulated_store import EndedTransfer
from strandline.cache import Lease, PrefixCache
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.ids import RequestId


@dataclass(frozen=True, slots=True)
class LoadNote:
    """A load that a request waited for, and the tokens ``[start, end)`` that the request hits because of it."""

    store: str
    start: int
    end: int
    num_bytes: int
    """What was loaded, which is less than these tokens take if the device had some of their blocks."""
    seconds: float
    """How long the copying took."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class _Load:
    """A load, some of whose transfers have ended."""

    store: str
    num_bytes: int = 0
    seconds: float = 0.0
    hits: dict[RequestId, int] = field(default_factory=dict)
    """Tokens that each request that waits would hit without the load."""


class LoadNotes:
    """Passes the ends of transfers on to a scheduler, and notes what they bring for the requests that wait."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._loads: dict[RequestId, _Load] = {}
        """By the name of the lease."""
        self._notes: dict[RequestId, list[LoadNote]] = {}

    def complete(self, ended: Iterable[EndedTransfer]) -> None:
        """Let the scheduler take in transfers that have ended."""
        for transfer in ended:
            lease = self._scheduler.loading.loads.find_lease(transfer.completion.transfer)
            if lease is None:
                self._scheduler.loading.complete([transfer.completion])
            else:
                self._complete_load(lease, transfer)

    def take(self, request_id: RequestId) -> tuple[LoadNote, ...]:
        """Return the notes on a request, in the order in which the loads ended, and forget them."""
        return tuple(self._notes.pop(request_id, ()))

    def _complete_load(self, lease: Lease, transfer: EndedTransfer) -> None:
        load = self._loads.setdefault(lease.request_id, _Load(transfer.store))
        load.num_bytes += transfer.num_bytes
        load.seconds += transfer.completion.seconds
        followers = self._scheduler.waiting.followers(lease)
        for request in followers:
            if request.request_id not in load.hits:
                load.hits[request.request_id] = self._hit_tokens(request)
        self._scheduler.loading.complete([transfer.completion])
        if lease.is_active:
            return
        del self._loads[lease.request_id]
        for request in followers:
            start, end = load.hits[request.request_id], self._hit_tokens(request)
            if end > start:
                note = LoadNote(load.store, start, end, load.num_bytes, load.seconds)
                self._notes.setdefault(request.request_id, []).append(note)

    def _hit_tokens(self, request: Request) -> int:
        return self._cache.hit_tokens(request.tokens, request.salt)
