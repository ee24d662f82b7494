"""Deterministic: the same bits, cached or not, alone or in a batch, in steps of any size; without tolerances."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.cache.tokens import decode
from strandline.errors import ConfigError
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_deterministic import prompts_that_share
from tests.cpu.engine.test_state_oracle import contents, live_through_much
from tests.cpu.engine.tiny import save_tiny_model
from tests.gpu.engine.conftest import MAX_NUM_SEQS

SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "initializer_range": 0.1,
}
"""Large enough for the instructions that real models' tiles compile to."""

MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}

Trace = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="session", params=["small", "wide", "mixture"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replaces the tiny model of the other tests."""
    changes = {"small": {}, "wide": WIDE, "mixture": {**WIDE, **MIXTURE}}[request.param]
    return save_tiny_model(tmp_path_factory.mktemp(request.param), **changes)


@pytest.fixture(params=["float32", "bfloat16"])
def make_exact(model_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MakeLLM:
    settings = {"device": "cuda", "max_num_seqs": MAX_NUM_SEQS, "dtype": request.param, "memory": "64MiB"}
    return llm_maker(model_dir, monkeypatch, deterministic=True, **settings)


def traces(llm: LLM, prompts: list[list[int]]) -> Trace:
    """Return the tokens of each answer and the log-probabilities of their rivals."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, SAMPLED, use_tqdm=False)]
    return [
        (list(o.token_ids), [entry.logprob for place in o.logprobs or () for entry in place.values()]) for o in outputs
    ]


def test_answers_are_bitwise_independent_of_cache_and_batch(make_exact: MakeLLM) -> None:
    prompts = prompts_that_share(5, count=14)
    cold = make_exact(enable_prefix_caching=False)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt])]
    for options in ({}, {"max_num_batched_tokens": 100}, {"enforce_eager": True}, {"async_scheduling": False}):
        llm = make_exact(**options)
        assert traces(llm, prompts) == expected, options
        assert traces(llm, prompts[::-1]) == expected[::-1], options
        assert llm.engine.cache.stats().hit_tokens > 0


def test_preempted_answers_have_the_same_bits(make_exact: MakeLLM) -> None:
    prompts = prompts_that_share(6)
    expected = traces(make_exact(enable_prefix_caching=False), prompts)
    slab = make_exact().engine.core.spec.slab_bytes
    for num_slabs in (5, 7, 10, 14, 20, 28):
        try:
            llm = make_exact(memory=num_slabs * slab, max_model_len=448)
        except ConfigError:
            continue
        assert traces(llm, prompts) == expected
        if llm.engine.scheduler.num_preemptions:
            return
    pytest.fail("nothing was preempted")


@pytest.mark.parametrize("seed", [1, 2])
def test_a_published_slot_holds_the_bits_of_a_cold_prefill(make_exact: MakeLLM, seed: int) -> None:
    llm = make_exact(max_num_batched_tokens=100)
    live_through_much(llm, seed)
    cold = make_exact()
    published = list(llm.engine.cache.snapshots())
    assert len(published) > 5
    for _, key, snapshot in published:
        cold.generate([decode(key)], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        [slot] = [s.slot for _, k, s in cold.engine.cache.snapshots() if k == key]
        mine, theirs = contents(llm, snapshot.slot), contents(cold, slot)
        assert torch.equal(mine, theirs), f"{snapshot.position} ({snapshot.kind}): {(mine != theirs).sum()} values"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_gives_the_same_bits(dtype: str) -> None:
    rng = random.Random(3)
    heads = [rng.choices(range(4000), k=900) for _ in range(2)]
    prompts = [rng.choice(heads)[: rng.randint(1, 900)] + rng.choices(range(4000), k=100) for _ in range(20)]
    options: dict[str, Any] = {"dtype": dtype, "device": "cuda", "memory": "2GiB", "max_num_seqs": 32}
    cold = LLM("demo", deterministic=True, enable_prefix_caching=False, **options)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt])]
    llm = LLM("demo", deterministic=True, max_num_batched_tokens=700, **options)
    assert traces(llm, prompts) == expected
    assert traces(llm, prompts) == expected
    assert llm.engine.cache.stats().hit_tokens > 10_000
    # What the test would miss if it could not fail: without the flag bits do depend on the batch.
    if dtype == "bfloat16":
        loose = LLM("demo", enable_prefix_caching=False, **options)
        assert traces(loose, prompts) != [trace for prompt in prompts for trace in traces(loose, [prompt])]
