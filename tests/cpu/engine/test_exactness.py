"""The answer never changes: cache off, on, resumed anywhere, forked, preempted, in any chunks (contract 6)."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.env import NUMBA
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.tiny import VOCAB_SIZE, greedy_tokens, save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def answers(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_greedy_tokens_are_those_of_transformers(make_llm: MakeLLM, model_dir: Path) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 2, 63, 64, 65, 130)]
    expected = answers(make_llm(), prompts)
    assert [len(answer) for answer in expected] == [8] * len(prompts)
    assert expected == greedy_tokens(model_dir, prompts, expected)
    assert answers(make_llm(enable_prefix_caching=False), prompts) == expected


@pytest.mark.parametrize("step_tokens", [1, 7, 63, 64, 65, 100])
def test_steps_of_any_size_give_the_same_tokens(make_llm: MakeLLM, step_tokens: int) -> None:
    prompts = [tokens(count, seed=count) for count in (5, 64, 129, 200)]
    whole = answers(make_llm(enable_prefix_caching=False), prompts)
    assert answers(make_llm(max_num_batched_tokens=step_tokens), prompts) == whole


def test_resuming_at_every_position_gives_the_same_tokens(make_llm: MakeLLM) -> None:
    prompt = tokens(150)
    [expected] = answers(make_llm(enable_prefix_caching=False), [prompt])
    check_resumption(make_llm(memory="64MiB"), prompt, expected)


def check_resumption(llm: LLM, prompt: list[int], expected: list[int], positions: Sequence[int] | None = None) -> None:
    """Compute prefixes of a prompt, then resume each: the hit is the whole prefix, and the answer the same.

    Args:
        positions: where prefixes end; None: at every token.
    """
    # Each position has a salt of its own, so that nothing else can be resumed.
    positions = positions or range(1, len(prompt))
    prefixes: Any = [{"prompt_token_ids": prompt[:position], "cache_salt": str(position)} for position in positions]
    whole: Any = [{"prompt_token_ids": prompt, "cache_salt": str(position)} for position in positions]
    llm.generate(prefixes, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    outputs = llm.generate(whole, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == list(positions)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * len(positions)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_rounded_states_give_the_same_tokens_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dtype: str, is_compiled: bool
) -> None:
    monkeypatch.setenv(NUMBA, str(int(is_compiled)))
    make = llm_maker(save_tiny_model(tmp_path, mamba_ssm_dtype=state_dtype), monkeypatch, device="cpu")
    prompts = [tokens(count, seed=count) for count in (1, 5, 63, 64, 130, 200)]
    longer = [prompt + tokens(20, seed=index) for index, prompt in enumerate(prompts)]
    cold = make(enable_prefix_caching=False)
    expected = [answers(cold, prompts), answers(cold, longer)]
    llm = make(memory="64MiB")
    assert llm.engine.core.spec.layers[0].states[0].dtype == state_dtype
    assert [answers(llm, prompts), answers(llm, longer)] == expected
    assert llm.engine.core.stats().hit_tokens == sum(map(len, prompts))


def test_identical_prompt_hits_fully_and_runs_no_forward(make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(), tokens(100)
    [first] = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.engine.add_request("again", prompt, GREEDY)
    plan = llm.engine.scheduler.plan()
    assert plan is not None
    assert plan.num_tokens == 0
    result = llm.engine.core.executor.runner.run(plan)
    assert [list(sampled) for sampled in result.token_ids] == [first.outputs[0].token_ids[:1]]


def test_requests_that_share_a_running_prefix_stay_independent(make_llm: MakeLLM) -> None:
    llm, shared = make_llm(), tokens(90)
    prompts = [shared, shared + tokens(30, seed=1), shared + tokens(40, seed=2)]
    expected = answers(make_llm(enable_prefix_caching=False), prompts, SamplingParams(temperature=0, max_tokens=40))
    params = SamplingParams(temperature=0, max_tokens=40)
    llm.engine.add_request("0", prompts[0], params)
    llm.engine.step()
    found = {}
    for name in ("1", "2"):
        llm.engine.add_request(name, prompts[int(name)], params)
    while llm.engine.has_unfinished:
        found.update({o.request_id: o for o in llm.engine.step() if o.finished})
    assert [found[name].outputs[0].token_ids for name in "012"] == expected
    assert [found[name].num_cached_tokens for name in "012"] == [0, 90, 90]


def test_forks_equal_requests_with_their_seeds_and_share_the_prompt(make_llm: MakeLLM) -> None:
    prompt = tokens(100)
    llm = make_llm()
    [forked] = llm.generate([prompt], SamplingParams(n=4, seed=11, max_tokens=12), use_tqdm=False)
    params = [SamplingParams(seed=11 + index, max_tokens=12) for index in range(4)]
    single = make_llm(enable_prefix_caching=False).generate([prompt] * 4, params, use_tqdm=False)
    assert [o.token_ids for o in forked.outputs] == [o.outputs[0].token_ids for o in single]
    assert len({tuple(o.token_ids) for o in forked.outputs}) > 1
    assert llm.engine.cache.stats().hit_tokens == 3 * 100


def test_preempted_requests_give_the_same_tokens_and_recompute_one(make_llm: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = answers(make_llm(enable_prefix_caching=False), prompts, params)
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(memory=16 * slab, max_model_len=256)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_turns_of_a_chat_hit_all_but_their_new_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(memory="64MiB")
    cold = make_llm(enable_prefix_caching=False)
    histories = [tokens(120, seed=seed) for seed in range(8)]
    for turn in range(6):
        known = [len(history) - 1 for history in histories]
        for seed, history in enumerate(histories):
            history.extend(tokens(20, seed=100 * turn + seed))
        outputs = llm.generate(histories, GREEDY, use_tqdm=False)
        if turn:
            assert [output.num_cached_tokens for output in outputs] == known
        assert [o.outputs[0].token_ids for o in outputs] == answers(cold, histories)
        for history, output in zip(histories, outputs, strict=True):
            history.extend(output.outputs[0].token_ids)


def test_shared_prefix_hits_to_the_token_from_third_prompt(make_llm: MakeLLM) -> None:
    llm, shared = make_llm(), tokens(100)
    hits = []
    for seed in range(1, 5):
        own = [seed, *tokens(30, seed=seed)]
        hits.append(llm.generate([shared + own], GREEDY, use_tqdm=False)[0].num_cached_tokens)
    assert hits == [0, 0, 100, 100]
