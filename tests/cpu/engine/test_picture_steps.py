"""Pictures in the scheduler's steps: what is encoded when, and which rows of the memory sequences take."""

from collections.abc import Collection, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.inspection.invariants import check
from strandline.cache.policy import AUTO, OnGrid, new_cache
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.errors import EngineError
from strandline.ids import FIRST_VIRTUAL_ID, RequestId
from strandline.records.events import FinishReason, Submission
from strandline.records.pictures import Picture, PictureSpan, rotary_delta, rotary_positions
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams

PAD, EOS, TEXT = 7, 9, 1
MAX_PICTURE_TOKENS = 100

Pieces = Sequence[int | str]
"""Numbers of tokens of text, and names of pictures."""

PICTURES = {
    name: (Picture(name.encode(), bytes(3), 1, 1, (1, 1)), rows, columns)
    for name, rows, columns in [("cat", 3, 7), ("dog", 10, 10), ("hen", 1, 1), ("pig", 9, 4)]
}


def make_request(name: str, pieces: Pieces, *, max_tokens: int = 3, left_out: Collection[str] = ()) -> Request:
    prompt, spans = list[int](), list[PictureSpan]()
    for piece in pieces:
        if isinstance(piece, int):
            prompt += [TEXT] * piece
        else:
            picture, rows, columns = PICTURES[piece]
            prompt.append(TEXT)  # between two pictures there is text
            spans.append(PictureSpan(len(prompt), rows, columns, picture.digest))
            prompt += [PAD] * (rows * columns)
    new = NewRequest(RequestId(name), tuple(prompt), SamplingParams(max_tokens=max_tokens), 0, frozenset({EOS}), ())
    names = {span.digest.decode() for span in spans}
    pixels = {name.encode(): PICTURES[name][0] for name in names.difference(left_out)}
    return Request(Submission(new, len(prompt) + max_tokens, pictures=tuple(spans), pixels=pixels))


class Steps:
    """A scheduler, and the memory of encoded pictures as its plans fill it."""

    def __init__(
        self,
        *,
        num_slabs: int = 60,
        max_tokens: int = 64,
        encoder_tokens: int = MAX_PICTURE_TOKENS,
        rule: ResumeRule = AT_SNAPSHOTS,
        deterministic: bool = False,
    ) -> None:
        cache = new_cache(CacheSize(num_slabs, 4), rule=rule, placement=OnGrid(AUTO) if deterministic else AUTO)
        limits = StepLimits(8, max_tokens, encoder_tokens=encoder_tokens)
        self.scheduler = Scheduler(cache, Loads(cache), limits, deterministic=deterministic)
        self.requests = dict[str, Request]()
        self.encoded = list[str]()
        self.asked = list[str]()
        self.scheduler.pictures.ask = lambda digests: self.asked.extend(digest.decode() for digest in digests)
        self._memory: list[tuple[bytes, int] | None] = [None] * encoder_tokens
        self._in_flight: StepPlan | None = None

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def step(self, *, overlaps: bool = False) -> StepPlan | None:
        """Run a step, planned before the last one is settled where steps overlap."""
        if not overlaps:
            self.settle()
        plan = self.scheduler.plan()
        self.settle()
        if plan is None:
            return None
        for picture, row in plan.pictures:
            name = picture.digest.decode()
            self.encoded.append(name)
            _, rows, columns = PICTURES[name]
            for index in range(rows * columns):
                self._memory[row + index] = (picture.digest, index)
        for sequence in plan.sequences:
            request = self.requests[sequence.request_id]
            spans = request.submission.pictures
            wanted = {span.start + index: (span.digest, index) for span in spans for index in range(span.num_tokens)}
            found = {
                position: self._memory[token_id - FIRST_VIRTUAL_ID]
                for position, token_id in enumerate(sequence.token_ids, sequence.start)
                if token_id >= FIRST_VIRTUAL_ID
            }
            assert found == {p: each for p, each in wanted.items() if sequence.start <= p < sequence.end}
            assert PAD not in sequence.token_ids
            near = sequence.pictures
            assert near == tuple(s for s in spans if s.end >= sequence.start and s.start <= sequence.end)
            assert sequence.rotary_delta == rotary_delta([s for s in spans if s.end < sequence.start])
            moved = [s._replace(start=s.start + sequence.rotary_delta) for s in near]
            end = sequence.start + len(sequence.token_ids)
            positions = rotary_positions(moved, sequence.start + sequence.rotary_delta, end + sequence.rotary_delta)
            assert positions == rotary_positions(spans, sequence.start, end)
        self.scheduler.advance(plan)
        self._in_flight = plan
        check(self.scheduler.cache)
        return plan

    def settle(self) -> None:
        if self._in_flight is not None:
            plan, self._in_flight = self._in_flight, None
            self.scheduler.settle(plan, StepResult(tuple((2,) if s.is_sampled else () for s in plan.sequences)))

    def send_asked(self) -> None:
        """Give the scheduler the pictures that it has asked for."""
        names, self.asked = self.asked, []
        self.scheduler.pictures.receive([PICTURES[name][0] for name in names])

    def run(self) -> None:
        for _ in range(10_000):
            if not len(self.scheduler):
                return
            self.step()
            self.settle()
            self.send_asked()
        raise AssertionError("requests do not end")


