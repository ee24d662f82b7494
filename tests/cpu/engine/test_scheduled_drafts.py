"""The scheduler with a drafter and a device that accepts any number of drafts: every plan has the tokens it should."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.cache.inspection.invariants import check
from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.drafting.drafts import Drafts
from strandline.engine.drafting.step_drafts import DraftLimits
from strandline.engine.requests.request import Request
from strandline.engine.scheduling import long_prefills
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams

MAX_DRAFTS = 3


def token_at(name: str, position: int) -> int:
    """Return the token of a request's output at a position: none is like those near it."""
    return 100 + (7 * position + len(name)) % 50


class Foreseeing:
    """Drafts what the device will answer."""

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        first = len(request.tokens)
        return tuple(token_at(request.request_id, first + index) for index in range(max_tokens))


@pytest.fixture(autouse=True)
def _every_step_has_a_share_of_long_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prefills, "STEPS_BETWEEN_SHARES", (1, 1))


def scheduler_with_drafts(limits: StepLimits) -> Scheduler:
    """Return one that computes preempted requests again: nothing is cached."""
    cache = new_cache(CacheSize(96, 2, num_logs=limits.max_num_seqs), enabled=False)
    return Scheduler(
        cache, Loads(cache), limits, Drafts(cache, Foreseeing(), DraftLimits(MAX_DRAFTS), methods=["ngram"])
    )


def make_request(name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    new = NewRequest(RequestId(name), (len(name),) * num_prompt_tokens, params, 0, frozenset(), ())
    return Request(Submission(new, num_prompt_tokens + max_tokens))


def run(scheduler: Scheduler, requests: Sequence[Request], num_accepted: int) -> StepPlan | None:
    """Run a step; every plan must compute the tokens of its requests, and drafts after all of these alone."""
    by_name = {request.request_id: request for request in requests}
    plan = scheduler.plan()
    if plan is None:
        return None
    sampled = list[tuple[int, ...]]()
    for x in plan.sequences:
        request = by_name[x.request_id]
        known = (*request.prompt_ids, *request.output_ids)
        assert x.token_ids[: x.num_certain] == known[x.start : x.end - x.num_drafts]
        assert x.is_sampled == (x.end - x.num_drafts == len(known))
        assert not x.num_drafts or x.is_sampled
        count = 1 + min(num_accepted, x.num_drafts) if x.is_sampled else 0
        sampled.append(tuple(token_at(x.request_id, len(known) + index) for index in range(count)))
    scheduler.commit(plan, StepResult(tuple(sampled)))
    check(scheduler.cache)
    return plan


def test_no_drafts_follow_a_token_computed_again() -> None:
    scheduler = scheduler_with_drafts(StepLimits(8, 400, long_prefill_token_threshold=100))
    requests = [make_request("a", 10, 90), make_request("bb", 563, 90), make_request("ccc", 300, 90)]
    for request in requests:
        scheduler.add(request)
    while not requests[-1].output_ids:
        run(scheduler, requests, 1)
    scheduler.preempt_all()
    sizes = list[int]()
    while len(scheduler):
        plan = run(scheduler, requests, 1)
        assert plan is not None
        sizes += [x.end - x.start for x in plan.sequences if x.request_id == "ccc" and not x.is_sampled]
    # Another request left a single token of the step's share.
    assert 1 in sizes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(5, 60)), min_size=2, max_size=5),
    budget=st.integers(8, 60),
    threshold=st.integers(1, 3),
    preempted_after=st.lists(st.integers(5, 40), min_size=2, max_size=6),
    num_accepted=st.integers(0, MAX_DRAFTS),
)
def test_plans_of_preempted_requests_have_the_right_tokens(
    sizes: list[tuple[int, int]],
    budget: int,
    threshold: int,
    preempted_after: list[int],
    num_accepted: int,
) -> None:
    scheduler = scheduler_with_drafts(StepLimits(4, budget, threshold))
    requests = [make_request("x" * (1 + index), *size) for index, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while len(scheduler):
        assert run(scheduler, requests, num_accepted) is not None
        num_steps += 1
        if preempted_after and num_steps == preempted_after[0]:
            scheduler.preempt_all()
            preempted_after, num_steps = preempted_after[1:], 0
    for request in requests:
        first = request.num_prompt_tokens
        assert request.output_ids == [token_at(request.request_id, index) for index in range(first, request.max_total)]
