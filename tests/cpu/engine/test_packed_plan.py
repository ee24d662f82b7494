"""Plans on their way to workers: what comes out is what went in, or an error."""

import pickle
from array import array
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.policy import new_cache, placement
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.processes.worker import Worker
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.engine.workers.packed_plan import PlanPacker, PlanUnpacker
from strandline.engine.workers.worker_link import Call, Reply
from strandline.errors import EngineError
from strandline.ids import NULL_LOG, NULL_SLOT, PendingToken, RequestId
from strandline.records.events import FinishReason
from strandline.records.pictures import Picture, PictureSpan
from strandline.records.plan import NewRequest, PictureToEncode, SequencePlan, StepPlan
from strandline.records.sampling_params import SamplingParams
from tests.cpu.engine.test_scheduler import answer, make_request, make_scheduler, run_to_the_end, step

Table = list[int]


def sequence_of(name: str, table: Table, start: int = 0) -> SequencePlan:
    token_ids, blocks = (start, start + 1), array("i", table).tobytes()
    flags = (False, PendingToken.GOES_ON, True)
    return SequencePlan(
        RequestId(name), start, start + 2, token_ids, blocks, 3, NULL_SLOT, NULL_SLOT, (), *flags, NULL_LOG, 0, 2
    )


def plan_of(tables: dict[str, Table], new: str = "", gone: str = "", start: int = 0) -> StepPlan:
    introduced = tuple(NewRequest(RequestId(name), (1,), SamplingParams(), 0, frozenset(), ()) for name in new)
    sequences = tuple(sequence_of(name, table, start) for name, table in tables.items())
    return StepPlan(sequences, (), introduced, tuple(map(RequestId, gone)))


class Sent:
    """Both ends of what plans travel through, as bytes."""

    def __init__(self) -> None:
        self.packer, self.unpacker = PlanPacker(), PlanUnpacker()
        self.num_bytes = 0
        """Size of the last plan."""

    def __call__(self, plan: StepPlan) -> StepPlan:
        data = pickle.dumps(self.packer.pack(plan))
        self.num_bytes = len(data)
        return self.unpacker.unpack(pickle.loads(data))


def changed(table: Table, rng: Random) -> Table:
    """Return a table as it may be in the next step: longer, shorter, with other blocks, another one, or the same."""
    first, past = sorted(rng.choices(range(len(table) + 1), k=2))
    blocks = [rng.randrange(2**20) for _ in range(rng.randrange(4))]
    replaced = table[:first] + blocks + table[past:]
    return rng.choice([table, table, table + blocks, table[:first], replaced, blocks])


def plans(rng: Random) -> Iterator[StepPlan]:
    """Yield any plans: requests come, pause, go on with any table, go, and come again under the same id."""
    tables: dict[str, Table] = {}
    for number in range(rng.randrange(30)):
        gone = "".join(name for name in tables if rng.random() < 0.2)
        for name in gone:
            del tables[name]
        new = "".join(name for name in "abcde" if name not in tables and rng.random() < 0.4)
        tables |= {name: [] for name in new}
        planned = [name for name in tables if rng.random() < 0.8]
        tables |= {name: changed(tables[name], rng) for name in planned}
        yield plan_of({name: tables[name] for name in planned}, new, gone, number)


@given(st.randoms(use_true_random=False))
def test_plans_arrive_as_they_were_sent(rng: Random) -> None:
    sent = Sent()
    for plan in plans(rng):
        assert sent(plan) == plan


def test_pictures_arrive_as_they_were_sent() -> None:
    sent, plan = Sent(), plan_of({"a": [1]}, new="a")
    picture = Picture(bytes(16), b"pixels", 1, 2, (3, 4))
    seen = plan.sequences[0]._replace(rotary_delta=-9, pictures=(PictureSpan(1, 2, 3, picture.digest),))
    plan = replace(plan, sequences=(seen,), pictures=(PictureToEncode(picture, 7),))
    assert sent(plan) == plan


