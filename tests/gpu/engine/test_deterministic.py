"""Deterministic: the same bits, cached or not, alone or in a batch, in steps of any size; without tolerances."""

import random
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_bits import (
    MIXTURE,
    WIDE,
    test_a_published_slot_holds_the_bits_of_a_cold_prefill,
    test_forks_have_the_bits_of_a_cold_run,
    test_log_probabilities_of_prompts_have_the_same_bits,
    test_preempted_answers_have_the_same_bits,
    test_resuming_at_any_position_gives_the_same_bits,
    traces,
)
from tests.cpu.engine.test_deterministic import prompts_that_share
from tests.cpu.engine.tiny import save_tiny_model
from tests.gpu.engine.conftest import MAX_NUM_SEQS

__all__ = [
    "test_a_published_slot_holds_the_bits_of_a_cold_prefill",
    "test_forks_have_the_bits_of_a_cold_run",
    "test_log_probabilities_of_prompts_have_the_same_bits",
    "test_preempted_answers_have_the_same_bits",
    "test_resuming_at_any_position_gives_the_same_bits",
]


@pytest.fixture(scope="session", params=["small", "wide", "mixture"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replaces the tiny model of the other tests."""
    changes = {"small": {}, "wide": WIDE, "mixture": {**WIDE, **MIXTURE}}[request.param]
    return save_tiny_model(tmp_path_factory.mktemp(request.param), **changes)


@pytest.fixture(params=["float32", "bfloat16"])
def make_exact(model_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MakeLLM:
    settings = {"device": "cuda", "max_num_seqs": MAX_NUM_SEQS, "dtype": request.param, "memory": "64MiB"}
    return llm_maker(model_dir, monkeypatch, deterministic=True, **settings)


def test_answers_are_bitwise_independent_of_cache_and_batch(make_exact: MakeLLM) -> None:
    prompts = prompts_that_share(5, count=14)
    cold = make_exact(enable_prefix_caching=False)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt])]
    for options in ({}, {"max_num_batched_tokens": 100}, {"enforce_eager": True}, {"async_scheduling": False}):
        llm = make_exact(**options)
        assert traces(llm, prompts) == expected, options
        assert traces(llm, prompts[::-1]) == expected[::-1], options
        assert llm.engine.cache.stats().hit_tokens > 0


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
