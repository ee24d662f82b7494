"""The queue of waiting requests, and which of them is admitted next.

The queue is ordered by priority, then by arrival; a preempted request goes to the front of its priority. Among
requests of the front's priority, the one with the most cached tokens is admitted first, but the front is overtaken at
most ``MAX_OVERTAKEN`` times. A request that follows a leader, a running
request that computes a prefix of its prompt or a load of one, is *blocked* until the leader has computed or loaded it,
and then returns to its position. So is one whose adapter has no slot (``adapter_admission.py``).

A request has one place in line while it waits: its priority and a number, which order the queue. It is either queued
or blocked. Adding and removing cost a bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from strandline.cache import Lease
from strandline.engine.request import Request

MAX_OVERTAKEN = 16
"""Requests that may be admitted before the front of the queue because more of their tokens are cached."""
MAX_RECHECKS = 8
"""Requests that are looked up again per admission, to check whether their tokens are still cached."""


QueueNumber = tuple[int, int]
"""Orders the queue: a request's priority, lower first, and a number of its arrival or preemption."""


class WaitingQueue:
    """Waiting requests: queued ones and blocked ones.

    Args:
        hit_tokens: returns how many tokens of a request are cached now; None: admit in order of arrival.
    """

    def __init__(self, hit_tokens: Callable[[Request], int] | None) -> None:
        self._hit_tokens = hit_tokens
        self._requests: dict[QueueNumber, Request] = {}
        """All waiting requests, by number."""
        self._queue: list[QueueNumber] = []
        """Numbers of the queued requests, sorted."""
        self._blocked: dict[QueueNumber, Request] = {}
        """By number: requests that wait for a leader, or for a slot."""
        self._unranked: dict[QueueNumber, None] = {}
        """Queued requests that are not ranked yet, by number."""
        self._ranked: list[tuple[int, int, QueueNumber, int]] = []
        """A heap of (priority, -cached tokens, number, entry): of the first priority, most cached tokens first. Stale
        entries are not in ``_ranks``."""
        self._ranks: dict[QueueNumber, int] = {}
        """By number of a queued, ranked request: its current entry in the heap."""
        self._num_ranked = 0
        self._last_number = 0
        self._first_number = 0
        self._num_overtakes: dict[int, int] = {}
        """By priority: admissions since the front of the requests of that priority changed."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting requests in order."""
        return (self._requests[number] for number in sorted(self._requests))

    @property
    def has_admissible(self) -> bool:
        """Whether any waiting request is not blocked on a leader."""
        return bool(self._queue)

    @property
    def num_admissible(self) -> int:
        """How many waiting requests are not blocked on a leader."""
        return len(self._queue)

    # Adding and removing

    def add(self, request: Request) -> None:
        """Add a new request at the end."""
        self._last_number += 1
        self._enter(request, (request.params.priority, self._last_number))

    def add_first(self, request: Request) -> None:
        """Add a preempted request at the front of its priority."""
        self._first_number -= 1
        self._enter(request, (request.params.priority, self._first_number))

    def remove(self, request: Request) -> None:
        """Remove a request, queued or blocked."""
        number = request.queue_number
        del self._requests[number]
        if self._blocked.pop(number, None) is None:
            self._dequeue(number)

    def admit(self, request: Request) -> None:
        """Remove a queued request that is admitted, and count whether it overtook the front."""
        front = self._queue[0]
        if request.queue_number == front:
            self._num_overtakes.pop(front[0], None)
        else:
            self._num_overtakes[front[0]] = self._num_overtakes.get(front[0], 0) + 1
        self.remove(request)

    def block(self, request: Request) -> None:
        """Block a queued request until its leader has computed their shared prefix or has ended, and it is not held."""
        number = request.queue_number
        self._dequeue(number)
        self._blocked[number] = request

    def followers(self, lease: Lease) -> list[Request]:
        """Return the requests that are blocked on a leader."""
        return [request for request in self._blocked.values() if request.lead and request.lead.lease is lease]

    @property
    def held(self) -> list[Request]:
        """Requests that wait for a slot, in order."""
        return [self._blocked[number] for number in sorted(self._blocked) if self._blocked[number].is_held]

    def requeue_unblocked(self) -> None:
        """Requeue requests that are not held, whose leader has computed their shared prefix or has ended."""
        free = [number for number, request in self._blocked.items() if not (request.is_held or request.is_following)]
        for number in free:
            del self._blocked[number]
            self._enqueue(number)

    def _enter(self, request: Request, number: QueueNumber) -> None:
        request.queue_number = number
        self._requests[number] = request
        self._enqueue(number)

    def _enqueue(self, number: QueueNumber) -> None:
        insort(self._queue, number)
        self._unranked[number] = None

    def _dequeue(self, number: QueueNumber) -> None:
        del self._queue[bisect_left(self._queue, number)]
        if self._ranks.pop(number, None) is None:
            del self._unranked[number]

    # Choosing

    def first(self, num: int) -> list[Request]:
        """Return the first ``num`` queued requests."""
        return [self._requests[number] for number in self._queue[:num]]

    def next(self) -> Request:
        """Return the queued request to admit next: of the front's priority, the one with the most cached tokens, before
        those are evicted.

        The front of the queue goes first when it was preempted or has been overtaken ``MAX_OVERTAKEN`` times. A request
        therefore waits for at most ``MAX_OVERTAKEN`` later ones of its priority, for itself and for each request before
        it; but for any number of requests with lower priority values.

        Raises:
            IndexError: no request is queued.
        """
        first = self._requests[self._queue[0]]
        num_overtakes = self._num_overtakes.get(first.params.priority, 0)
        if len(self._queue) == 1 or num_overtakes >= MAX_OVERTAKEN or first.account is not None:
            return first
        return self._most_cached() or first

    def _most_cached(self) -> Request | None:
        """Return the request of the front's priority with the most cached tokens, as far as known; None: none has."""
        if self._hit_tokens is None:
            return None
        new, self._unranked = self._unranked, {}
        for number in new:
            self._rank(number, self._hit_tokens(self._requests[number]))
        ranked, ranks = self._ranked, self._ranks
        if len(ranked) > 4 * len(ranks) + MAX_RECHECKS:
            ranked[:] = [entry for entry in ranked if ranks.get(entry[2]) == entry[3]]
            heapify(ranked)
        for _ in range(MAX_RECHECKS):
            while ranked and ranks.get(ranked[0][2]) != ranked[0][3]:
                heappop(ranked)
            if not ranked or not ranked[0][1]:
                return None
            _, negated, number, _ = ranked[0]
            request = self._requests[number]
            cached = self._hit_tokens(request)
            if cached >= -negated:
                return request
            self._rank(number, cached)
        return None

    def _rank(self, number: QueueNumber, cached: int) -> None:
        """Rank a queued request by its cached tokens; its earlier entry becomes stale."""
        self._num_ranked += 1
        self._ranks[number] = self._num_ranked
        heappush(self._ranked, (number[0], -cached, number, self._num_ranked))
