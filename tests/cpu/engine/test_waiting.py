"""The queue of those that wait, against a list that is searched anew for every answer."""

from array import array
from collections import Counter
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strandline.cache import Lead, Lease
from strandline.cache.tree import Run
from strandline.engine.requests.request import Request
from strandline.engine.scheduling import waiting
from strandline.engine.scheduling.waiting import WaitingQueue
from strandline.ids import RequestId
from strandline.records.account import Account
from strandline.records.events import Submission
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams
from strandline.records.tokens import TokenBuffer

MAX_OVERTAKEN = 2
MAX_RECHECKS = 2
FOUND = Account(1, 0, 0, None, ())


def make_request(number: int, priority: int = 0) -> Request:
    params = SamplingParams(priority=priority)
    return Request(Submission(NewRequest(RequestId(str(number)), (1,), params, 0, frozenset(), ()), 2))


def make_lead() -> Lead:
    root = Run(None, 0, b"", array("i"))
    return Lead(Lease(RequestId("lead"), TokenBuffer([1]), "", root, root, FOUND), 1)


class QueueMachine(RuleBasedStateMachine):
    """Adds, preempts, aborts, admits, lets follow and call back, and evicts what was cached."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = patch.multiple(waiting, MAX_OVERTAKEN=MAX_OVERTAKEN, MAX_RECHECKS=MAX_RECHECKS)
        self.patches.start()
        self.cached: dict[Request, int] = {}
        self.queue = WaitingQueue(lambda request: self.cached[request])
        self.waiting: list[Request] = []
        self.admitted: list[Request] = []
        self.num_made = 0
        self.num_overtakes: Counter[int] = Counter()
        """By priority."""
        self.evicted: set[Request] = set()
        """Less of them is cached than when they came; the queue may not know it yet."""

    def teardown(self) -> None:
        self.patches.stop()

    @property
    def line(self) -> list[Request]:
        return [request for request in self.waiting if not self.is_aside(request)]

    def insert(self, request: Request, *, is_first: bool) -> None:
        """Put a request before or behind all others of its priority."""
        priority = request.params.priority
        before = [one for one in self.waiting if one.params.priority < priority + (not is_first)]
        self.waiting.insert(len(before), request)

    def is_aside(self, request: Request) -> bool:
        return request.wait.lead is not None

    @initialize(cached=st.lists(st.integers(0, 3), max_size=6))
    def start(self, cached: list[int]) -> None:
        for tokens in cached:
            self.add(tokens, 0)

    @rule(cached=st.integers(0, 3), priority=st.integers(-1, 1))
    def add(self, cached: int, priority: int) -> None:
        self.num_made += 1
        request = make_request(self.num_made, priority)
        self.cached[request] = cached
        self.queue.add(request)
        self.insert(request, is_first=False)

    @precondition(lambda self: self.admitted)
    @rule(index=st.integers(0, 20))
    def preempt(self, index: int) -> None:
        request = self.admitted.pop(index % len(self.admitted))
        self.queue.add_first(request)
        self.insert(request, is_first=True)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        request = self.waiting.pop(index % len(self.waiting))
        self.queue.remove(request)

    @precondition(lambda self: self.line)
    @rule(follows=st.booleans())
    def choose(self, follows: bool) -> None:
        request = self.queue.next()
        line = self.line
        first = line[0].params.priority
        assert request.params.priority == first
        best = min(
            (one for one in line if one.params.priority == first), key=lambda one: (-self.cached[one], line.index(one))
        )
        is_bound = self.num_overtakes[first] >= MAX_OVERTAKEN or line[0].account is not None
        if is_bound or (len(self.evicted) >= MAX_RECHECKS and request is line[0]):
            assert request is line[0]
        else:
            assert request is best
        self.evicted.discard(request)
        if follows:
            request.wait.lead = make_lead()
            self.queue.block(request)
            return
        self.queue.admit(request)
        self.num_overtakes[first] = 0 if request is line[0] else self.num_overtakes[first] + 1
        assert self.num_overtakes[first] <= MAX_OVERTAKEN
        self.waiting.remove(request)
        self.admitted.append(request)
        request.account = FOUND

    @precondition(lambda self: len(self.waiting) > len(self.line))
    @rule(index=st.integers(0, 20))
    def arrive(self, index: int) -> None:
        """End the wait of a blocked request."""
        aside = [request for request in self.waiting if self.is_aside(request)]
        request = aside[index % len(aside)]
        assert request.wait.lead is not None
        request.wait.lead.lease.is_active = False
        self.queue.requeue_unblocked()
        request.wait.lead = None

    @precondition(lambda self: any(self.cached[request] for request in self.waiting))
    @rule(index=st.integers(0, 20))
    def evict(self, index: int) -> None:
        some = [request for request in self.waiting if self.cached[request]]
        request = some[index % len(some)]
        self.cached[request] -= 1
        self.evicted.add(request)

    @invariant()
    def everybody_waits_once_and_in_order(self) -> None:
        assert list(self.queue) == self.waiting
        assert len(self.queue) == len(self.waiting)
        assert self.queue.first(len(self.waiting)) == self.line
        assert self.queue.has_admissible == bool(self.line)


TestQueue = QueueMachine.TestCase


def test_requests_without_a_cache_are_admitted_in_order() -> None:
    queue = WaitingQueue(None)
    requests = [make_request(number) for number in range(4)]
    for request in requests:
        queue.add(request)
    chosen = []
    while len(queue):
        chosen.append(queue.next())
        queue.admit(chosen[-1])
    assert chosen == requests


def test_blocking_repeatedly_leaves_no_stale_entries() -> None:
    asked = []

    def hit_tokens(request: Request) -> int:
        asked.append(request)
        return 0

    queue = WaitingQueue(hit_tokens)
    requests = [make_request(number) for number in range(20)]
    for request in requests:
        queue.add(request)
    for request in requests[:15]:
        request.wait.lead = make_lead()
        queue.block(request)
    for _ in range(100):
        queue.requeue_unblocked()
        queue.next()
    assert asked == requests[15:]
