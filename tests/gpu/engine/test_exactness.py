"""The answer never changes on a GPU either: the CPU's tests, on Triton kernels, with CUDA graphs and overlapped steps.

Greedy tokens are compared exactly in float32: the tiny model's logits lie further apart than float32 rounds.
"""

from random import Random
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.device.steps.graphs import StepGraphs
from strandline.env import TRITON
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import (
    GREEDY,
    answers,
    test_forks_equal_requests_with_their_seeds_and_share_the_prompt,
    test_greedy_tokens_are_those_of_transformers,
    test_identical_prompt_hits_fully_and_runs_no_forward,
    test_preempted_requests_give_the_same_tokens_and_recompute_one,
    test_requests_that_share_a_running_prefix_stay_independent,
    test_resuming_at_every_position_gives_the_same_tokens,
    test_shared_prefix_hits_to_the_token_from_third_prompt,
    test_steps_of_any_size_give_the_same_tokens,
    test_turns_of_a_chat_hit_all_but_their_new_tokens,
    tokens,
)
from tests.cpu.engine.test_overlap import (
    serve,
    test_aborted_request_leaves_no_trace_in_the_step_in_flight,
    test_overlapped_steps_give_the_same_answers,
    test_overlapped_steps_with_preemptions_give_the_same_answers,
    test_stopped_answer_leaves_a_snapshot_before_its_stop_token,
)
from tests.cpu.engine.test_state_oracle import test_a_published_slot_holds_the_state_of_its_tokens

__all__ = [
    "test_a_published_slot_holds_the_state_of_its_tokens",
    "test_aborted_request_leaves_no_trace_in_the_step_in_flight",
    "test_forks_equal_requests_with_their_seeds_and_share_the_prompt",
    "test_greedy_tokens_are_those_of_transformers",
    "test_identical_prompt_hits_fully_and_runs_no_forward",
    "test_overlapped_steps_give_the_same_answers",
    "test_overlapped_steps_with_preemptions_give_the_same_answers",
    "test_preempted_requests_give_the_same_tokens_and_recompute_one",
    "test_requests_that_share_a_running_prefix_stay_independent",
    "test_resuming_at_every_position_gives_the_same_tokens",
    "test_shared_prefix_hits_to_the_token_from_third_prompt",
    "test_steps_of_any_size_give_the_same_tokens",
    "test_stopped_answer_leaves_a_snapshot_before_its_stop_token",
    "test_turns_of_a_chat_hit_all_but_their_new_tokens",
]

PROMPTS = [tokens(count, seed=count) for count in (1, 5, 63, 64, 65, 129, 300)]
LONG = SamplingParams(temperature=0, max_tokens=40)


def test_slowly_launched_step_returns_its_first_token(make_llm: MakeLLM) -> None:
    llm = make_llm(async_scheduling=True, enforce_eager=True)
    llm.engine.add_request("short", tokens(300, seed=1), LONG)
    [output] = llm.engine.step()
    assert len(output.outputs[0].token_ids) == 1


def test_captured_steps_overlap(make_llm: MakeLLM) -> None:
    llm = make_llm(async_scheduling=True)
    llm.engine.add_request("short", tokens(300, seed=1), LONG)
    # Each token comes when the next one is being computed.
    assert [len(llm.engine.step()) for _ in range(3)] == [0, 1, 1]


def test_greedy_tokens_are_those_of_the_cpu(make_llm: MakeLLM) -> None:
    expected = answers(make_llm(device="cpu"), PROMPTS, LONG)
    llm = make_llm()
    assert answers(llm, PROMPTS, LONG) == expected
    assert answers(llm, PROMPTS, LONG) == expected


def test_greedy_tokens_are_those_of_the_torch_kernels(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(make_llm(), PROMPTS, LONG)
    monkeypatch.setenv(TRITON, "0")
    assert answers(make_llm(), PROMPTS, LONG) == expected


def test_captured_steps_give_the_tokens_of_launched_ones(make_llm: MakeLLM) -> None:
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    assert answers(make_llm(), prompts, LONG) == answers(make_llm(enforce_eager=True), prompts, LONG)


@pytest.mark.parametrize("max_num_batched_tokens", [40, 200, 2048, 4200])
def test_prompts_of_all_lengths_are_replayed_beside_decodes(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    replayed = list[bool]()
    find = StepGraphs.find

    def count(graphs: StepGraphs, *step: Any, **options: Any) -> Any:
        result = find(graphs, *step, **options)
        replayed.append(result is not None)
        return result

    monkeypatch.setattr(StepGraphs, "find", count)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 20}

    def serve(llm: LLM) -> dict[str, list[int]]:
        rng, found = Random(max_num_batched_tokens), dict[str, list[int]]()
        for index in range(40):
            lengths = [1, 2, 20, 64, 65, 130, 400, *([900] if max_num_batched_tokens > 2048 else [])]
            prompt = tokens(rng.choice(lengths), seed=index % 7)
            wanted = rng.choice([None, None, None, 2])
            params = SamplingParams(
                temperature=0, max_tokens=rng.choice([1, 5, 30]), prompt_logprobs=wanted, ignore_eos=True
            )
            llm.engine.add_request(str(index), prompt, params)
            for _ in range(rng.choice([0, 0, 1, 4])):
                found |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.engine.step()}
        while llm.engine.has_unfinished:
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.engine.step()}
        return found

    expected = serve(make_llm(enforce_eager=True, **options))
    assert not replayed
    assert serve(make_llm(**options)) == expected
    assert sum(replayed) > len(replayed) / 2


@pytest.mark.parametrize("seed", [11, 12])
def test_requests_that_come_and_go_get_the_cpus_answers(make_llm: MakeLLM, seed: int) -> None:
    expected = serve(make_llm, seed, async_scheduling=False, device="cpu")
    assert serve(make_llm, seed, async_scheduling=True) == expected


def test_without_the_cache_the_tokens_are_the_same(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    assert answers(cold, PROMPTS, GREEDY) == answers(make_llm(), PROMPTS, GREEDY)