def test_picture_is_encoded_once_for_all_of_its_chunks() -> None:
    steps = Steps(max_tokens=16)
    steps.add(make_request("a", [20, "dog", 5]))
    plans = [steps.step() for _ in range(8)]
    assert [len(plan.pictures) for plan in plans if plan is not None] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_picture_that_is_covered_by_a_hit_is_not_encoded() -> None:
    steps = Steps(max_tokens=1000)
    steps.add(make_request("a", [70, "cat", 30]))
    steps.run()
    steps.add(make_request("b", [70, "cat", 30, 10]))
    steps.run()
    assert steps.requests["b"].account is not None
    assert steps.requests["b"].account.hit == 70 + 1 + 21 + 30
    assert steps.encoded == ["cat"]


def test_equal_pictures_are_encoded_once() -> None:
    steps = Steps(max_tokens=1000)
    steps.add(make_request("a", [10, "cat", 30, "cat", 5]))
    steps.add(make_request("b", [3, "cat", 30]))
    steps.run()
    assert steps.encoded == ["cat"]


def test_picture_waits_for_room_and_no_longer() -> None:
    steps = Steps(max_tokens=1000)
    steps.add(make_request("a", [10, "dog", 3]))
    steps.add(make_request("b", [10, "pig", 3]))
    first = steps.step()
    assert first is not None
    assert [(s.request_id, s.start, s.end) for s in first.sequences] == [("a", 0, 114), ("b", 0, 11)]
    second = steps.step()
    assert second is not None
    assert [(s.request_id, s.start, s.end) for s in second.sequences] == [("a", 114, 115), ("b", 11, 50)]
    assert steps.encoded == ["dog", "pig"]


def test_picture_that_can_never_be_encoded_is_an_error() -> None:
    steps = Steps(encoder_tokens=99)
    steps.add(make_request("a", [3, "dog"]))
    with pytest.raises(EngineError, match="a picture of 100 tokens exceeds the 99"):
        steps.step()


def test_picture_that_a_hit_covers_is_not_asked_for() -> None:
    steps = Steps(max_tokens=1000)
    steps.add(make_request("a", [70, "cat", 30]))
    steps.run()
    steps.add(make_request("b", [70, "cat", 30, "dog", 10, "pig", 4], left_out=["cat", "dog", "pig"]))
    plan = steps.step()
    assert plan is not None
    assert steps.asked == ["dog", "pig"]
    assert [(each.start, each.end) for each in plan.sequences] == [(122, 123)]
    assert steps.step() is None
    steps.add(make_request("c", [20]))
    assert steps.step() is not None
    steps.send_asked()
    steps.run()
    assert steps.encoded == ["cat", "dog", "pig"]
    assert steps.asked == []


def test_request_asks_although_another_one_that_asked_has_been_ended() -> None:
    steps = Steps(max_tokens=1000)
    for name in "ab":
        steps.add(make_request(name, [5, "cat"], left_out=["cat"]))
        steps.step()
        assert steps.asked == ["cat"]
        steps.asked.clear()
        steps.scheduler.finish(RequestId(name), FinishReason.ABORT)
    assert not steps.scheduler.pictures.is_waiting


def test_picture_for_an_ended_request_is_ignored() -> None:
    steps = Steps(max_tokens=1000)
    steps.add(make_request("a", [5, "cat"], left_out=["cat"]))
    steps.step()
    steps.scheduler.finish(RequestId("a"), FinishReason.ABORT)
    steps.send_asked()
    steps.run()
    assert steps.encoded == []


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
@given(
    prompts=st.lists(
        st.lists(st.one_of(st.sampled_from([1, 5, 64, 90]), st.sampled_from(list(PICTURES))), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    ),
    max_tokens=st.sampled_from([64, 65, 200]),
    num_slabs=st.sampled_from([12, 60]),
    seed=st.integers(0, 99),
)
def test_rows_always_hold_the_pictures_that_sequences_name(
    rule: ResumeRule, deterministic: bool, prompts: list[Pieces], max_tokens: int, num_slabs: int, seed: int
) -> None:
    """Requests come and are aborted at any time; memory for one or two is short, so others are preempted.

    Some come without pixels, which are sent later if they are asked for.
    """
    # Deterministic steps end on the grid: one may need the last tokens of a picture and the first ones of the next.
    steps = Steps(
        max_tokens=max_tokens,
        num_slabs=num_slabs,
        rule=AtTokens(64) if deterministic and not rule.needs_slots else rule,
        deterministic=deterministic,
        encoder_tokens=3 * MAX_PICTURE_TOKENS + 128 if deterministic else MAX_PICTURE_TOKENS,
    )
    choose = Random(seed)
    waiting = [
        make_request(str(index), pieces, left_out=choose.sample([*PICTURES], choose.choice([0, 2, 4])))
        for index, pieces in enumerate(prompts)
    ]
    for _ in range(60):
        event = choose.random()
        if event < 0.3 and waiting:
            steps.add(waiting.pop())
        elif event < 0.35 and len(steps.scheduler):
            steps.settle()
            name = choose.choice([*steps.requests])
            steps.scheduler.finish(RequestId(name), FinishReason.ABORT)
        elif event < 0.6:
            steps.send_asked()
        elif len(steps.scheduler):
            steps.step(overlaps=choose.random() < 0.5)
    steps.settle()
    steps.run()