def test_plans_of_a_scheduler_arrive_as_they_were_sent() -> None:
    """With forks, aborts, ids that are used again, preemptions, resumes, and blocks that move."""
    rng, sent = Random(0), Sent()
    cache = new_cache(CacheSize(12, 4), placement=placement("all", 64))
    scheduler = Scheduler(cache, Loads(cache), StepLimits(6, 400, long_prefill_token_threshold=150))
    names = list(map(str, range(8)))
    num_reused = 0
    while not (scheduler.num_preemptions > 5 and num_reused > 50):
        for name in rng.sample(names, 2):
            scheduler.finish(RequestId(name), FinishReason.ABORT)
            num_reused += 1
            prompt = [rng.randrange(3)] * rng.randrange(40, 400)
            scheduler.add(make_request(name, prompt, max_tokens=rng.randrange(1, 90)))
        for _ in range(rng.randrange(12)):
            plan = scheduler.plan()
            if plan is None:
                break
            assert sent(plan) == plan
            scheduler.commit(plan, answer(plan))
    assert scheduler.cache.stats().hit_tokens > 0


def test_what_is_sent_does_not_grow_with_the_context() -> None:
    sizes = []
    for num_blocks in (1, 2000):
        sent, table = Sent(), list(range(1, num_blocks + 1))
        sent(plan_of({"a": table}, new="a"))
        sent(plan_of({"a": table}, start=1))
        same = sent.num_bytes
        sent(plan_of({"a": [*table, 7]}, start=2))
        sizes.append((same, sent.num_bytes))
    (same, longer), large = sizes
    assert large[0] == same
    assert large[1] - longer < 10


def test_a_resumed_request_gets_the_blocks_it_has_then() -> None:
    scheduler, sent = make_scheduler(num_slabs=7, blocks_per_slab=2, max_tokens=256), Sent()
    requests = [make_request(name, [ord(name)] * 120, max_tokens=200) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    while not scheduler.num_preemptions:
        plan = step(scheduler)
        assert sent(plan) == plan
    before = plan.sequences[-1].block_table
    scheduler.finish(RequestId("a"), FinishReason.ABORT)
    [sequence] = sent(step(scheduler)).sequences
    assert requests[1].lease is not None
    assert sequence.block_table == requests[1].lease.table.tobytes() != before
    run_to_the_end(scheduler)


def test_a_worker_that_missed_a_plan_fails_from_then_on() -> None:
    sent = Sent()
    sent(plan_of({"a": [1]}, new="a"))
    sent.packer.pack(plan_of({"a": [1, 2]}))
    for number in (2, 3):
        with pytest.raises(EngineError, match=f"out of step: it got plan {number} instead of 1"):
            sent(plan_of({"a": [1, 2]}))


def test_a_plan_that_comes_twice_is_refused() -> None:
    packer, unpacker = PlanPacker(), PlanUnpacker()
    packed = packer.pack(plan_of({"a": [1]}, new="a"))
    unpacker.unpack(packed)
    with pytest.raises(EngineError, match="out of step"):
        unpacker.unpack(packed)


@pytest.mark.parametrize("plan", [plan_of({"b": [1]}), plan_of({}, gone="b")], ids=["planned", "gone"])
def test_unknown_requests_are_refused(plan: StepPlan) -> None:
    sent, packer = Sent(), PlanPacker()
    sent(plan_of({}, new="a"))
    packer.pack(plan_of({}, new="ab"))
    with pytest.raises(EngineError, match="'b', which this worker does not know"):
        sent.unpacker.unpack(packer.pack(plan))


def test_a_table_that_differs_is_refused() -> None:
    sent = Sent()
    sent(plan_of({"a": [1, 2]}, new="a"))
    packer = PlanPacker()
    packer.pack(plan_of({"a": [1, 3]}, new="a"))
    packed = packer.pack(plan_of({"a": [1, 3, 4]}))
    for _ in range(2):
        with pytest.raises(EngineError, match="block table of a in plan 1 is not the engine's"):
            sent.unpacker.unpack(packed)


def test_requests_are_forgotten_at_both_ends() -> None:
    sent = Sent()
    sent(plan_of({"a": [1]}, new="a"))
    sent.packer.forget_requests()
    sent.unpacker.forget_requests()
    with pytest.raises(KeyError):
        sent.packer.pack(plan_of({"a": [1]}))
    plan = plan_of({"a": [2]}, new="a")
    assert sent(plan) == plan


def test_a_worker_out_of_step_launches_nothing() -> None:
    launched, replies = list[StepPlan](), list[Reply]()
    executor: Any = SimpleNamespace(launch=launched.append, close=lambda: None)
    worker, packer = Worker(executor, replies.append), PlanPacker()
    packer.pack(plan_of({}))
    worker.handle(Call(5, "launch", (packer.pack(plan_of({})),), ()))
    worker.close()
    assert not launched
    [(number, value, error)] = replies
    assert (number, value) == (5, None)
    assert isinstance(error, EngineError)
