"""Windows without recurrent layers: a snapshot is a window without a slot, and requests share its blocks.

Freed memory is NaN here, and so is the null block, which stands for what a window has passed: a kernel that reads a
block before a window changes the tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.tree import Snapshot
from strandline.device.sizing import slabs_for
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, PATH, Lifetime
from strandline.kernels.arena import NAN_BYTE
from strandline.records.account import Reason
from strandline.records.tokens import decode
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.test_speculation import SPECULATION, force, record
from tests.cpu.engine.test_state_oracle import live_through_much
from tests.cpu.engine.test_window_blocks import LONG, SHORT, num_window_blocks
from tests.cpu.models import families

TOLERANCE = 1e-5
"""Keys and values of order one in float32, from GEMMs with other numbers of rows."""


@pytest.fixture(scope="module", params=["gemma3", "gemma3-odd"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their windows are shorter and longer than a block."""
    return families.save(request.param, tmp_path_factory.mktemp("families"))


@pytest.fixture
def make_llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    make = llm_maker(directory, monkeypatch, device="cpu", memory="16MiB")

    def make_poisoned(**options: Any) -> LLM:
        llm = make(**options)
        assert llm.engine.core.spec.has_window_blocks
        llm.engine.core.executor.runner.arena.block(NULL_BLOCK, Lifetime(1)).fill_(NAN_BYTE)
        return llm

    return make_poisoned


@pytest.mark.parametrize("max_num_batched_tokens", [65, 2048])
def test_turns_and_branches_resume_at_snapshots(make_llm: MakeLLM, max_num_batched_tokens: int) -> None:
    llm = make_llm(max_num_batched_tokens=max_num_batched_tokens)
    assert llm.engine.core.spec.has_window_blocks
    first = tokens(300)
    [output] = llm.generate([first], LONG, use_tqdm=False)
    longer = [*first, *output.outputs[0].token_ids, *tokens(5, seed=1)]
    others = [[*first[:200], *tokens(50, seed=seed)] for seed in (2, 3)]
    prompts = [longer, longer, others[0], others[1], first]
    outputs = [llm.generate([prompt], SHORT, use_tqdm=False)[0] for prompt in prompts]
    # The answer's last token was not computed; the first branch leaves a snapshot for the next one.
    assert [each.num_cached_tokens for each in outputs] == [449, 454, 0, 200, 299]
    assert [each.reason for each in outputs[2].cache_account.misses] == [Reason.NO_SNAPSHOT, Reason.DIVERGED]
    [size] = llm.engine.core.spec.window_sizes
    most = llm.engine.cache.stats().num_snapshots * (size.num_tokens // BLOCK_TOKENS + 2)
    assert 0 < num_window_blocks(llm) <= most
    cold = make_llm(enable_prefix_caching=False)
    assert [output.outputs[0].token_ids] == answers(cold, [first], LONG)
    assert [each.outputs[0].token_ids for each in outputs] == answers(cold, prompts, SHORT)


def test_bursts_drafts_and_preemptions_change_no_token(make_llm: MakeLLM) -> None:
    cold, llm = make_llm(enable_prefix_caching=False), make_llm(max_num_batched_tokens=50)
    shared = tokens(150)
    burst = [*([*shared, *tokens(7, seed=seed)] for seed in range(5)), *[shared] * 3]
    assert answers(llm, burst) == answers(cold, burst)
    assert llm.engine.cache.stats().hit_tokens == 4 * 150 + 3 * 149
    params = SamplingParams(temperature=0, max_tokens=120)
    prompts = [tokens(60, seed=seed) for seed in range(5)]
    expected = answers(cold, prompts, params)
    undrafted = make_llm(speculative_config=SPECULATION)
    recorder = record(undrafted)
    assert answers(undrafted, prompts, params) == expected
    drafting = force(make_llm(speculative_config=SPECULATION), recorder.known, [3, 1, 2, 0])
    assert answers(drafting, prompts, params) == expected
    spec = llm.engine.core.spec
    small = make_llm(memory=(slabs_for(spec, 190) + 3) * spec.slab_bytes, max_model_len=190)
    assert answers(small, prompts, params) == expected
    assert small.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("is_deterministic", "hit"), [(False, 99), (True, 64)])
