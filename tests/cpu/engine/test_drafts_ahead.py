"""Verifying drafts in steps that are planned before the last one's are known changes no token, state or hit.

CUDA graphs are replaced (``eager_graphs.py``).
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline import LLM, SamplingParams
from strandline.cache import LogUse
from strandline.device.batches.prompt_room import NO_PROMPTS
from strandline.device.drafters import draft_layer
from strandline.device.drafters.draft_layer import DraftLayer, pairs_of_step
from strandline.device.runner import Runner
from strandline.device.sampling.choice import Chosen
from strandline.device.sizing import slabs_for
from strandline.device.steps.drafter import NextDrafts, StepRows
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.device.uni_executor import UniExecutor
from strandline.engine.drafting.step_drafts import StepDrafts
from strandline.engine.requests.spans import Span
from strandline.env import DEBUG_CACHE
from strandline.errors import EngineError
from strandline.ids import BLOCK_TOKENS
from strandline.records.plan import StepPlan, StepResult
from strandline.records.sampling_params import StructuredOutputsParams
from tests.cpu.engine.eager_graphs import EagerGraphs, complete_on_device, replay_eagerly, single_rows_on_the_host
from tests.cpu.engine.small_demo import small_demo
from tests.cpu.engine.test_draft_layer import Alternating

MAX_NUM_SEQS = 6
Answer = tuple[list[int], str | None, int]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setenv(DEBUG_CACHE, "1")
    monkeypatch.setattr(draft_layer, "single_rows", single_rows_on_the_host)

    def make(num_drafts: int = 2, **options: object) -> LLM:
        settings: dict[str, Any] = {
            "memory": "64MiB",
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": MAX_NUM_SEQS,
        }
        if num_drafts:
            settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False}
        llm = LLM(small_demo(), **{"async_scheduling": True, **settings, **options})
        if num_drafts:
            executor = llm.engine.core.executor
            assert isinstance(executor, UniExecutor)
            runner = executor.runner
            replay_eagerly(runner, num_drafts, llm.config.max_num_seqs, llm.engine.core.limits.max_model_len)
            complete_on_device(llm.engine.scheduler.drafts)
        return llm

    return make


class Steps:
    """Counts steps, and notes which were launched before the one before was settled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        self.are_ahead: list[bool] = []
        self.num_results = self.num_ahead = 0
        """Results; and steps that verify drafts of a step that was not settled."""
        launch, result = Runner.launch, StepInFlight.result

        def noted_launch(runner: Runner, plan: StepPlan) -> StepInFlight:
            self.num_ahead += any(x.num_drafts and x.pending for x in plan.sequences)
            assert self.num_results >= len(self.plans) - 1
            self.are_ahead.append(self.num_results < len(self.plans))
            self.plans.append(plan)
            return launch(runner, plan)

        def noted_result(step: StepInFlight) -> StepResult:
            self.num_results += 1
            return result(step)

        monkeypatch.setattr(Runner, "launch", noted_launch)
        monkeypatch.setattr(StepInFlight, "result", noted_result)


