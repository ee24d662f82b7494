"""Drafts change no token on a GPU either: the CPU's tests, with short kernels and CUDA graphs.

Greedy tokens are compared exactly in float32: the tiny model's logits lie further apart than float32 rounds.
"""

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite
from strandline.device.runner import Runner
from strandline.device.steps.graphs import CapturedStep
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.engine.drafting.draft_depth import DraftDepth
from strandline.records.plan import StepPlan, StepResult
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_drafts_ahead import draft_in_graphs_alone
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_speculation import GREEDY, PATTERNS, SPECULATION, force, record

PROMPTS = [tokens(count, seed=count) for count in (1, 2, 40, 62, 63, 64, 65, 100)]
MIXED = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=1.0, seed=3, max_tokens=33, top_k=20),
    SamplingParams(temperature=0.7, seed=4, max_tokens=31, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, seed=5, max_tokens=30, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=30, logprobs=2, stop_token_ids=[3, 7]),
]


@pytest.fixture
def make_speculating(make_llm: MakeLLM) -> MakeLLM:
    def speculating(**options: Any) -> LLM:
        return make_llm(**{"speculative_config": SPECULATION, **options})

    return speculating


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect whether replayed graphs are of steps with drafts."""
    return note_replays(monkeypatch)


def note_replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that takes whether each replayed graph is of a step with drafts."""
    replayed: list[bool] = []
    replay = CapturedStep.replay

    def counting(step: CapturedStep, *arguments: Any) -> Tensor:
        replayed.append(step.padded.size.has_drafts)
        return replay(step, *arguments)

    monkeypatch.setattr(CapturedStep, "replay", counting)
    return replayed


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_pattern_of_acceptance_gives_the_tokens_of_plain_decoding(
    make_llm: MakeLLM, make_speculating: MakeLLM, replays: list[bool], pattern: list[int], is_eager: bool
) -> None:
    expected = answers(make_llm(), PROMPTS, GREEDY)
    recording = make_speculating(enforce_eager=is_eager)
    recorder = record(recording)
    assert answers(recording, PROMPTS, GREEDY) == expected
    llm = force(make_speculating(enforce_eager=is_eager), recorder.known, pattern)
    replays.clear()
    assert answers(llm, PROMPTS, GREEDY) == expected
    assert answers(llm, PROMPTS, GREEDY) == expected  # resumed from snapshots
    assert (sum(replays) > 10) is not is_eager


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_sampled_tokens_are_those_of_plain_decoding(
    make_llm: MakeLLM, make_speculating: MakeLLM, params: SamplingParams
) -> None:
    expected = answers(make_llm(), PROMPTS, params)
    recording = make_speculating()
    recorder = record(recording)
    assert answers(recording, PROMPTS, params) == expected
    assert answers(force(make_speculating(), recorder.known, [3, 1, 2, 0]), PROMPTS, params) == expected


def test_requests_of_all_kinds_together(make_llm: MakeLLM, make_speculating: MakeLLM) -> None:
    def run(llm: LLM) -> list[Any]:
        params = [MIXED[index % len(MIXED)] for index in range(len(PROMPTS))]
        return [[x.token_ids for x in o.outputs] for o in llm.generate(PROMPTS, params, use_tqdm=False)]

    recording = make_speculating()
    recorder = record(recording)
    expected = run(make_llm())
    assert run(recording) == expected
    assert run(force(make_speculating(), recorder.known, [1, 3, 0, 2])) == expected


@pytest.fixture(scope="module")
def demo_answers() -> list[Any]:
    return demo(None)


def rendered(llm: LLM) -> list[list[int]]:
    """Return the tokens of some prompts."""
    chats: list[Any] = [llm.render(task.messages) for task in make_suite(1, 6)]
    return [chat["prompt_token_ids"] for chat in chats]