def test_forks_share_the_prompt_and_equal_requests_with_their_seeds(
    make_llm: MakeLLM, hit: int, *, is_deterministic: bool
) -> None:
    prompt = tokens(100)
    llm = make_llm(deterministic=is_deterministic)
    [forked] = llm.generate([prompt], SamplingParams(n=4, seed=11, max_tokens=70), use_tqdm=False)
    params = [SamplingParams(seed=11 + index, max_tokens=70) for index in range(4)]
    alone = make_llm(enable_prefix_caching=False).generate([prompt] * 4, params, use_tqdm=False)
    assert [output.token_ids for output in forked.outputs] == [output.outputs[0].token_ids for output in alone]
    assert llm.engine.cache.stats().hit_tokens == 3 * hit
    assert llm.engine.core.spec.has_window_blocks


def test_deterministic_snapshots_are_on_the_grid_within_prompts(make_llm: MakeLLM) -> None:
    prompts = [tokens(150)[: 60 + 30 * seed] + tokens(7, seed=seed) for seed in range(3)] + [tokens(128, seed=9)]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, logprobs=2)
    spec = make_llm().engine.core.spec
    small = (slabs_for(spec, 240) + 2) * spec.slab_bytes
    cold = make_llm(deterministic=True, enable_prefix_caching=False)
    llm = make_llm(deterministic=True, memory=small, max_model_len=240)
    expected = [cold.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    for _ in range(2):
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert [each.logprobs for each in found] == [each.logprobs for each in expected]
    [again] = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens in (0, 64), "the last token of a prompt is computed with its block"
    assert llm.engine.scheduler.num_preemptions > 0
    positions = [snapshot.position for _, _, snapshot in published_snapshots(llm.engine.cache)]
    assert not any(position % BLOCK_TOKENS or position > 128 for position in positions)


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": False}, {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}],
    ids=str,
)
def test_snapshots_have_the_keys_and_values_of_their_windows(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    spec = make_llm().engine.core.spec
    memory = (slabs_for(spec, 512) + 10) * spec.slab_bytes
    llm = make_llm(memory=memory, max_model_len=512, max_num_batched_tokens=100, **options)
    live_through_much(llm, seed=1, num_requests=25)
    assert llm.engine.scheduler.num_preemptions > 0
    cold = make_llm(memory="64MiB")
    published = list(published_snapshots(llm.engine.cache))
    assert len(published) > 3
    for _, key, snapshot in published:
        path = decode(key)
        cold.generate([path], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        same = next(s for _, other, s in published_snapshots(cold.engine.cache) if other == key)
        for found, expected in zip(contents(llm, snapshot), contents(cold, same), strict=True):
            assert (found - expected).abs().max() < TOLERANCE, snapshot.position


def contents(llm: LLM, snapshot: Snapshot) -> Iterator[torch.Tensor]:
    """Yield the keys and values of a snapshot's window in all layers that have one."""
    spec, [window] = llm.engine.core.spec, snapshot.windows
    start = max(snapshot.position - spec.window_sizes[0].num_tokens, 0) - window.first * BLOCK_TOKENS
    end = snapshot.position - window.first * BLOCK_TOKENS
    for layer, memory in zip(spec.layers, llm.engine.core.executor.runner.arena.layers, strict=True):
        for stream in memory.streams.values() if spec.lifetime_of(layer) != PATH else ():
            yield stream[list(window.held)].flatten(0, 1)[max(start, 0) : end]


@pytest.mark.parametrize("seed", range(2))
def test_random_turns_give_the_tokens_of_an_engine_without_cache(make_llm: MakeLLM, seed: int) -> None:
    rng = random.Random(seed)
    spec = make_llm().engine.core.spec
    memory = (slabs_for(spec, 450) + rng.choice([3, 12])) * spec.slab_bytes
    llm = make_llm(memory=memory, max_model_len=450, max_num_batched_tokens=rng.choice([33, 64, 100]))
    cold = make_llm(enable_prefix_caching=False)
    known = [tokens(150)]
    for _ in range(12):
        heads = [rng.choice(known)[: rng.randint(0, 300)] for _ in range(rng.randint(1, 4))]
        prompts = [[*head, *tokens(rng.choice([1, 5, 63, 64, 65]), seed=rng.randrange(99))] for head in heads]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 70), ignore_eos=True)
        found = answers(llm, prompts, params)
        assert found == answers(cold, prompts, params)
        known += [[*prompt, *answer] for prompt, answer in zip(prompts, found, strict=True)]
    assert llm.engine.cache.stats().hit_tokens > 0
