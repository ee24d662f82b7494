"""The requests that wait, and which of them is admitted next.

They stand in *line* in the order in which they came, a preempted one before all others. Of the line the one goes first
of which most is cached, but the first is overtaken ``MAX_OVERTAKEN`` times at most. Who *follows* a running request,
which computes the beginning of its prompt, stands aside until that is done, and takes up its old place then.

A request has one number for as long as it waits, and is found by it in the line or aside, never in both; what is known
of how much of it is cached goes with its place in the line. Adding and leaving cost a bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from strandline.engine.request import Request

MAX_OVERTAKEN = 16
"""So many may be admitted before the request that has waited longest, because more of theirs is cached."""
MAX_RECHECKS = 8
"""So many waiting requests are looked up again before one of them is admitted: is theirs cached still?"""


class WaitingQueue:
    """Requests in line and aside.

    Args:
        hit_tokens: says how many tokens of a request are cached now; None: they go in order of arrival.
    """

    def __init__(self, hit_tokens: Callable[[Request], int] | None) -> None:
        self._hit_tokens = hit_tokens
        self._requests: dict[int, Request] = {}
        """All that wait, by number."""
        self._line: list[int] = []
        """Numbers, sorted."""
        self._aside: dict[int, Request] = {}
        self._unranked: dict[int, None] = {}
        """Those in line that have not been compared with others yet."""
        self._ranked: list[tuple[int, int, int]] = []
        """A heap: those first of which most is cached. An entry counts while ``_ranks`` names it."""
        self._ranks: dict[int, int] = {}
        """Of those in line that have been compared, the number of the entry that counts."""
        self._num_ranked = 0
        self._last_number = 0
        self._first_number = 0
        self._num_overtakes = 0
        """Admissions since the first in line could have been admitted."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield all that wait, in order."""
        return (self._requests[number] for number in sorted(self._requests))

    @property
    def has_line(self) -> bool:
        """Whether anybody waits who follows nobody."""
        return bool(self._line)

    # Coming and going

    def add(self, request: Request) -> None:
        """Let a new request wait, behind all others."""
        self._last_number += 1
        self._enter(request, self._last_number)

    def add_first(self, request: Request) -> None:
        """Let a preempted request wait, before all others."""
        self._first_number -= 1
        self._enter(request, self._first_number)

    def remove(self, request: Request) -> None:
        """Take out a request that is admitted or has ended, wherever it stands."""
        number = request.queue_number
        del self._requests[number]
        if self._aside.pop(number, None) is None:
            self._leave_line(number)

    def admit(self, request: Request) -> None:
        """Take out a request that is admitted from the line, and count whom it overtook."""
        self._num_overtakes = 0 if request.queue_number == self._line[0] else self._num_overtakes + 1
        self.remove(request)

    def set_aside(self, request: Request) -> None:
        """Let a request in line stand aside for as long as its lead is pending."""
        number = request.queue_number
        self._leave_line(number)
        self._aside[number] = request

    def call_back(self) -> None:
        """Let those take up their places again whose lead is there, or gone."""
        for number in [number for number, request in self._aside.items() if not request.is_following]:
            del self._aside[number]
            self._join_line(number)

    def _enter(self, request: Request, number: int) -> None:
        request.queue_number = number
        self._requests[number] = request
        self._join_line(number)

    def _join_line(self, number: int) -> None:
        insort(self._line, number)
        self._unranked[number] = None

    def _leave_line(self, number: int) -> None:
        del self._line[bisect_left(self._line, number)]
        if self._ranks.pop(number, None) is None:
            del self._unranked[number]

    # Choosing

    def first(self, num: int) -> list[Request]:
        """Return the first ``num`` in line."""
        return [self._requests[number] for number in self._line[:num]]

    def next(self) -> Request:
        """Return the request in line to admit next: the one of which most is cached, before that is evicted.

        The first one when it was preempted or was overtaken often enough: so a request waits for no more than
        ``MAX_OVERTAKEN`` that came later, for itself and for each that came before it.

        Raises:
            IndexError: nobody is in line.
        """
        first = self._requests[self._line[0]]
        if len(self._line) == 1 or self._num_overtakes >= MAX_OVERTAKEN or first.account is not None:
            return first
        return self._most_cached() or first

    def _most_cached(self) -> Request | None:
        """Return the request in line of which most is cached, as far as is known; None when nothing is."""
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
            missing, number, _ = ranked[0]
            request = self._requests[number]
            cached = self._hit_tokens(request)
            if cached >= -missing:
                return request
            self._rank(number, cached)
        return None

    def _rank(self, number: int, cached: int) -> None:
        """Enter a request in line by what is cached of it now; an earlier entry of it counts no longer."""
        self._num_ranked += 1
        self._ranks[number] = self._num_ranked
        heappush(self._ranked, (-cached, number, self._num_ranked))
