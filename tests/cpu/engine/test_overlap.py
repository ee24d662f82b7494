"""Planning a step while the one before it runs changes no answer, and leaves the cache as it should be."""

import random
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.runner import Runner
from strandline.device.steps.step_in_flight import StepInFlight
from strandline.records.plan import StepPlan
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_draft_layer import Alternating
from tests.cpu.engine.tiny import VOCAB_SIZE

LOOKUPS: list[dict[str, Any]] = [{"method": "ngram", "prompt_lookup_min": 1}, {"method": "suffix"}]

Answer = tuple[list[int], str | None, int]


def some_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings; greedy, sampled, penalised, stopped by tokens, bound to the host."""
    rng = random.Random(seed)
    requests = []
    heads = [rng.choices(range(VOCAB_SIZE), k=90) for _ in range(3)]
    for index in range(24):
        prompt = rng.choice(heads)[: rng.randint(1, 90)] + rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 5, 64]))
        stops = rng.sample(range(VOCAB_SIZE), k=rng.choice([0, 3, 8, 12]))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=index,
            max_tokens=rng.randint(1, 40),
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=stops,
            ignore_eos=True,
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            logprobs=rng.choice([None, None, 2]),
        )
        requests.append((prompt, params))
    return requests


def serve(make_llm: MakeLLM, seed: int, *, async_scheduling: bool, **options: object) -> dict[str, Answer]:
    """Run requests that come in while others run."""
    llm = make_llm(async_scheduling=async_scheduling, **options)
    rng = random.Random(seed)
    answers: dict[str, Answer] = {}

    def step() -> None:
        for output in llm.engine.step():
            if output.finished:
                [one] = output.outputs
                answers[output.request_id] = (list(one.token_ids), one.finish_reason, len(one.logprobs or ()))

    for index, (prompt, params) in enumerate(some_requests(seed)):
        llm.engine.add_request(str(index), prompt, params)
        for _ in range(rng.randint(0, 4)):
            step()
    while llm.engine.has_unfinished:
        step()
    if llm.engine.core.has_unfinished:
        step()
    assert not llm.engine.core.has_unfinished
    assert not llm.engine.cache.internals().leases
    return answers


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4))])
def test_overlapped_steps_give_the_same_answers(make_llm: MakeLLM, seed: int) -> None:
    expected = serve(make_llm, seed, async_scheduling=False)
    assert len(expected) == 24
    assert {reason for _, reason, _ in expected.values()} == {"stop", "length"}
    assert serve(make_llm, seed, async_scheduling=True) == expected


@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.long)])
def test_launch_bound_steps_give_the_same_answers(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    expected = serve(make_llm, seed, async_scheduling=False)
    launch, rng = Runner.launch, random.Random(seed)

    def launch_some_slowly(runner: Runner, plan: StepPlan) -> StepInFlight:
        launched = launch(runner, plan)
        launched.is_launch_bound = rng.random() < 0.5
        return launched

    monkeypatch.setattr(Runner, "launch", launch_some_slowly)
    assert serve(make_llm, seed, async_scheduling=True) == expected


@pytest.mark.parametrize("seed", [5, 6, pytest.param(7, marks=pytest.mark.long)])
def test_overlapped_steps_with_preemptions_give_the_same_answers(make_llm: MakeLLM, seed: int) -> None:
    slab = make_llm().engine.core.spec.slab_bytes
    little = {"memory": 14 * slab, "max_model_len": 256, "max_num_batched_tokens": 100}
    expected = serve(make_llm, seed, async_scheduling=False)
    assert serve(make_llm, seed, async_scheduling=True, **little) == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_stopped_answers_return_slots_of_the_step_in_flight(make_llm: MakeLLM, seed: int) -> None:
    everywhere = {"mamba_cache_mode": "all", "mamba_block_size": 64}
    expected = serve(make_llm, seed, async_scheduling=False)
    assert serve(make_llm, seed, async_scheduling=True, **everywhere) == expected


def test_stopped_answer_leaves_a_snapshot_before_its_stop_token(make_llm: MakeLLM) -> None:
    prompt = [3] * 70
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [free] = make_llm().generate([prompt], plain, use_tqdm=False)
    stop = free.outputs[0].token_ids[4]
    first = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    llm = make_llm(async_scheduling=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) == first + 1
    longer = prompt + list(free.outputs[0].token_ids[:first]) + [5, 6]
    [again] = llm.generate([longer], plain, use_tqdm=False)
    assert again.num_cached_tokens == len(prompt) + first
    [cold] = make_llm(enable_prefix_caching=False).generate([longer], plain, use_tqdm=False)
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("lookup", LOOKUPS, ids=["ngram", "suffix"])
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 3))])
def test_steps_with_drafts_and_late_events_give_the_same_answers(
    make_llm: MakeLLM, seed: int, lookup: dict[str, Any]
) -> None:
    drafts = {**lookup, "num_speculative_tokens": 2, "adaptive": False}
    expected = serve(make_llm, seed, async_scheduling=False)
    assert serve(make_llm, seed, async_scheduling=True, speculative_config=drafts) == expected


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize(
    ("seed", "lookup"),
    [
        (1, LOOKUPS[0]),
        (4, LOOKUPS[1]),
        *(pytest.param(seed, LOOKUPS[seed > 3], marks=pytest.mark.long) for seed in (2, 3, 5)),
    ],
    ids=str,
)
def test_steps_of_changing_depth_give_the_same_answers(
    make_llm: MakeLLM, seed: int, lookup: dict[str, Any], is_tight: bool
) -> None:
    slab = make_llm().engine.core.spec.slab_bytes
    little = {"memory": 14 * slab, "max_model_len": 256, "max_num_batched_tokens": 100} if is_tight else {}
    drafts = {**lookup, "num_speculative_tokens": 2}
    expected = serve(make_llm, seed, async_scheduling=False)

    def make_changing(**options: object) -> LLM:
        llm = make_llm(speculative_config=drafts, **options)
        llm.engine.scheduler.drafts.chooser = Alternating((0, 0, 0, 2, 2))
        return llm

    for async_scheduling in (False, True):
        assert serve(make_changing, seed, async_scheduling=async_scheduling, **little) == expected


def test_tokens_do_not_wait_for_a_share_to_be_launched(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(async_scheduling=True, max_num_batched_tokens=256, long_prefill_token_threshold=64)
    sizes = list[int]()
    launch = Runner.launch

    def note(runner: Runner, plan: StepPlan) -> StepInFlight:
        sizes.append(plan.num_tokens)
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", note)
    llm.engine.add_request("decode", [1] * 10, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    llm.engine.add_request("long", [2] * 250, SamplingParams(temperature=0, max_tokens=1))
    num_shares, num_early = 0, 0
    while llm.engine.has_unfinished:
        num_launched = len(sizes)
        outputs = llm.engine.step()
        launched = sizes[num_launched:]
        num_early += bool(outputs) and not launched and llm.engine.has_unfinished
        num_shares += any(size > 64 for size in launched)
    # The first share is that of a request that waits to be admitted.
    assert num_shares > 2
    assert num_early >= num_shares - 1


def test_aborted_request_leaves_no_trace_in_the_step_in_flight(make_llm: MakeLLM) -> None:
    llm = make_llm(async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    llm.engine.add_request("a", [1] * 30, params)
    llm.engine.add_request("b", [2] * 30, params)
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort("a")
    finished = []
    while llm.engine.has_unfinished:
        finished += [output for output in llm.engine.step() if output.finished]
    assert [output.request_id for output in finished] == ["b"]
    [cold] = make_llm(enable_prefix_caching=False).generate([[2] * 30], params, use_tqdm=False)
    assert finished[0].outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("options", [{}, {"speculative_config": {"num_speculative_tokens": 2, **LOOKUPS[0]}}])
def test_an_id_of_an_aborted_request_can_be_reused(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    """The step in flight, or a settled one, has logprobs of the longer prompt."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    engine = make_llm(async_scheduling=True, **options).engine
    engine.add_request("same", list(range(3, 90)), params)
    engine.step()
    engine.abort("same")
    engine.add_request("same", [5, 6, 7], params)
    while engine.has_unfinished:
        outputs = engine.step()
    [output] = outputs
    assert output.outputs[0].finish_reason == "length"
    entries = output.prompt_logprobs or []
    assert [token in (entry or {}) for token, entry in zip([5, 6, 7], entries, strict=True)] == [False, True, True]