def some_requests(llm: LLM, seed: int, stop: Sequence[str] = ()) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, with answers of any length, ended by tokens that the prompts have."""
    rng = random.Random(seed)
    text = "What is seven times eight? And who wrote the letter that the teacher read in the old archive? " * 3
    tokens = list(llm.get_tokenizer().encode(text))
    requests = []
    for index in range(10):
        prompt = tokens[: rng.randint(1, len(tokens))] + rng.choices(tokens, k=rng.choice([0, 1, 7]))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7]),
            top_k=4,  # few: where many draws lie next to each other, rounding decides
            seed=index,
            max_tokens=4 if index == 8 else rng.randint(1, 80),
            stop_token_ids=rng.choices(tokens, k=rng.choice([0, 0, 2, 5])),
            ignore_eos=True,
            stop=list(stop) if index % 2 else None,
            presence_penalty=1.0 if index == 8 else 0.0,
        )
        requests.append((prompt, params))
    return requests


def serve(llm: LLM, seed: int, stop: Sequence[str] = ()) -> dict[str, Answer]:
    """Run requests that come in while others run; then their answers as prompts."""
    rng = random.Random(seed)
    answers: dict[str, Answer] = {}

    def step() -> None:
        for output in llm.engine.step():
            if output.finished:
                [one] = output.outputs
                answers[output.request_id] = (list(one.token_ids), one.finish_reason, output.num_cached_tokens)

    requests = some_requests(llm, seed, stop)
    for index, (prompt, params) in enumerate(requests):
        llm.engine.add_request(str(index), prompt, params)
        for _ in range(rng.randint(0, 3)):
            step()
    while llm.engine.has_unfinished:
        step()
    for index, (prompt, _) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        llm.engine.add_request(f"again {index}", [*prompt, *answers[str(index)][0], 5], params)
        while llm.engine.has_unfinished:
            step()
    assert not llm.engine.core.has_unfinished
    assert not llm.engine.cache.internals().leases
    return answers


@pytest.mark.parametrize(
    ("seed", "num_drafts"), [*(pytest.param(n, n, marks=pytest.mark.long) for n in (1, 2)), (3, 4)]
)
def test_steps_planned_ahead_give_the_same_answers_and_hits(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, seed: int, num_drafts: int
) -> None:
    expected = serve(make(0), seed)
    steps = Steps(monkeypatch)
    llm = make(num_drafts)
    found = serve(llm, seed)
    assert {name: answer[:2] for name, answer in found.items()} == {name: x[:2] for name, x in expected.items()}
    again = [name for name in expected if name.startswith("again")]
    assert [found[name][2] for name in again] == [expected[name][2] for name in again]
    assert steps.num_ahead > 10
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 50


def test_stop_strings_are_found_between_graphs(make: Callable[..., LLM]) -> None:
    stop = ["he ", "in", "s."]
    expected = serve(make(0), 6, stop)
    llm = make(3)
    found = serve(llm, 6, stop)
    assert {name: answer[:2] for name, answer in found.items()} == {name: x[:2] for name, x in expected.items()}
    # Without drafts, the step under way has computed the last token as well.
    differences = {expected[name][2] - found[name][2] for name in expected if name.startswith("again")}
    assert 1 in differences
    assert differences <= {0, 1}
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 50


def test_nearly_all_steps_of_a_steady_batch_are_planned_ahead(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    expected, fetch, are_stored = None, Chosen.fetch, dict[int, list[bool]]()

    def noted_fetch(chosen: Chosen) -> None:
        noted.append(chosen.host_tokens_R is not None)
        fetch(chosen)

    monkeypatch.setattr(Chosen, "fetch", noted_fetch)
    for num_drafts in (0, 2):
        noted = are_stored[num_drafts] = []
        llm = make(num_drafts)
        prompts = [prompt for prompt, _ in some_requests(llm, 3)[:MAX_NUM_SEQS]]
        steps = Steps(monkeypatch)
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert expected in (None, answers)
        expected = answers
    assert steps.num_ahead > 0.8 * len(steps.plans)
    # Graphs store what they find on the host.
    assert sum(are_stored[2]) > 0.8 * len(steps.plans)


@pytest.mark.parametrize("depths", [(2,) * 6 + (1,) * 4 + (0,) * 4], ids=str)
def test_depth_may_change_between_steps_that_are_planned_ahead(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...]
) -> None:
    expected = {name: answer[:2] for name, answer in serve(make(0), 4).items()}
    llm = make(2, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    llm.engine.scheduler.drafts.chooser = Alternating(depths)
    steps = Steps(monkeypatch)
    assert {name: answer[:2] for name, answer in serve(llm, 4).items()} == expected
    assert steps.num_ahead > 5


def test_steps_without_drafts_may_be_replayed_as_well(make: Callable[..., LLM]) -> None:
    expected = {name: answer[:2] for name, answer in serve(make(0), 4).items()}
    llm = make(2, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    llm.engine.scheduler.drafts.chooser = Alternating((2,) * 6 + (0,) * 4)
    executor = llm.engine.core.executor
    assert isinstance(executor, UniExecutor)
    max_model_len = llm.engine.core.limits.max_model_len
    graphs = replay_eagerly(executor.runner, 2, MAX_NUM_SEQS, max_model_len, replays_plain=True)
    assert {name: answer[:2] for name, answer in serve(llm, 4).items()} == expected
    assert min(graphs.num_replayed.values()) > 5


@pytest.mark.parametrize("num_drafts", [pytest.param(3, marks=pytest.mark.long), 4])
def test_answers_may_end_at_the_longest_length(make: Callable[..., LLM], num_drafts: int) -> None:
    max_model_len = 2 * BLOCK_TOKENS
    every_draft = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0] * num_drafts}
    config = {"method": "mtp", "num_speculative_tokens": num_drafts, "adaptive": False, **every_draft}
    llm = make(num_drafts, max_model_len=max_model_len, speculative_config=config)
    lengths = range(60, 60 + MAX_NUM_SEQS)
    params = SamplingParams(temperature=0, max_tokens=max_model_len, ignore_eos=True)
    outputs = llm.generate([[5] * length for length in lengths], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [max_model_len - length for length in lengths]
    speculation = llm.engine.core.stats().speculation
    assert speculation.num_accepted_tokens == speculation.num_draft_tokens > 200


def test_step_that_no_graph_can_complete_is_an_error(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(2)
    [(prompt, _), *_] = some_requests(llm, 3)
    llm.engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(6):
        llm.engine.step()
    monkeypatch.setattr(EagerGraphs, "find", lambda *args, **options: None)
    with pytest.raises(EngineError, match="no CUDA graph can complete it"):
        llm.engine.step()


@pytest.mark.parametrize("seed", [5])
def test_preempted_requests_give_the_same_answers(make: Callable[..., LLM], seed: int) -> None:
    expected = {name: answer[:2] for name, answer in serve(make(0), seed).items()}
    spec = make(2).engine.core.spec
    llm = make(2, memory=(slabs_for(spec, 192) + 1) * spec.slab_bytes, max_model_len=192)
    assert {name: answer[:2] for name, answer in serve(llm, seed).items()} == expected
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "num_steps", [2, 5, *(pytest.param(num_steps, marks=pytest.mark.long) for num_steps in (3, 4, 6, 7))]
)
def test_aborted_request_leaves_a_true_snapshot(make: Callable[..., LLM], num_steps: int) -> None:
    llm = make(2)
    [(prompt, _), *_] = some_requests(llm, 7)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    answer = output.outputs[0].token_ids
    for name in "ab":
        llm.engine.add_request(name, prompt, params, salt=name)
    for _ in range(num_steps):
        llm.engine.step()
    llm.engine.abort("a")
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            assert output.request_id == "b"
    rest = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for num_known in range(12):
        llm.engine.add_request("c", [*prompt, *answer[:num_known]], rest, salt="a")
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                if output.finished:
                    assert output.outputs[0].token_ids == answer[num_known : num_known + 4]


def has_prompts(plan: StepPlan) -> bool:
    return any(x.end - x.start > 1 + x.num_drafts for x in plan.sequences)


def test_steps_with_prompts_verify_and_make_drafts(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve(make(0), 1)
    llm, steps = make(2), Steps(monkeypatch)
    draft_in_graphs_alone(monkeypatch)
    assert serve(llm, 1) == expected
    mixed = [plan.sequences for plan in steps.plans if has_prompts(plan) and any(x.num_drafts for x in plan.sequences)]
    assert len(mixed) > 5
    # A prompt that ends makes drafts as well.
    assert any(x.next_drafts and x.end - x.start > 3 for sequences in mixed for x in sequences)


def test_prompts_join_steps_that_are_planned_ahead(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(llm: LLM) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        requests = some_requests(llm, 3)
        for index, (prompt, _) in enumerate([*requests, *requests]):
            params = SamplingParams(temperature=0, max_tokens=20 + index, ignore_eos=True)
            llm.engine.add_request(str(index), [index, *prompt], params)
            for _ in range(3):
                answers |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        while llm.engine.has_unfinished:
            answers |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return answers

    options = {"max_num_seqs": 20, "max_num_batched_tokens": 128}
    expected = run(make(0, **options))
    llm, steps = make(2, **options), Steps(monkeypatch)
    draft_in_graphs_alone(monkeypatch)
    assert run(llm) == expected
    mixed = [
        (plan, is_ahead)
        for plan, is_ahead in zip(steps.plans, steps.are_ahead, strict=True)
        if has_prompts(plan) and any(x.num_drafts for x in plan.sequences)
    ]
    assert len(mixed) > 10
    assert [is_ahead for _, is_ahead in mixed].count(False) < 3
    # What a prompt's end drafts is verified in a step that is planned before its first token is known.
    assert any(x.pending and x.num_drafts and not x.has_own_state for plan in steps.plans for x in plan.sequences)


@settings(max_examples=settings().max_examples // 50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=st.lists(st.integers(0, 2), min_size=8, max_size=8), seed=st.integers(0, 99), is_cut=st.booleans())
def test_prompts_in_any_steps_change_no_answer(
    make: Callable[..., LLM], arrivals: list[int], seed: int, is_cut: bool
) -> None:
    """Prompts come while others decode, cut into shares or whole, some with options that need the host."""
    options = {"max_num_batched_tokens": 64} if is_cut else {}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 4},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{1,60}"), "ignore_eos": False},
        {"temperature": 0.7, "top_k": 4, "presence_penalty": 1.0},
    ]

    def run(llm: LLM) -> dict[str, Any]:
        rng, answers = random.Random(seed), dict[str, Any]()
        tokens = list(
            llm.get_tokenizer().encode("What is seven times eight? Who wrote the letter in the archive? " * 3)
        )

        def step() -> None:
            for output in llm.engine.step():
                if output.finished:
                    logprobs = [list(each) for each in filter(None, output.prompt_logprobs or [])]
                    answers[output.request_id] = (output.outputs[0].token_ids, logprobs)

        for index, num_steps in enumerate(arrivals):
            kind = kinds[0] if rng.random() < 0.6 else rng.choice(kinds)
            prompt = tokens[: rng.randint(1, len(tokens))] + rng.choices(tokens, k=rng.choice([0, 1, 70]))
            params = SamplingParams(**{"max_tokens": rng.randint(1, 30), "seed": index, "ignore_eos": True, **kind})
            llm.engine.add_request(str(index), prompt, params)
            for _ in range(1 + num_steps):
                step()
        while llm.engine.has_unfinished:
            step()
        assert not llm.engine.cache.internals().leases
        return answers

    assert run(make(2, **options)) == run(make(0, **options))


def draft_in_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts that kernels launched one by one make fail a test."""
    follow = DraftLayer.follow

    def checked(layer: DraftLayer, rows: StepRows) -> None:
        assert follow(layer, rows) is None

    monkeypatch.setattr(DraftLayer, "follow", checked)


