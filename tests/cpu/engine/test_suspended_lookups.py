"""Where no n-grams are found, steps overlap as without speculation; where they come back, so do drafts, and soon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.runner import Runner
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.engine.drafting.drafts import MOST_STEPS_BETWEEN_LOOKUPS
from strandline.engine.requests.request import Request
from strandline.records.plan import StepPlan
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_draft_layer import Alternating
from tests.cpu.engine.test_exactness import tokens

DEPTH = 2
NGRAMS = {"method": "ngram", "num_speculative_tokens": DEPTH}
NUM_TOKENS = 90
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Lookups:
    """Finds the tokens of a known answer, behind outputs of some lengths; and counts lookups."""

    def __init__(self, answer: list[int], is_found_behind: Callable[[int], bool]) -> None:
        self._answer, self._is_found_behind = answer, is_found_behind
        self.num_lookups = 0

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        self.num_lookups += 1
        num_output = len(request.output_ids)
        return tuple(self._answer[num_output:][:max_tokens]) if self._is_found_behind(num_output) else ()


class Steps:
    """Counts steps that were launched while the one before was under way, and notes where drafts were verified."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_steps = self.num_ahead = self.num_results = 0
        self.drafted_behind: list[int] = []
        """For every sequence with drafts, its certain tokens."""
        launch, result = Runner.launch, StepInFlight.result

        def noted_launch(runner: Runner, plan: StepPlan) -> StepInFlight:
            self.num_ahead += self.num_results < self.num_steps
            self.num_steps += 1
            self.drafted_behind += [x.end - x.num_drafts for x in plan.sequences if x.num_drafts]
            return launch(runner, plan)

        def noted_result(step: StepInFlight) -> Any:
            self.num_results += 1
            return result(step)

        monkeypatch.setattr(Runner, "launch", noted_launch)
        monkeypatch.setattr(StepInFlight, "result", noted_result)


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, device="cpu", memory="64MiB", async_scheduling=True)


def generate(llm: LLM, prompt: list[int]) -> list[int]:
    [output] = llm.generate([prompt], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def make_looking(make: MakeLLM, lookups: Lookups, *, is_measured: bool = False) -> LLM:
    """Return an engine with these drafts; its depth is chosen by measured times, or is as deep as it may be."""
    llm = make(speculative_config=NGRAMS)
    drafts = llm.engine.scheduler.drafts
    drafts.drafter = lookups
    if not is_measured:
        drafts.chooser = Alternating((DEPTH,))
    return llm


@pytest.mark.parametrize("is_measured", [False, True])
def test_steps_overlap_as_without_speculation_when_nothing_is_found(
    make: MakeLLM, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    prompt, steps = tokens(20, seed=1), Steps(monkeypatch)
    plain = make()
    expected = generate(plain, prompt)
    plain_steps, plain_ahead = steps.num_steps, steps.num_ahead
    lookups = Lookups(expected, lambda num_output: False)
    assert generate(make_looking(make, lookups, is_measured=is_measured), prompt) == expected
    assert steps.num_steps - plain_steps <= plain_steps
    assert plain_ahead > 0.9 * NUM_TOKENS
    # One step looks up, and waits for the one before.
    assert steps.num_ahead - plain_ahead >= plain_ahead - 2
    assert lookups.num_lookups <= NUM_TOKENS / MOST_STEPS_BETWEEN_LOOKUPS + 5


@pytest.mark.parametrize("first", [3, 40, 41, 43, 50])
def test_drafts_come_back_within_a_few_tokens(make: MakeLLM, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    prompt = tokens(20, seed=2)
    expected = generate(make(), prompt)
    steps = Steps(monkeypatch)
    llm = make_looking(make, Lookups(expected, lambda num_output: num_output >= first))
    assert generate(llm, prompt) == expected
    found_at = steps.drafted_behind[0] - len(prompt)
    # Two tokens are on their way when one is looked up behind.
    assert first <= found_at <= first + MOST_STEPS_BETWEEN_LOOKUPS + 2
    # All that follow are drafted.
    num_rest = NUM_TOKENS - found_at
    assert llm.engine.core.stats().speculation.num_accepted_tokens >= num_rest * DEPTH // (1 + DEPTH) - 2


def test_single_misses_cost_no_draft(make: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(20, seed=2)
    expected = generate(make(), prompt)
    steps = Steps(monkeypatch)
    found = [num_output for num_output in range(1, NUM_TOKENS) if num_output % 4]
    llm = make_looking(make, Lookups(expected, found.__contains__))
    assert generate(llm, prompt) == expected
    drafted = {behind - len(prompt) for behind in steps.drafted_behind}
    assert drafted <= set(found)
    assert len(drafted) > NUM_TOKENS / 5


def test_new_request_is_looked_up_at_once(make: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(20, seed=2)
    expected = generate(make(), prompt)
    is_found = False
    llm = make_looking(make, Lookups(expected, lambda num_output: is_found))
    assert generate(llm, prompt) == expected
    assert llm.engine.scheduler.drafts.is_suspended
    is_found, steps = True, Steps(monkeypatch)
    assert generate(llm, prompt) == expected
    assert steps.drafted_behind[0] <= len(prompt) + 2


def test_lookups_of_a_fixed_depth_are_never_suspended(make: MakeLLM) -> None:
    prompt = tokens(20, seed=2)
    llm = make(speculative_config={**NGRAMS, "adaptive": False})
    lookups = llm.engine.scheduler.drafts.drafter = Lookups([], lambda num_output: False)
    generate(llm, prompt)
    assert not llm.engine.scheduler.drafts.is_suspended
    assert lookups.num_lookups >= NUM_TOKENS - 3