def demo(speculation: dict[str, Any] | None, *, least_accepted: int = 100) -> list[Any]:
    llm = LLM("demo", dtype="float32", device="cuda", memory="2GiB", max_num_seqs=16, speculative_config=speculation)
    prompts = rendered(llm)
    texts = []
    for _ in range(2):  # again from snapshots: whole hits
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([(o.num_cached_tokens, o.outputs[0].token_ids) for o in outputs])
    counts = llm.engine.core.stats().speculation
    if speculation is not None:
        assert counts.num_accepted_tokens >= least_accepted
    return texts


@pytest.mark.parametrize("depths", [(0, 0, 0, 2, 2), (0,) * 9 + (1,), (0,)], ids=str)
def test_steps_of_changing_depth_change_no_token(
    demo_answers: list[Any], monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...]
) -> None:
    replays = note_replays(monkeypatch)
    turns = cycle(depths)
    monkeypatch.setattr(DraftDepth, "choose", lambda *_, **__: next(turns))
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    assert demo(speculation, least_accepted=20 if any(depths) else 0) == demo_answers
    assert replays.count(False) > 20


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_demo_models_draft_layer_changes_no_token(
    demo_answers: list[Any], replays: list[bool], depth: int, adaptive: bool
) -> None:
    speculation = {"method": "mtp", "num_speculative_tokens": depth, "adaptive": adaptive}
    # Where drafts do not pay they are only tried.
    assert demo(speculation, least_accepted=20 if adaptive else 100) == demo_answers
    assert sum(replays) > 10


class Launches:
    """Notes each plan, and whether it was launched before the one before was settled; no launch may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        self.are_ahead: list[bool] = []
        self._num_results = 0
        launch, result = Runner.launch, StepInFlight.result

        def noted_launch(runner: Runner, plan: StepPlan) -> StepInFlight:
            self.are_ahead.append(self._num_results < len(self.plans))
            self.plans.append(plan)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(runner, plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        def noted_result(step: StepInFlight) -> StepResult:
            self._num_results += 1
            return result(step)

        monkeypatch.setattr(Runner, "launch", noted_launch)
        monkeypatch.setattr(StepInFlight, "result", noted_result)
        draft_in_graphs_alone(monkeypatch)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_steps_with_prompts_verify_drafts_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(speculation: dict[str, Any] | None) -> tuple[dict[str, Any], LLM, Launches | None]:
        llm = LLM(
            "demo", dtype="float32", device="cuda", memory="2GiB", max_num_seqs=24, speculative_config=speculation
        )
        launches = None if speculation is None else Launches(monkeypatch)
        answers: dict[str, Any] = {}

        def step() -> None:
            for output in llm.engine.step():
                # What is hit depends on which requests have ended, and those with drafts end earlier.
                answers[output.request_id] = output.outputs[0].token_ids

        prompts = rendered(llm)
        # Whole hits, and prompts that hit all but a token.
        others = [[index, *prompt] for index, prompt in enumerate(prompts * 2)]
        for index, prompt in enumerate([*others, *prompts, *prompts[:3], *([*prompt, 5] for prompt in prompts[:3])]):
            params = SamplingParams(temperature=index % 2, seed=index, max_tokens=40 + 3 * index, ignore_eos=True)
            llm.engine.add_request(str(index), prompt, params)
            for _ in range(3):
                step()
        while llm.engine.has_unfinished:
            step()
        return answers, llm, launches

    expected, _, _ = serve(None)
    found, llm, launches = serve({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    assert found == expected
    assert launches is not None
    mixed = [
        is_ahead
        for plan, is_ahead in zip(launches.plans, launches.are_ahead, strict=True)
        if any(x.num_drafts for x in plan.sequences) and any(x.end - x.start > 1 + x.num_drafts for x in plan.sequences)
    ]
    assert len(mixed) > 10
    assert sum(mixed) > 0.8 * len(mixed)
    assert sum(launches.are_ahead) > 0.8 * len(launches.plans)
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 100
