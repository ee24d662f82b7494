"""Models without recurrent layers: every cached token is hit, no memory goes to snapshots, and tokens stay the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.records.account import Reason
from strandline.records.tokens import TokenBuffer, decode
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.test_speculation import SPECULATION, force, record
from tests.cpu.engine.test_state_oracle import live_through_much
from tests.cpu.models import families

PROMPT_TOKENS = 140
TOLERANCE = 1e-5
"""Keys and values of order one in float32, from GEMMs with other numbers of rows."""


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.long), "qwen3_moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(request.param, tmp_path_factory.mktemp("families"))


@pytest.fixture
def make_llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(directory, monkeypatch, device="cpu")


def diverging(prompt: list[int], position: int) -> list[int]:
    """Return a prompt that differs from another at ``position``, and agrees with it afterwards."""
    return [*prompt[:position], prompt[position] ^ 1, *prompt[position + 1 :]]


def test_diverging_prompts_hit_all_shared_tokens(make_llm: MakeLLM) -> None:
    llm, cold = make_llm(), make_llm(enable_prefix_caching=False)
    prompt = tokens(PROMPT_TOKENS)
    positions = sorted({*range(0, PROMPT_TOKENS, 9), 62, 63, 64, 65, 127, 128, 129, PROMPT_TOKENS - 1})
    prompts = [diverging(prompt, position) for position in positions]
    expected = answers(cold, prompts)
    for position, other, answer in zip(positions, prompts, expected, strict=True):
        salt = {"cache_salt": str(position)}
        llm.generate({"prompt_token_ids": prompt, **salt}, GREEDY, use_tqdm=False)
        [output] = llm.generate({"prompt_token_ids": other, **salt}, GREEDY, use_tqdm=False)
        account = output.cache_account
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (position, answer)
        assert account.queried == account.hit + sum(miss.num_tokens for miss in account.misses)
        assert [miss.reason for miss in account.misses] == [Reason.DIVERGED if position else Reason.FIRST_SEEN]


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 140])
def test_identical_prompt_computes_its_last_token_alone(make_llm: MakeLLM, num_tokens: int) -> None:
    llm, prompt = make_llm(), tokens(num_tokens)
    first, second = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.num_cached_tokens == num_tokens - 1
    assert [miss.reason for miss in second.cache_account.misses] == [Reason.REPEATED]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_turns_of_a_chat_hit_all_but_their_new_tokens(make_llm: MakeLLM, async_scheduling: bool) -> None:
    llm = make_llm(async_scheduling=async_scheduling)
    cold = make_llm(enable_prefix_caching=False)
    histories = [tokens(100, seed=seed) for seed in range(4)]
    for turn in range(4):
        known = [len(history) - 1 for history in histories]
        for seed, history in enumerate(histories):
            history.extend(tokens(20, seed=100 * turn + seed))
        outputs = llm.generate(histories, GREEDY, use_tqdm=False)
        if turn:
            assert [output.num_cached_tokens for output in outputs] == known
        assert [output.outputs[0].token_ids for output in outputs] == answers(cold, histories)
        for history, output in zip(histories, outputs, strict=True):
            history.extend(output.outputs[0].token_ids)


@pytest.mark.parametrize("step_tokens", [50, 2048])
def test_burst_with_one_prefix_computes_it_once(make_llm: MakeLLM, step_tokens: int) -> None:
    llm, shared = make_llm(max_num_batched_tokens=step_tokens), tokens(150)
    prompts = [shared + tokens(7, seed=seed) for seed in range(5)] + [shared] * 3
    assert answers(llm, prompts) == answers(make_llm(enable_prefix_caching=False), prompts)
    assert llm.engine.cache.stats().hit_tokens == 4 * 150 + 3 * 149


def test_preempted_requests_recompute_one_token(make_llm: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(5)]
    params = SamplingParams(temperature=0, max_tokens=70)
    expected = answers(make_llm(enable_prefix_caching=False), prompts, params)
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(memory=10 * slab, max_model_len=190)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_memory_holds_blocks_alone(make_llm: MakeLLM) -> None:
    """Ten prompts of two blocks stay cached in room for twenty, and one for the copy of a block."""
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(memory=22 * slab, max_model_len=256)
    prompts = [tokens(110, seed=seed) for seed in range(10)]
    first, second = ([llm.generate([p], GREEDY, use_tqdm=False)[0] for p in prompts] for _ in range(2))
    assert [output.num_cached_tokens for output in first] == [0] * 10
    assert [output.num_cached_tokens for output in second] == [109] * 10
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]


def test_published_blocks_hold_their_keys_and_values(make_llm: MakeLLM) -> None:
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(memory=24 * slab, max_model_len=512, max_num_batched_tokens=100)
    live_through_much(llm, seed=1)
    assert llm.engine.scheduler.num_preemptions > 0
    cold = make_llm()
    paths = list(cached_paths(llm))
    assert len(paths) > 5
    for path in paths:
        cold.generate([path], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        for kept, expected in zip(contents(llm, path), contents(cold, path), strict=True):
            assert (kept - expected).abs().max() < TOLERANCE


def cached_paths(llm: LLM) -> Iterator[list[int]]:
    """Yield the tokens from the root to the end of every childless run."""
    waiting = [(root, b"") for root in llm.engine.cache.internals().index.roots.values()]
    while waiting:
        run, prefix = waiting.pop()
        path = prefix + bytes(run.tokens)
        waiting.extend((child, path) for child in run.children.values())
        if path and not run.children:
            yield decode(path)


def contents(llm: LLM, path: list[int]) -> Iterator[torch.Tensor]:
    """Yield every layer's keys and values of a cached path."""
    match = llm.engine.cache.internals().index.match("", TokenBuffer(path).data)
    assert match is not None
    assert match.end.kv_tokens == len(path)
    blocks = [block for run in reversed(list(match.end.run.ancestry())) for block in run.blocks]
    blocks = blocks[: match.end.num_blocks]
    if match.end.partial_run is not None:
        partial = match.end.partial_run
        blocks.append(partial.blocks[match.end.num_blocks - partial.start_block])
    for layer in llm.engine.core.executor.runner.arena.layers:
        for stream in layer.streams.values():
            yield stream[blocks].flatten(0, 1)[: len(path)]


@pytest.mark.parametrize("num_tokens", [64, 129, 200])
def test_deterministic_answers_are_the_same_bits(make_llm: MakeLLM, num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    prompt = tokens(num_tokens)
    llm = make_llm(deterministic=True)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, (num_tokens - 1) // 64 * 64]
    assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs


def test_engine_says_that_it_needs_no_snapshots(make_llm: MakeLLM) -> None:
    text = "\n".join(make_llm(mamba_cache_mode="none").engine.describe())
    assert "no snapshots are needed, as the model keeps no recurrent state" in text
    assert "shortest prefix that can hit: 1 token" in text


def test_speculation_changes_no_token_and_no_hit(make_llm: MakeLLM) -> None:
    prompts = [tokens(count, seed=count) for count in (5, 64, 130)]
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = answers(make_llm(enable_prefix_caching=False), prompts, params)
    undrafted = make_llm(speculative_config=SPECULATION)
    recorder = record(undrafted)
    assert answers(undrafted, prompts, params) == expected
    llm = force(make_llm(speculative_config=SPECULATION), recorder.known, [3, 1, 2, 0])
    assert answers(llm, prompts, params) == expected
    turns = [[*prompt, *answer, 1] for prompt, answer in zip(prompts, expected, strict=True)]
    outputs = llm.generate(turns, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [len(turn) - 2 for turn in turns]
