"""Tenants that wait get the engine in turn, by the tokens that were computed for them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepResult
from strandline.records.sampling_params import SamplingParams

MAX_NUM_SEQS = 4
MAX_TOKENS = 10


class Engine:
    """A scheduler whose steps take a second each."""

    def __init__(self) -> None:
        cache = new_cache(CacheSize(400, 4))
        self.scheduler = Scheduler(cache, Loads(cache), StepLimits(MAX_NUM_SEQS, 400, 400))
        self.now_s = 0
        self.arrivals_s: dict[RequestId, int] = {}
        self.waits_s: dict[RequestId, int] = {}
        self.served = Counter[str]()
        self._num_requests = 0

    def send(self, tenant: str, num_tokens: int, weight: float = 1.0, max_tokens: int = MAX_TOKENS) -> RequestId:
        """Queue a request whose prompt shares nothing with others."""
        self._num_requests += 1
        name = RequestId(f"{tenant}-{self._num_requests}")
        params = SamplingParams(max_tokens=max_tokens)
        prompt = (self._num_requests, *range(num_tokens - 1))
        new = NewRequest(name, prompt, params, 0, frozenset(), ())
        self.scheduler.add(Request(Submission(new, num_tokens + max_tokens, tenant=tenant, weight=weight)))
        self.arrivals_s[name] = self.now_s
        return name

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        result = StepResult(tuple((1,) if sequence.is_sampled else () for sequence in plan.sequences))
        self.scheduler.commit(plan, result)
        self.now_s += 1
        for sequence in plan.sequences:
            tenant = sequence.request_id.split("-")[0]
            self.served[tenant] += sequence.end - sequence.start
            if sequence.is_sampled:
                self.waits_s.setdefault(sequence.request_id, self.now_s - self.arrivals_s[sequence.request_id])


def longest_wait_s(greedy: str, modest: str) -> int:
    """Return how long a tenant waits at most that sends a request now and then, while another has sent a hundred."""
    engine = Engine()
    for _ in range(100):
        engine.send(greedy, 50)
    names = []
    for now_s in range(120):
        if now_s % 12 == 0:
            names.append(engine.send(modest, 20))
        engine.step()
    return max(engine.waits_s.get(name, 1000) for name in names)


def test_greedy_tenant_does_not_starve_another() -> None:
    # A request of four ends after ten steps at the latest; the next to be admitted is the other tenant's.
    assert longest_wait_s("greedy", "modest") <= MAX_TOKENS + 2
    assert longest_wait_s("same", "same") == 1000, "in one line, they wait for all hundred"


@pytest.mark.parametrize("weight", [1, 3])
def test_tenants_that_always_wait_are_served_by_weight(weight: int) -> None:
    engine = Engine()
    for _ in range(200):
        engine.send("light", 30)
        engine.send("heavy", 30, weight=weight)
    for _ in range(300):
        engine.step()
    assert engine.served["heavy"] / engine.served["light"] == pytest.approx(weight, rel=0.15)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 20)), min_size=30, max_size=60))
def test_service_of_waiting_tenants_differs_by_what_runs_at_most(sent: list[tuple[str, int, int]]) -> None:
    engine = Engine()
    for tenant in "abc":
        for _ in range(20):
            engine.send(tenant, 40)
    for tenant, num_tokens, max_tokens in sent:
        engine.send(tenant, num_tokens, max_tokens=max_tokens)
    # The paper's bound: twice what all running requests can take.
    most = 2 * MAX_NUM_SEQS * (60 + 20)
    while all(any(each.submission.tenant == tenant for each in engine.scheduler.waiting) for tenant in "abc"):
        engine.step()
        served = [engine.served[tenant] for tenant in "abc"]
        assert max(served) - min(served) <= most


def test_tenant_that_returns_has_saved_nothing() -> None:
    engine = Engine()
    for _ in range(60):
        engine.send("busy", 50)
    for _ in range(60):
        engine.step()
    for _ in range(60):
        engine.send("new", 50)
    before = engine.served["busy"]
    for _ in range(60):
        engine.step()
    assert engine.served["new"] / (engine.served["busy"] - before) == pytest.approx(1, rel=0.35)
