"""How many waiting prompts begin in one step."""

from random import Random
from statistics import mean

import pytest

from strandline.cache.policy import new_cache
from strandline.cache.size import CacheSize
from strandline.cache.tiers import Loads
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.prompt_groups import PromptGroups
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepResult
from strandline.records.sampling_params import SamplingParams


def make_scheduler(fixed_step_tokens: int, *, max_num_seqs: int = 64) -> Scheduler:
    cache = new_cache(CacheSize(256, 4))
    return Scheduler(
        cache,
        Loads(cache),
        StepLimits(max_num_seqs, max_num_batched_tokens=2048, fixed_step_tokens=fixed_step_tokens),
    )


def prompts_of_steps(scheduler: Scheduler, lengths: list[int]) -> list[int]:
    """Serve prompts that come together, and return how many begin in each step."""
    rng, numbers = Random(len(lengths)), []
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for index, length in enumerate(lengths):
        prompt = tuple(rng.choices(range(10, 9000), k=length))
        new = NewRequest(RequestId(str(index)), prompt, params, 0, frozenset(), ())
        scheduler.add(Request(Submission(new, length + 1)))
    while (plan := scheduler.plan()) is not None:
        numbers.append(len(plan.sequences))
        scheduler.commit(plan, StepResult(tuple((1,) if x.is_sampled else () for x in plan.sequences)))
    return numbers


def test_prompts_that_come_together_begin_in_groups() -> None:
    scheduler = make_scheduler(64)
    assert prompts_of_steps(scheduler, [100]) == [1]
    # sqrt(64 * 1,600) = 320 tokens, 288 of the remaining 1,300, 253 of 1,000.
    assert prompts_of_steps(scheduler, [100] * 16)[:3] == [3, 3, 3]


def test_long_queues_fill_the_steps() -> None:
    scheduler = make_scheduler(64)
    prompts_of_steps(scheduler, [100])
    numbers = prompts_of_steps(scheduler, [100] * 800)
    assert min(numbers[:10]) >= 20, "2,048 tokens of prompts, the last one in part"


def test_without_a_fixed_cost_steps_are_filled() -> None:
    scheduler = make_scheduler(0)
    prompts_of_steps(scheduler, [100])
    assert prompts_of_steps(scheduler, [100] * 16) == [16]


def test_one_prompt_begins_whatever_its_length() -> None:
    scheduler = make_scheduler(1)
    prompts_of_steps(scheduler, [100])
    assert prompts_of_steps(scheduler, [1500, 1500, 10])[:2] == [1, 1]


@pytest.mark.parametrize(("fixed_tokens", "num_prompts", "length"), [(64, 16, 100), (2048, 16, 500), (2048, 4, 2000)])
def test_groups_have_the_least_mean_time(fixed_tokens: int, num_prompts: int, length: int) -> None:
    """Compare with every other number of prompts in a group, by the same model of a step's time."""

    def mean_time(group: int) -> float:
        ends = [(index // group + 1) * (fixed_tokens + group * length) for index in range(num_prompts)]
        return mean(ends)

    groups = PromptGroups(fixed_tokens)
    groups.add(length)
    groups.begin_step(num_prompts)
    group = 0
    while not groups.is_full:
        groups.add(length)
        group += 1
    assert mean_time(min(group, num_prompts)) <= 1.1 * min(map(mean_time, range(1, num_prompts + 1)))
