"""The scheduler alone, with a device that answers anything: fairness, budgets, progress."""

import pickle
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import new_cache, placement
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.cache.use import interarrival_bin
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.engine.scheduling.waiting import MAX_OVERTAKEN
from strandline.errors import EngineError, RequestError
from strandline.ids import RequestId, TransferId
from strandline.records.account import Reason, SnapshotKind
from strandline.records.actions import CancelTransfer, Completion, LoadIn, MoveBlock
from strandline.records.events import FinishReason, Submission
from strandline.records.offer import Offer, OfferedSnapshot
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams

EOS = 9


@pytest.fixture(autouse=True)
def _plans_keep_their_content(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare every plan of a test with what it was when it was made, from its bytes."""
    plans: list[tuple[StepPlan, bytes]] = []
    plan_step = Scheduler.plan

    def plan_and_pickle(scheduler: Scheduler) -> StepPlan | None:
        plan = plan_step(scheduler)
        if plan is not None:
            plans.append((plan, pickle.dumps(plan)))
        return plan

    monkeypatch.setattr(Scheduler, "plan", plan_and_pickle)
    yield
    assert all(pickle.loads(data) == plan for plan, data in plans)


def make_request(name: str, prompt: list[int], *, max_tokens: int = 8, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[5], priority=priority)
    new = NewRequest(RequestId(name), tuple(prompt), params, 0, frozenset({5, EOS}), ())
    return Request(Submission(new, len(prompt) + max_tokens))


def make_scheduler(
    num_slabs: int = 64, blocks_per_slab: int = 4, max_num_seqs: int = 8, max_tokens: int = 128, long_from: int = 0
) -> Scheduler:
    cache = new_cache(CacheSize(num_slabs, blocks_per_slab))
    return Scheduler(
        cache,
        Loads(cache),
        StepLimits(max_num_seqs, max_tokens, long_from),
    )


def answer(plan: StepPlan, token: int = 1) -> StepResult:
    return StepResult(tuple((token,) if sequence.is_sampled else () for sequence in plan.sequences))


def step(scheduler: Scheduler, token: int = 1) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, answer(plan, token))
    check(scheduler.cache)
    return plan


def test_step_uses_its_whole_token_budget_and_no_more() -> None:
    scheduler = make_scheduler(max_tokens=100)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 70))
    assert [(s.request_id, s.start, s.end) for s in step(scheduler).sequences] == [("a", 0, 70), ("b", 0, 30)]
    second = [(s.request_id, s.start, s.end) for s in step(scheduler).sequences]
    assert second == [("a", 70, 71), ("b", 30, 70), ("c", 0, 59)]


def spans(plan: StepPlan) -> list[tuple[str, int]]:
    """Return the tokens that a step computes, by request."""
    return [(sequence.request_id, sequence.end - sequence.start) for sequence in plan.sequences]


def test_long_prefills_get_shares_of_steps_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.engine.scheduling.long_prefills.STEPS_BETWEEN_SHARES", (2, 2))
    scheduler = make_scheduler(max_tokens=400, long_from=100)
    scheduler.add(make_request("a", [1] * 10, max_tokens=8))
    assert spans(step(scheduler)) == [("a", 10)]
    scheduler.add(make_request("b", [2] * 250))
    scheduler.add(make_request("c", [3] * 350))
    assert spans(step(scheduler)) == [("a", 1), ("b", 100)]
    scheduler.add(make_request("d", [4] * 90))
    assert spans(step(scheduler)) == [("a", 1), ("d", 90)]
    assert spans(step(scheduler)) == [("a", 1), ("d", 1)]
    # Two of them bring two shares, which the first may use up.
    assert spans(step(scheduler)) == [("a", 1), ("b", 150), ("c", 50), ("d", 1)]
    assert spans(step(scheduler)) == [("a", 1), ("b", 1), ("d", 1)]
    assert spans(step(scheduler)) == [("a", 1), ("b", 1), ("d", 1)]
    assert spans(step(scheduler)) == [("a", 1), ("b", 1), ("c", 100), ("d", 1)]


def test_many_long_prefills_leave_each_decode_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.engine.scheduling.long_prefills.STEPS_BETWEEN_SHARES", (1, 1))
    scheduler = make_scheduler(max_tokens=400, long_from=100, max_num_seqs=32)
    for index in range(8):
        scheduler.add(make_request(f"long{index}", [100 + index] * 390))
        scheduler.add(make_request(f"{index}", [index] * 3, max_tokens=90))
    decoding: set[str] = set()
    totals = []
    for _ in range(40):
        planned = step(scheduler)
        counts = dict(spans(planned))
        assert decoding <= set(counts)
        totals.append(sum(counts.values()))
        decoding |= {sequence.request_id for sequence in planned.sequences if sequence.is_sampled}
        decoding &= {request.request_id for request in scheduler.running}
    assert 395 <= max(totals[8:]) <= 400


@pytest.mark.parametrize(("num_decodes", "steps_between"), [(1, 8), (4, 8), (6, 5), (16, 2), (40, 2)])
def test_the_fewer_decode_the_more_steps_pass_between_shares(num_decodes: int, steps_between: int) -> None:
    scheduler = make_scheduler(max_tokens=400, long_from=100, max_num_seqs=64)
    for index in range(num_decodes):
        scheduler.add(make_request(f"{index}", [index] * 3, max_tokens=90))
    while len(scheduler.running) < num_decodes:
        step(scheduler)
    step(scheduler)
    scheduler.add(make_request("long", [99] * 390))
    due, shares = [], []
    for _ in range(20):
        due.append(scheduler.is_share_due)
        shares.append(any(count == 100 for _, count in spans(step(scheduler))))
    places = [position for position, is_share in enumerate(shares) if is_share]
    assert [after - before - 1 for before, after in pairwise(places)] == [steps_between] * (len(places) - 1)
    assert len(places) > 1
    # The first one waits in the queue until its step is planned.
    assert due[1:] == shares[1:]


def test_long_prefills_alone_take_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.engine.scheduling.long_prefills.STEPS_BETWEEN_SHARES", (2, 2))
    scheduler = make_scheduler(max_tokens=400, long_from=100)
    scheduler.add(make_request("a", [1] * 1000))
    scheduler.add(make_request("b", [2] * 500))
    assert [spans(step(scheduler)) for _ in range(3)] == [[("a", 400)], [("a", 400)], [("a", 200), ("b", 200)]]
    assert [spans(step(scheduler)) for _ in range(3)] == [[("a", 1)], [("a", 1)], [("a", 1), ("b", 100)]]


def test_cache_never_splits_a_step() -> None:
    scheduler = make_scheduler(max_tokens=1000)
    scheduler.add(make_request("a", [1] * 333))
    [sequence] = step(scheduler).sequences
    assert (sequence.start, sequence.end, sequence.is_sampled) == (0, 333, True)


def test_at_most_max_num_seqs_requests_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 3, max_tokens=2))
    assert [s.request_id for s in step(scheduler).sequences] == ["a", "b"]
    assert [s.request_id for s in step(scheduler).sequences] == ["a", "b"]
    assert [s.request_id for s in step(scheduler).sequences] == ["c"]


def test_stop_token_ends_a_request_and_is_reported() -> None:
    scheduler = make_scheduler()
    stopped, ended = make_request("a", [1]), make_request("b", [2])
    scheduler.add(stopped)
    step(scheduler, token=5)
    scheduler.add(ended)
    step(scheduler, token=EOS)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, 5)
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, None)
    assert len(scheduler) == 0


def test_max_tokens_ends_a_request_by_length() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], max_tokens=3)
    scheduler.add(request)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.LENGTH, 3)


def test_aborted_request_frees_everything_waiting_or_running() -> None:
    scheduler = make_scheduler(num_slabs=16)
    for name in "ab":
        scheduler.add(make_request(name, [ord(name)] * 200))
    step(scheduler)
    for name in "ab":
        scheduler.finish(RequestId(name), FinishReason.ABORT)
    check(scheduler.cache)
    assert scheduler.plan() is None
    assert not scheduler.cache.internals().leases


def test_request_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(make_request("a", [1]))


def test_latest_request_is_preempted_and_recomputes_one_token() -> None:
    scheduler = make_scheduler(num_slabs=7, blocks_per_slab=2, max_tokens=256)
    first, second = make_request("a", [1] * 120, max_tokens=200), make_request("b", [2] * 120, max_tokens=200)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert (first.lease is None, second.lease is None) == (False, True)
    scheduler.finish(RequestId("a"), FinishReason.ABORT)
    known = second.num_tokens
    [sequence] = step(scheduler).sequences
    assert (sequence.request_id, sequence.start, sequence.end) == ("b", known - 1, known)


def test_request_of_highest_priority_value_is_preempted() -> None:
    scheduler = make_scheduler(num_slabs=7, blocks_per_slab=2, max_tokens=256)
    lower, urgent = (
        make_request("a", [1] * 120, max_tokens=200, priority=1),
        make_request("b", [2] * 120, max_tokens=200),
    )
    scheduler.add(lower)
    step(scheduler)
    scheduler.add(urgent)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert (lower.lease is None, urgent.lease is None) == (True, False)
    while urgent.finish_reason is None:
        assert lower.lease is None or urgent.lease is not None
        step(scheduler)
    run_to_the_end(scheduler)
    assert lower.finish_reason is FinishReason.LENGTH


def test_urgent_request_follows_no_leader_that_it_may_delay() -> None:
    for priority, is_blocked in ((0, False), (1, True), (2, True)):
        scheduler = make_scheduler(num_slabs=200, max_tokens=64)
        scheduler.add(make_request("leader", [1] * 600, priority=1))
        step(scheduler)
        scheduler.add(make_request("second", [*[1] * 600, 2, 3], priority=priority))
        step(scheduler)
        assert bool(scheduler.waiting.num_admissible or len(scheduler.running) == 2) is not is_blocked
        run_to_the_end(scheduler)


PRIORITIES = st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 200), st.integers(1, 90)), min_size=1, max_size=12)


@given(PRIORITIES, st.integers(1, 4), st.integers(8, 40), st.integers(0, 5))
def test_lower_priority_values_are_admitted_first_and_all_end(
    wanted: list[tuple[int, int, int]], max_num_seqs: int, num_slabs: int, num_early: int
) -> None:
    scheduler = make_scheduler(num_slabs=num_slabs, max_num_seqs=max_num_seqs, max_tokens=96)
    requests = [
        make_request(str(index), [7] * shared + [index + 20] * 10, max_tokens=max_tokens, priority=priority)
        for index, (priority, shared, max_tokens) in enumerate(wanted)
    ]
    for request in requests[:num_early]:
        scheduler.add(request)
    for _ in range(3):
        if len(scheduler):
            step(scheduler)
    for request in requests[num_early:]:
        scheduler.add(request)
    for _ in range(5000):
        if not len(scheduler):
            break
        step(scheduler)
        order = [request.params.priority for request in scheduler.running]
        assert order == sorted(order)
        line = [request.params.priority for request in scheduler.waiting]
        assert line == sorted(line)
    assert not len(scheduler)
    assert all(request.finish_reason is not None for request in requests)


def run_to_the_end(scheduler: Scheduler) -> int:
    """Return how many tokens were computed."""
    num_tokens = 0
    while len(scheduler):
        num_tokens += step(scheduler).num_tokens
    return num_tokens


@given(st.permutations(range(5)), st.integers(20, 500))
def test_burst_with_a_shared_prefix_computes_it_once(order: list[int], max_tokens: int) -> None:
    scheduler = make_scheduler(num_slabs=200, max_tokens=max_tokens)
    suffixes = [[100 + index] * (10 + 7 * index) for index in range(5)]
    requests = [make_request(str(index), [1] * 150 + suffixes[index], max_tokens=1) for index in order]
    for request in requests:
        scheduler.add(request)
    assert run_to_the_end(scheduler) == 150 + sum(map(len, suffixes))
    assert sorted(request.account.hit for request in requests if request.account) == [0, 150, 150, 150, 150]


def test_burst_of_one_short_prompt_computes_it_once() -> None:
    scheduler = make_scheduler()
    for name in "abcd":
        scheduler.add(make_request(name, [1, 2, 3], max_tokens=1))
    assert run_to_the_end(scheduler) == 3


def test_follower_takes_over_from_an_aborted_leader() -> None:
    scheduler = make_scheduler(max_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, [1] * 200 + [ord(name)] * 10, max_tokens=1))
    assert [s.request_id for s in step(scheduler).sequences] == ["a"]
    scheduler.finish(RequestId("a"), FinishReason.ABORT)
    assert run_to_the_end(scheduler) == 200 - 64 + 20


def test_follower_does_not_delay_other_requests() -> None:
    scheduler = make_scheduler(max_tokens=64)
    for name, prompt in (("a", [1] * 200), ("b", [1] * 150 + [2] * 30), ("c", [3] * 20)):
        scheduler.add(make_request(name, prompt, max_tokens=1))
    step(scheduler)
    scheduler.max_num_batched_tokens = 160
    assert [s.request_id for s in step(scheduler).sequences] == ["a", "c"]


def test_few_shared_tokens_are_not_waited_for() -> None:
    scheduler = make_scheduler(max_tokens=500)
    for name in "ab":
        scheduler.add(make_request(name, [1] * 63 + [ord(name)] * 50))
    assert [s.request_id for s in step(scheduler).sequences] == ["a", "b"]


request_shapes = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200), st.integers(1, 80)), min_size=1, max_size=8)


@given(request_shapes, st.integers(1, 150), st.integers(7, 12), st.integers(1, 4))
def test_every_request_finishes_at_any_budget_and_memory(
    shapes: list[tuple[int, int, int]], max_tokens: int, num_slabs: int, max_num_seqs: int
) -> None:
    scheduler = make_scheduler(num_slabs, 2, max_num_seqs, max_tokens)
    requests = [
        make_request(str(index), ([family] * length), max_tokens=outputs)
        for index, (family, length, outputs) in enumerate(shapes)
    ]
    for request in requests:
        scheduler.add(request)
    most_steps = 10 * sum(request.max_total for request in requests)
    for _ in range(most_steps):
        if not len(scheduler):
            break
        plan = step(scheduler)
        assert plan.num_tokens <= max_tokens
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * len(requests)
    assert [len(request.output_ids) for request in requests] == [outputs for _, _, outputs in shapes]


def admitted(plans: list[StepPlan]) -> list[str]:
    """Return the requests of the plans in the order in which they first ran."""
    return list(dict.fromkeys(sequence.request_id for plan in plans for sequence in plan.sequences))


def test_request_with_most_cached_tokens_is_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", [1] * 100, max_tokens=1))
    step(scheduler)
    for name, prompt in [("cold", [2] * 50), ("warm", [1] * 100 + [3]), ("parted", [1] * 80 + [4])]:
        scheduler.add(make_request(name, prompt, max_tokens=1))
    assert admitted([step(scheduler) for _ in range(3)]) == ["warm", "cold", "parted"]


def test_uncached_requests_are_admitted_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for index in range(5):
        scheduler.add(make_request(str(index), [10 + index] * 50, max_tokens=1))
    assert admitted([step(scheduler) for _ in range(5)]) == list("01234")


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_overtaking_is_bounded(max_num_seqs: int, num_cold: int, num_waiting: int) -> None:
    scheduler = make_scheduler(max_num_seqs=max_num_seqs)
    scheduler.add(make_request("a", [1] * 100, max_tokens=1))
    step(scheduler)
    for index in range(num_cold):
        scheduler.add(make_request(f"cold{index}", [20 + index] * 50, max_tokens=1))
    plans = []
    num_warm = 0
    while any(RequestId(f"cold{index}") in scheduler for index in range(num_cold)):
        while len(scheduler) < num_waiting + num_cold:
            num_warm += 1
            scheduler.add(make_request(f"warm{num_warm}", [1] * 100 + [3, num_warm], max_tokens=1))
        plans.append(step(scheduler))
    order = admitted(plans)
    for index in range(num_cold):
        assert order.index(f"cold{index}") < (index + 1) * (MAX_OVERTAKEN + 1)
    assert [name for name in order if name.startswith("cold")] == [f"cold{index}" for index in range(num_cold)]


def test_preempted_request_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_slabs=5, blocks_per_slab=2, max_tokens=512)
    for name in "ab":
        scheduler.add(make_request(name, [ord(name)] * 126, max_tokens=40))
    while not scheduler.num_preemptions:
        step(scheduler)
    [preempted] = scheduler.waiting
    running = scheduler.running[0]
    scheduler.add(make_request("c", [*running.prompt_ids, 7, 8], max_tokens=2))
    plans = []
    while len(scheduler):
        plans.append(step(scheduler))
    order = admitted(plans)
    assert order.index(preempted.request_id) < order.index("c")


def test_preempted_request_keeps_the_interarrival_time_of_its_path() -> None:
    scheduler = make_scheduler(num_slabs=7, blocks_per_slab=2, max_tokens=256)
    for index, token in enumerate([2, *range(20, 31)]):
        scheduler.add(make_request(f"before{index}", [token] * 70, max_tokens=1))
        run_to_the_end(scheduler)
    first, second = make_request("a", [1] * 120, max_tokens=200), make_request("b", [2] * 120, max_tokens=200)
    scheduler.add(first)
    scheduler.add(second)
    run_to_the_end(scheduler)
    assert scheduler.num_preemptions
    [last] = [s for _, tokens, s in published_snapshots(scheduler.cache) if len(tokens) == 4 * 319 and tokens[3] == 2]
    assert last.use.interarrival_bin == interarrival_bin(12)


def test_expected_hits_are_protected_until_requests_run_or_end() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("first", [1] * 100, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("runs", [2] * 100))
    step(scheduler)
    scheduler.add(make_request("waits", [1] * 120))
    scheduler.add(make_request("goes", [1] * 130))
    assert set(scheduler.cache.internals().expected) == {"waits", "goes"}
    scheduler.finish(RequestId("goes"), FinishReason.ABORT)
    scheduler.finish(RequestId("runs"), FinishReason.ABORT)
    step(scheduler)
    assert scheduler.cache.internals().expected == {}


def test_known_tokens_are_computed_together_in_one_step() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1] * 10, max_tokens=8)
    scheduler.add(request)
    step(scheduler)
    scheduler.append_known(request, [2, 3, 4])
    [sequence] = step(scheduler).sequences
    assert (sequence.start, sequence.end, list(sequence.token_ids)) == (10, 14, [1, 2, 3, 4])
    assert (request.output_ids, len(request.tokens)) == ([1, 2, 3, 4, 1], 15)


def test_known_tokens_are_refused_without_room_or_during_a_step() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1] * 10, max_tokens=8)
    scheduler.add(request)
    step(scheduler)
    with pytest.raises(EngineError, match="cannot take 7 known tokens"):
        scheduler.append_known(request, [2] * 7)
    scheduler.plan()
    with pytest.raises(EngineError, match="cannot take 1 known tokens"):
        scheduler.append_known(request, [2])


def test_block_tables_follow_blocks_moved_for_later_cuts() -> None:
    rng, num_moved = Random(0), 0
    cache = new_cache(CacheSize(12, 4), placement=placement("all", 64))
    scheduler = Scheduler(cache, Loads(cache), StepLimits(6, 400, long_prefill_token_threshold=150))
    for index in range(300):
        prompt = rng.choices(range(10, 14), k=1) * rng.randrange(40, 400)
        scheduler.add(make_request(str(index), prompt, max_tokens=rng.randrange(1, 90)))
        for _ in range(rng.randrange(6)):
            plan = scheduler.plan()
            if plan is None:
                break
            tables = {r.request_id: r.lease.table.tobytes() for r in scheduler.running if r.lease is not None}
            assert all(sequence.block_table == tables[sequence.request_id] for sequence in plan.sequences)
            num_moved += len(plan.sequences) > 1 and any(isinstance(action, MoveBlock) for action in plan.actions)
            scheduler.commit(plan, answer(plan))
    assert num_moved > 10


def request_with_offer(name: str, prompt: list[int], position: int) -> Request:
    request = make_request(name, prompt)
    snapshots = (OfferedSnapshot(position, 99, SnapshotKind.PROMPT_END),)
    request.loads.offer = Offer("store", position, 0, tuple(range(1, 1 - (-position // 64))), snapshots)
    return request


def test_a_request_waits_for_its_load_and_no_step_does() -> None:
    scheduler = make_scheduler()
    prompt = [1, 2] * 100
    request = request_with_offer("a", prompt, 150)
    scheduler.add(request)
    assert scheduler.plan() is None, "there is nothing to compute before the load has ended"
    [load] = scheduler.cache.take_actions()
    assert isinstance(load, LoadIn)
    scheduler.add(make_request("b", [7] * 30))
    assert spans(step(scheduler)) == [("b", 30)]
    scheduler.loading.complete([Completion(load.transfer, is_done=True)])
    assert spans(step(scheduler)) == [("b", 1), ("a", 50)]
    assert request.account is not None
    assert request.account.hit == 150


def test_requests_with_the_same_prefix_wait_for_one_load() -> None:
    scheduler = make_scheduler()
    prompt = [1, 2] * 100
    for name in "ab":
        scheduler.add(request_with_offer(name, prompt, 150))
    assert scheduler.plan() is None
    [load] = scheduler.cache.take_actions()
    assert isinstance(load, LoadIn)
    scheduler.loading.complete([Completion(load.transfer, is_done=True)])
    assert [s.start for s in step(scheduler).sequences] == [150], "b follows a to the end of their prompt"


def test_a_failed_load_is_computed_and_not_tried_again() -> None:
    scheduler = make_scheduler()
    request = request_with_offer("a", [1, 2] * 60, 100)
    scheduler.add(request)
    assert scheduler.plan() is None
    [load] = scheduler.cache.take_actions()
    assert isinstance(load, LoadIn)
    scheduler.loading.complete([Completion(load.transfer, is_done=False)])
    assert spans(step(scheduler)) == [("a", 120)]
    assert request.account is not None
    assert [miss.reason for miss in request.account.misses] == [Reason.LOAD_FAILED, Reason.FIRST_SEEN]


def test_aborting_the_last_follower_cancels_its_load() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(request_with_offer(name, [1, 2] * 60, 100))
    assert scheduler.plan() is None
    [load] = scheduler.cache.take_actions()
    assert isinstance(load, LoadIn)
    scheduler.finish(RequestId("a"), FinishReason.ABORT)
    assert scheduler.cache.take_actions() == []
    scheduler.finish(RequestId("b"), FinishReason.ABORT)
    assert scheduler.cache.take_actions() == [CancelTransfer(load.transfer)]
    scheduler.loading.complete([Completion(TransferId(1), is_done=False)])
    check(scheduler.cache)
    memory = scheduler.cache.memory_use()
    assert (memory.num_slots, memory.num_blocks) == (0, 0)


def test_a_load_without_room_waits_while_others_run() -> None:
    scheduler = make_scheduler(num_slabs=5, blocks_per_slab=4)
    scheduler.add(make_request("a", [3] * 500, max_tokens=2))
    step(scheduler)
    request = request_with_offer("b", [1, 2] * 120, 200)
    scheduler.add(request)
    while scheduler.running:
        step(scheduler)
    assert scheduler.plan() is None
    assert request.wait.is_following
