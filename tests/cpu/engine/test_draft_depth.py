"""The number of drafts follows measured times and accepted drafts."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.engine.drafting.draft_depth import STEPS_BETWEEN_TRIALS, DraftDepth
from strandline.ids import NULL_LOG, NULL_SLOT, PendingToken, RequestId
from strandline.records.plan import SequencePlan, StepPlan


def plan_of_decodes(num_sequences: int, num_drafts: int, next_drafts: int = 0) -> StepPlan:
    sequence = SequencePlan(
        request_id=RequestId("any"),
        start=10,
        end=11 + num_drafts,
        token_ids=(0,) * (1 + num_drafts),
        block_table=b"",
        kv_start=0,
        state_src=NULL_SLOT,
        state_dst=NULL_SLOT,
        cuts=(),
        is_sampled=True,
        pending=PendingToken.NONE,
        is_prefill=False,
        log=NULL_LOG,
        num_logged=0,
        num_folded=1,
        num_drafts=num_drafts,
        next_drafts=next_drafts,
    )
    return StepPlan((sequence,) * num_sequences, (), (), ())


def run(depth: DraftDepth, seconds: list[float], acceptance: list[float], num_steps: int, batch: int = 4) -> list[int]:
    """Return the depths of steps that take these seconds by depth, and whose drafts are accepted at these rates."""
    rng, chosen = Random(1), []
    for _ in range(num_steps):
        number = depth.choose(batch)
        chosen.append(number)
        for _ in range(batch):
            accepted = 0
            while accepted < number and rng.random() < acceptance[accepted]:
                accepted += 1
            if number:
                depth.count(number, accepted)
        depth.observe(plan_of_decodes(batch, number), seconds[number] * rng.uniform(0.95, 1.05))
    return chosen


def share(chosen: list[int], depth: int) -> float:
    return chosen.count(depth) / len(chosen)


@pytest.mark.parametrize(
    ("seconds", "acceptance", "best"),
    [
        ([1.0, 1.1, 1.2, 1.3], [0.9, 0.9, 0.9], 3),
        ([1.0, 1.1, 1.9, 2.9], [0.9, 0.6, 0.3], 1),
        ([1.0, 1.6, 2.2, 2.8], [0.3, 0.1, 0.1], 0),
        ([1.0, 2.0, 3.0, 4.0], [0.8, 0.8, 0.8], 0),
    ],
)
def test_the_depth_with_most_tokens_per_second_is_chosen(
    seconds: list[float], acceptance: list[float], best: int
) -> None:
    depth = DraftDepth(3)
    run(depth, seconds, acceptance, 200)
    assert share(run(depth, seconds, acceptance, 10 * STEPS_BETWEEN_TRIALS), best) > 0.95


def test_depth_returns_when_drafts_become_right() -> None:
    depth, seconds = DraftDepth(2), [1.0, 1.1, 1.2]
    assert share(run(depth, seconds, [0.02, 0.02], 1000)[500:], 0) > 0.9
    assert share(run(depth, seconds, [0.95, 0.95], 6000)[5000:], 2) > 0.9


@pytest.mark.parametrize("batch", [1, 4])
def test_acceptance_is_known_before_a_depth_is_left(batch: int) -> None:
    # Two drafts give 4 % more tokens per second than one at the acceptance that is found, not at that assumed.
    depth = DraftDepth(2)
    run(depth, [1.6, 2.1, 2.74], [0.93, 0.83], 40, batch)
    assert share(run(depth, [1.6, 2.1, 2.74], [0.93, 0.83], 200, batch), 2) > 0.9


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_few_slow_steps_do_not_change_the_depth(num_slow: int) -> None:
    depth, seconds, acceptance = DraftDepth(2), [1.0, 1.5, 1.7], [0.3, 0.3]
    run(depth, seconds, acceptance, 300)
    for _ in range(num_slow):
        depth.observe(plan_of_decodes(4, 0), 9.0)
    assert share(run(depth, seconds, acceptance, 200), 0) > 0.95


def test_depths_that_are_as_good_do_not_alternate() -> None:
    depth = DraftDepth(1)
    run(depth, [1.0, 1.3], [0.3], 300)
    chosen = run(depth, [1.0, 1.3], [0.3], 2000)
    assert sum(chosen[index] != chosen[index - 1] for index in range(1, len(chosen))) < 2 * 2000 / STEPS_BETWEEN_TRIALS
    assert max(share(chosen, 0), share(chosen, 1)) > 0.95


class Queue(NamedTuple):
    """Requests that come as others end, and what steps take: by depth, alone and for each token of prompts."""

    seconds: list[float]
    surcharges: list[float]
    acceptance: list[float]
    prompt_tokens: int
    output_tokens: int

    def serve(self, choose: Callable[[int], int], depth: DraftDepth | None = None, num_requests: int = 200) -> float:
        """Return how long four requests at a time take, on a simulated clock."""
        rng, clock_s = Random(1), 0.0
        left = [rng.randint(1, self.output_tokens) for _ in range(4)]
        while num_requests > 0:
            running = [index for index, count in enumerate(left) if count > 0]
            num_rows = self.prompt_tokens * (len(left) - len(running))
            number = choose(len(left)) if running else 0
            for index in range(len(left)):
                if index not in running:
                    num_requests -= 1
                    left[index] = self.output_tokens
                    continue
                accepted = 0
                while accepted < number and rng.random() < self.acceptance[accepted]:
                    accepted += 1
                if number and depth is not None:
                    depth.count(number, accepted)
                left[index] -= 1 + accepted
            step_s = self.seconds[number] + self.surcharges[number] * num_rows
            clock_s += step_s
            if running and depth is not None:
                plan = plan_of_decodes(len(running), number)
                prompts = [plan.sequences[0]._replace(start=0, end=num_rows, num_drafts=0)] * (num_rows > 0)
                depth.observe(replace(plan, sequences=(*plan.sequences, *prompts)), step_s * rng.uniform(0.98, 1.02))
        return clock_s

    def adapt(self) -> float:
        """Return how long it takes at depths that are chosen."""
        depth = DraftDepth(len(self.acceptance))
        self.serve(depth.choose, depth)
        return self.serve(depth.choose, depth)

    def fixed(self, number: int) -> float:
        """Return how long it takes at one depth."""
        return self.serve(lambda _: number)


@settings(max_examples=settings().max_examples // 5)
@given(st.data())
def test_queue_is_hardly_slower_than_at_the_best_depth(data: st.DataObject) -> None:
    factor, share = st.floats(1.0, 1.8), st.floats(0.1, 0.95)
    first, second = data.draw(factor), data.draw(factor)
    prompt_tokens = data.draw(st.sampled_from([8, 64, 512]))
    # A prompt takes as long as up to ten steps.
    surcharge = data.draw(st.floats(0.1, 10.0)) / prompt_tokens
    queue = Queue(
        seconds=[1.0, first, first * second],
        surcharges=[surcharge * data.draw(factor) for _ in range(3)],
        acceptance=[data.draw(share), data.draw(share)],
        prompt_tokens=prompt_tokens,
        output_tokens=data.draw(st.integers(2, 60)),
    )
    assert queue.adapt() < 1.06 * min(map(queue.fixed, range(3)))


def test_drafts_are_left_out_where_they_slow_prompts_down() -> None:
    queue = Queue([1.0, 1.2, 1.4], [0.01, 0.05, 0.05], [0.9, 0.8], prompt_tokens=128, output_tokens=8)
    assert queue.fixed(0) < 0.8 * queue.fixed(2)
    assert queue.adapt() < 1.03 * queue.fixed(0)
    quick = queue._replace(surcharges=[0.01, 0.01, 0.01])
    assert quick.adapt() < 1.03 * quick.fixed(2) < quick.fixed(0)


def test_depth_follows_steps_that_all_hold_prompts() -> None:
    for seconds, best in (([1.0, 1.1, 1.2], 2), ([1.0, 3.0, 5.0], 0)):
        depth, chosen = DraftDepth(2), []
        for _ in range(400):
            chosen.append(depth.choose(4))
            plan = plan_of_decodes(4, chosen[-1])
            prompt = plan.sequences[0]._replace(start=0, end=100, num_drafts=0)
            depth.observe(replace(plan, sequences=(*plan.sequences, prompt)), 1.0 + seconds[chosen[-1]])
        # With the acceptance that is assumed at first.
        assert share(chosen[100:], best) > 0.95


def test_steps_of_prompts_alone_measure_no_depth() -> None:
    depth = DraftDepth(2)
    assert {depth.choose(4, is_timed=False) for _ in range(100)} == {0}
    assert [depth.choose(4) for _ in range(17)][-1] == 1


def test_depth_0_is_tried_again_after_slow_times() -> None:
    depth, acceptance = DraftDepth(3), [0.3, 0.3, 0.3]
    run(depth, [9.0, 3.0, 2.0, 1.8], acceptance, 300)
    assert run(depth, [9.0, 3.0, 2.0, 1.8], acceptance, 1)[0] >= 2
    assert share(run(depth, [1.0, 1.5, 1.7, 1.8], acceptance, 6000)[-500:], 0) > 0.95


def test_batches_of_other_sizes_have_depths_of_their_own() -> None:
    depth = DraftDepth(1)
    assert share(run(depth, [1.0, 1.1], [0.8], 300, batch=1)[100:], 1) > 0.95
    assert share(run(depth, [1.0, 2.0], [0.8], 300, batch=64)[100:], 0) > 0.95
    assert share(run(depth, [1.0, 1.1], [0.8], 300, batch=1), 1) > 0.95


@pytest.mark.parametrize("seconds", [[1.0, 1.3], [1.0, 2.0], [1.0, 5.0]])
def test_trials_of_drafts_that_are_wrong_cost_little(seconds: list[float]) -> None:
    depth = DraftDepth(1)
    run(depth, seconds, [0.1], 1000)
    chosen = run(depth, seconds, [0.1], 20_000)
    # Each trial takes one more step's time, to wait for the step before it.
    num_trials = sum(chosen[index] > chosen[index - 1] for index in range(1, len(chosen)))
    spent_s = sum(seconds[number] for number in chosen) + num_trials
    num_tokens = sum(1 + 0.1 * number for number in chosen)
    assert num_trials > 5
    assert 1.0 < spent_s / num_tokens < 1.008


def test_steps_that_change_the_depth_are_not_timed() -> None:
    depth = DraftDepth(2, has_draft_layer=True)
    for _ in range(20):
        depth.count(2, 2)
    for number in range(3):
        for _ in range(5):
            depth.observe(plan_of_decodes(4, number, number), 1.0)
    for num_drafts, next_drafts in ((0, 2), (2, 0), (1, 2)):
        for _ in range(100):
            depth.observe(plan_of_decodes(4, num_drafts, next_drafts), 100.0)
    # All depths take as long: the largest gives most tokens.
    assert depth.choose(4) == 2
    for _ in range(100):
        depth.observe(plan_of_decodes(4, 2, 2), 100.0)
    assert depth.choose(4) == 1


def test_a_depth_that_never_comes_about_is_no_obstacle() -> None:
    depth = DraftDepth(3)
    for _ in range(200):
        depth.choose(8)
        depth.observe(plan_of_decodes(8, 0), 1.0)
    assert depth.choose(8) == 3
