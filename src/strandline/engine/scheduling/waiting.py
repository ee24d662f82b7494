"""The queue of waiting requests, and which of them is admitted next.

The queue is divided into lines, one for each priority and tenant. The lowest priority value goes first; of its lines,
that of the tenant with the least service (``FairShares``). A line is ordered by arrival; a preempted request goes to
its front, and before the fronts of other tenants.

In a line, the request with the most cached tokens is admitted first, but the front is overtaken at most
``MAX_OVERTAKEN`` times. A request that follows a leader, a running request that computes a prefix of its prompt or a
load of one, is *blocked* until the leader has computed or loaded it, and then returns to its position. So is one whose
adapter has no slot (``adapter_admission.py``).

A request has one number while it waits, which orders its line. It is either queued or blocked. Adding and removing cost
a bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice

from strandline.cache import Lease
from strandline.engine.requests.request import Request

MAX_OVERTAKEN = 16
"""Requests that may be admitted before the front of a line because more of their tokens are cached."""
MAX_RECHECKS = 8
"""Requests that are looked up again per admission, to check whether their tokens are still cached."""


QueueNumber = tuple[int, int]
"""Orders requests: their priority, lower first, and a number of their arrival or preemption."""
LineName = tuple[int, str]
"""A priority and a tenant."""
HitTokens = Callable[[Request], int]


def _line_of(request: Request) -> LineName:
    return request.params.priority, request.submission.tenant


class _Line:
    """The queued requests of one priority and tenant."""

    def __init__(self, hit_tokens: HitTokens | None) -> None:
        self._hit_tokens = hit_tokens
        self._requests: dict[QueueNumber, Request] = {}
        self.numbers: list[QueueNumber] = []
        """The numbers of these requests, sorted."""
        self._unranked: dict[QueueNumber, None] = {}
        """Numbers of requests that are not ranked yet."""
        self._ranked: list[tuple[int, QueueNumber, int]] = []
        """A heap of (-cached tokens, number, entry): most cached tokens first. Stale entries are not in ``_ranks``."""
        self._ranks: dict[QueueNumber, int] = {}
        """By number of a ranked request: its current entry in the heap."""
        self._num_ranked = 0

    @property
    def front(self) -> Request:
        return self._requests[self.numbers[0]]

    def add(self, request: Request) -> None:
        number = request.wait.queue_number
        insort(self.numbers, number)
        self._requests[number] = request
        self._unranked[number] = None

    def remove(self, request: Request) -> None:
        number = request.wait.queue_number
        del self.numbers[bisect_left(self.numbers, number)]
        del self._requests[number]
        if self._ranks.pop(number, None) is None:
            del self._unranked[number]

    def most_cached(self) -> Request | None:
        """Return the request with the most cached tokens, as far as known; None: none has."""
        if self._hit_tokens is None:
            return None
        new, self._unranked = self._unranked, {}
        for number in new:
            self._rank(number, self._hit_tokens(self._requests[number]))
        ranked, ranks = self._ranked, self._ranks
        if len(ranked) > 4 * len(ranks) + MAX_RECHECKS:
            ranked[:] = [entry for entry in ranked if ranks.get(entry[1]) == entry[2]]
            heapify(ranked)
        for _ in range(MAX_RECHECKS):
            while ranked and ranks.get(ranked[0][1]) != ranked[0][2]:
                heappop(ranked)
            if not ranked or not ranked[0][0]:
                return None
            negated, number, _ = ranked[0]
            request = self._requests[number]
            cached = self._hit_tokens(request)
            if cached >= -negated:
                return request
            self._rank(number, cached)
        return None

    def _rank(self, number: QueueNumber, cached: int) -> None:
        """Rank a request by its cached tokens; its earlier entry becomes stale."""
        self._num_ranked += 1
        self._ranks[number] = self._num_ranked
        heappush(self._ranked, (-cached, number, self._num_ranked))


class WaitingQueue:
    """Waiting requests: queued ones and blocked ones.

    Args:
        hit_tokens: returns how many tokens of a request are cached now; None: admit in order of arrival.
        least_served: returns the one of several tenants whose request is next; by default the first one.
    """

    def __init__(
        self, hit_tokens: HitTokens | None, least_served: Callable[[Sequence[str]], str] = lambda tenants: tenants[0]
    ) -> None:
        self._hit_tokens = hit_tokens
        self._least_served = least_served
        self._requests: dict[QueueNumber, Request] = {}
        """All waiting requests, by number."""
        self._lines: dict[LineName, _Line] = {}
        """Those with queued requests."""
        self._blocked: dict[QueueNumber, Request] = {}
        """By number: requests that wait for a leader, or for a slot."""
        self._last_number = 0
        self._first_number = 0
        self._num_overtakes: dict[LineName, int] = {}
        """Admissions since the front of a line changed."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting requests by priority and arrival."""
        return (self._requests[number] for number in sorted(self._requests))

    @property
    def has_admissible(self) -> bool:
        """Whether any waiting request is not blocked on a leader."""
        return bool(self._lines)

    @property
    def num_admissible(self) -> int:
        """How many waiting requests are not blocked on a leader."""
        return len(self._requests) - len(self._blocked)

    # Adding and removing

    def add(self, request: Request) -> None:
        """Add a new request at the end of its line."""
        self._last_number += 1
        self._enter(request, (request.params.priority, self._last_number))

    def add_first(self, request: Request) -> None:
        """Add a preempted request at the front of its line."""
        self._first_number -= 1
        self._enter(request, (request.params.priority, self._first_number))

    def remove(self, request: Request) -> None:
        """Remove a request, queued or blocked."""
        number = request.wait.queue_number
        del self._requests[number]
        if self._blocked.pop(number, None) is None:
            self._dequeue(request)
        if not self._requests:
            self._num_overtakes.clear()  # clients choose priorities: their number has no limit

    def admit(self, request: Request) -> None:
        """Remove a queued request that is admitted, and count whether it overtook the front of its line."""
        name = _line_of(request)
        if request is self._lines[name].front:
            self._num_overtakes.pop(name, None)
        else:
            self._num_overtakes[name] = self._num_overtakes.get(name, 0) + 1
        self.remove(request)

    def block(self, request: Request) -> None:
        """Block a queued request until its leader has computed their shared prefix or has ended, and it is not held."""
        self._dequeue(request)
        self._blocked[request.wait.queue_number] = request

    def followers(self, lease: Lease) -> list[Request]:
        """Return the requests that are blocked on a leader."""
        leads = ((request, request.wait.lead) for request in self._blocked.values())
        return [request for request, lead in leads if lead and lead.lease is lease]

    @property
    def held(self) -> list[Request]:
        """Requests that wait for a slot, in order."""
        return [self._blocked[number] for number in sorted(self._blocked) if self._blocked[number].wait.is_held]

    def requeue_unblocked(self) -> None:
        """Requeue requests that are not held, whose leader has computed their shared prefix or has ended."""
        free = [request for request in self._blocked.values() if not request.wait.is_blocked]
        for request in free:
            del self._blocked[request.wait.queue_number]
            self._enqueue(request)

    def _enter(self, request: Request, number: QueueNumber) -> None:
        request.wait.queue_number = number
        self._requests[number] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        name = _line_of(request)
        if name not in self._lines:
            self._lines[name] = _Line(self._hit_tokens)
        self._lines[name].add(request)

    def _dequeue(self, request: Request) -> None:
        name = _line_of(request)
        line = self._lines[name]
        line.remove(request)
        if not line.numbers:
            del self._lines[name]

    # Choosing

    def first(self, num: int) -> list[Request]:
        """Return the first ``num`` queued requests, by priority and arrival."""
        numbers = merge(*(line.numbers for line in self._lines.values()))
        return [self._requests[number] for number in islice(numbers, num)]

    def next(self) -> Request:
        """Return the queued request to admit next: of the next line, the one with the most cached tokens, before those
        are evicted.

        The front of the line goes first when it was preempted or has been overtaken ``MAX_OVERTAKEN`` times. A request
        therefore waits for at most ``MAX_OVERTAKEN`` later ones of its line, for itself and for each request before it;
        but for any number of requests with lower priority values.

        Raises:
            IndexError: no request is queued.
        """
        name = self._next_line()
        line = self._lines[name]
        front, num_overtakes = line.front, self._num_overtakes.get(name, 0)
        if len(line.numbers) == 1 or num_overtakes >= MAX_OVERTAKEN or front.account is not None:
            return front
        return line.most_cached() or front

    def _next_line(self) -> LineName:
        """Return the line whose request is admitted next."""
        if not self._lines:
            raise IndexError("no request is queued")
        if len(self._lines) == 1:
            return next(iter(self._lines))
        first = min(priority for priority, _ in self._lines)
        fronts = sorted((line.numbers[0], name) for name, line in self._lines.items() if name[0] == first)
        number, name = fronts[0]
        if len(fronts) == 1 or self._requests[number].account is not None:
            return name
        return first, self._least_served([tenant for _, (_, tenant) in fronts])