def test_no_step_waits_for_prompts_that_leave_no_room(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(llm: LLM) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        prompts = [prompt for prompt, _ in some_requests(llm, 3)]
        # The last ones hit a whole prompt, and all but a token.
        for index, prompt in enumerate([*prompts, prompts[0], [*prompts[1], 5]]):
            params = SamplingParams(temperature=index % 2, top_k=4, seed=index, max_tokens=20 + index, ignore_eos=True)
            llm.engine.add_request(str(index), prompt, params)
            for _ in range(4):
                for output in llm.engine.step():
                    answers[output.request_id] = (list(output.outputs[0].token_ids), None, output.num_cached_tokens)
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                answers[output.request_id] = (list(output.outputs[0].token_ids), None, output.num_cached_tokens)
        return answers

    options = {"max_num_seqs": 20, "max_num_batched_tokens": 128}
    expected = run(make(0, **options))
    llm, steps = make(2, **options), Steps(monkeypatch)
    drafts = llm.engine.scheduler.drafts
    drafts.limits = drafts.limits._replace(verified_prompts=NO_PROMPTS)
    draft_in_graphs_alone(monkeypatch)
    assert run(llm) == expected
    behind = [
        (plan, is_ahead)
        for before, plan, is_ahead in zip(steps.plans, steps.plans[1:], steps.are_ahead[1:], strict=False)
        if all(x.is_plain for x in before.sequences)
    ]
    assert len(behind) > 10
    assert all(is_ahead for _, is_ahead in behind)
    drafting = [plan for plan, _ in behind if all(x.next_drafts for x in plan.sequences)]
    assert len(drafting) > 6
    # The first such step of a request reads the snapshot that its prompt has left.
    assert any(x.pending and not x.has_own_state for plan in drafting for x in plan.sequences)
    assert not any(x.num_drafts for plan in drafting for x in plan.sequences)
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 50


def test_graphs_draft_behind_pairs_that_are_made_again(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, made = make(2, async_scheduling=False), list[int]()
    steps, follow = Steps(monkeypatch), DraftLayer.follow

    def noted_follow(layer: DraftLayer, rows: StepRows) -> NextDrafts | None:
        if all(sequence.next_drafts for sequence in steps.plans[-1].sequences):
            made.extend(each.plan.start for each in pairs_of_step(rows))
        return follow(layer, rows)

    monkeypatch.setattr(DraftLayer, "follow", noted_follow)
    prompt = [5] * 30
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    # The first step behind the prompt is planned when its token is known, and reads a shared snapshot.
    assert made == [len(prompt) - 1]


def test_steps_are_planned_ahead_where_answers_end_by_length(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(llm: LLM) -> list[list[int]]:
        prompts = [prompt for prompt, _ in some_requests(llm, 3)[:MAX_NUM_SEQS]]
        params = [SamplingParams(temperature=0, max_tokens=20 + 9 * n, ignore_eos=True) for n in range(MAX_NUM_SEQS)]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = run(make(0))
    for num_drafts in (1, 4):
        llm, steps = make(num_drafts), Steps(monkeypatch)
        assert run(llm) == expected
        waiting = [plan for plan, is_ahead in zip(steps.plans, steps.are_ahead, strict=True) if not is_ahead]
        # The first one, and where all that is left may have ended.
        assert all(len(plan.sequences) == 1 for plan in waiting[1:])
        assert any(x.pending and x.log and not x.num_drafts for plan in steps.plans for x in plan.sequences)


def test_steps_between_shares_of_a_long_prompt_are_planned_ahead(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(llm: LLM) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        llm.engine.add_request("a", [5] * 30, params)
        for _ in range(4):
            llm.engine.step()
        llm.engine.add_request("b", [6, 7] * 200, params)
        while llm.engine.has_unfinished:
            outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return outputs

    options = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64}
    expected = run(make(0, **options))
    llm, steps = make(2, **options), Steps(monkeypatch)
    assert run(llm) == expected
    shares = [index for index, plan in enumerate(steps.plans) if plan.num_tokens >= 64]
    assert len(shares) > 4
    between = steps.are_ahead[shares[0] + 1 : shares[-1]]
    # A share beside drafts is planned when they are known.
    assert between.count(False) == len(shares) - 2


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "stop_token_ids": [3, 7, 40]},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{1,60}")},
        {"stop": ["e ", "th"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_requests_that_need_the_host_join_and_leave(make: Callable[..., LLM], options: dict[str, Any]) -> None:
    def run(llm: LLM) -> dict[str, tuple[list[int], str | None]]:
        answers: dict[str, tuple[list[int], str | None]] = {}

        def step() -> None:
            for output in llm.engine.step():
                answers[output.request_id] = (output.outputs[0].token_ids, output.outputs[0].finish_reason)

        for index, (prompt, _) in enumerate(some_requests(llm, 9)):
            chosen = options if index % 3 == 2 else {"ignore_eos": True}
            params = SamplingParams(**{"max_tokens": 12 + 5 * index, "temperature": 0.0, **chosen})
            llm.engine.add_request(str(index), prompt, params)
            for _ in range(3):
                step()
        while llm.engine.has_unfinished:
            step()
        return answers

    llm = make(2)
    assert run(llm) == run(make(0))
    assert llm.engine.core.stats().speculation.num_accepted_tokens


def test_token_behind_drafts_may_need_none(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence has a last token to compute when all others may have ended with the drafts under way."""

    def run(llm: LLM) -> list[list[int]]:
        prompts, answers = [prompt for prompt, _ in some_requests(llm, 4)[:4]], list[list[int]]()
        for length in range(16, 19):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            answers += [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        return answers

    expected, llm, steps = run(make(0)), make(2), Steps(monkeypatch)
    assert run(llm) == expected
    assert any(
        all(x.is_plain for x in plan.sequences) and any(x.pending for x in plan.sequences)
        for before, plan in pairwise(steps.plans)
        if not all(x.is_plain for x in before.sequences)
    )


def every_other_draft(num_drafts: int) -> dict[str, Any]:
    """Accept drafts at places that the requests' seeds decide."""
    rates = [0.5] * num_drafts
    config = {"method": "mtp", "num_speculative_tokens": num_drafts, "rejection_sample_method": "synthetic"}
    return {"speculative_config": {**config, "adaptive": False, "synthetic_acceptance_rates": rates}}


def test_prompt_may_join_behind_token_that_followed_drafts(make: Callable[..., LLM]) -> None:
    """All but one sequence have ended with the drafts before that token."""
    llm = make(2, max_num_seqs=2, **every_other_draft(2))
    prompts = [[5 + index] * 6 for index in range(3)]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, seed=seed)
        for length, seed in ((10, 94), (10, 32), (11, 37))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [10, 10, 11]


class DeepThenNone:
    """Chooses the deepest drafts, and none from some step on."""

    def __init__(self, num_drafts: int, num_steps: int) -> None:
        self._depths = iter([num_drafts] * num_steps)

    def choose(self, num_running: int, *, is_timed: bool = True) -> int:
        return next(self._depths, 0)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        pass

    def observe(self, plan: StepPlan, seconds: float) -> None:
        pass


def generate_behind_drafts(llm: LLM) -> list[list[int]]:
    """Log decoded tokens, if they may be, where the last token comes behind unsettled drafts; return all tokens."""
    scheduler = llm.engine.scheduler
    scheduler._logged_from = 1
    prompts = [[5 + index] * 6 for index in range(2)]
    scheduler.drafts.chooser = DeepThenNone(2, 5)
    params = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=seed) for seed in (96, 42)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    scheduler.drafts.chooser = DeepThenNone(2, 0)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]


def test_token_behind_unsettled_drafts_is_not_logged(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that verify drafts advance its state: what a log of decoded tokens held would be folded once more."""
    config = every_other_draft(2)["speculative_config"] | {"adaptive": True}
    options = {"max_num_seqs": 2, "speculative_config": config}
    llm = make(2, **options)
    whole = generate_behind_drafts(llm)

    def next_logprobs(salt: str) -> list[float]:
        prompts = [{"prompt_token_ids": tokens, "cache_salt": salt} for tokens in whole]
        again = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=0), use_tqdm=False)
        assert all((output.num_cached_tokens == 15) == (not salt) for output in again)
        return [output.outputs[0].cumulative_logprob for output in again]

    assert next_logprobs("") == pytest.approx(next_logprobs("not cached"), abs=1e-4)
    close = StepDrafts.close

    def close_with_logs(step: StepDrafts, spans: Sequence[Span], *args: Any) -> None:
        close(step, spans, *args)
        for span in spans:
            span.log_use = LogUse.DECODED if span.log_use is LogUse.NONE else span.log_use

    monkeypatch.setattr(StepDrafts, "close", close_with_logs)
    with pytest.raises(EngineError, match="planned with a log of decoded tokens"):
        generate_behind_drafts(make(2, **options))
