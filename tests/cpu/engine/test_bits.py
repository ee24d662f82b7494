"""Deterministic on a CPU: the same bits, cached or not, alone or in a batch, in steps of any size; without tolerances.

Each test runs with Numba's kernels and with torch's.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline import LLM, SamplingParams, env
from strandline.cache.inspection.published import published_snapshots
from strandline.engine import loading
from strandline.errors import ConfigError
from strandline.kernels.gemm.weights import DenseWeight, can_halve, lay_out_in_half
from strandline.records.tokens import decode
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_deterministic import prompts_that_share
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.test_state_oracle import AT_ONCE, contents, live_through_much
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.models import families

SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, seed=7, max_tokens=8, logprobs=2, ignore_eos=True)
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


@pytest.fixture(params=["Numba", pytest.param("torch", marks=pytest.mark.long)])
def backend(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv(env.NUMBA, str(int(request.param == "Numba")))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_exact(model_dir: Path, backend: None, dtype: str, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, deterministic=True, device="cpu", dtype=dtype, memory="32MiB")


@pytest.fixture(params=["wide", "mixture"])
def make_larger(
    backend: None,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> MakeLLM:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, **(WIDE if request.param == "wide" else {**WIDE, **MIXTURE}))
    return llm_maker(directory, monkeypatch, deterministic=True, device="cpu", dtype=dtype, memory="32MiB")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two of torch's threads, between which large operations are divided."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def traces(llm: LLM, prompts: Any, params: SamplingParams | list[SamplingParams] = SAMPLED) -> Trace:
    """Return the tokens of each answer and the log-probabilities of their rivals."""
    outputs = [output for request in llm.generate(prompts, params, use_tqdm=False) for output in request.outputs]
    return [
        (list(o.token_ids), [entry.logprob for entries in o.logprobs or () for entry in entries.values()])
        for o in outputs
    ]


def linear_that_depends_on_the_batch(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Multiply a single row in one sum over its inputs, and several rows in two."""
    if x.shape[:-1].numel() == 1:
        out = x @ weight_OI.mT
    else:
        middle = x.shape[-1] // 2
        out = x[..., :middle] @ weight_OI[:, :middle].mT + x[..., middle:] @ weight_OI[:, middle:].mT
    return out if bias_O is None else out + bias_O


def test_answers_are_bitwise_independent_of_cache_and_batch(make_larger: MakeLLM) -> None:
    prompts = prompts_that_share(5, count=4)
    cold = make_larger(enable_prefix_caching=False)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt], SHORT)]
    for options in ({}, {"max_num_batched_tokens": 100, "async_scheduling": False}):
        llm = make_larger(**options)
        assert traces(llm, prompts, SHORT) == expected, options
        assert traces(llm, prompts[::-1], SHORT) == expected[::-1], options
        assert llm.engine.cache.stats().hit_tokens > 0


def test_resuming_at_any_position_gives_the_same_bits(make_exact: MakeLLM) -> None:
    prompt = tokens(192)
    expected = traces(make_exact(enable_prefix_caching=False), [prompt], SHORT)
    llm = make_exact()
    for position in (1, 63, 64, 65, 100, 129, 192):
        # A salt of its own, so that nothing else can be resumed.
        salt = {"cache_salt": str(position)}
        traces(llm, [{"prompt_token_ids": prompt[:position], **salt}], SHORT)
        assert traces(llm, [{"prompt_token_ids": prompt, **salt}], SHORT) == expected


@pytest.mark.parametrize("step_tokens", [100, 1000])
def test_indexed_attention_gives_the_same_bits(
    step_tokens: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.save("qwen4_exp-odd", tmp_path)
    make = llm_maker(directory, monkeypatch, deterministic=True, device="cpu", dtype=dtype, memory="32MiB")
    prompts = prompts_that_share(5, count=4)
    cold = make(enable_prefix_caching=False)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt], SHORT)]
    llm = make(max_num_batched_tokens=step_tokens)
    assert traces(llm, prompts, SHORT) == expected
    assert traces(llm, prompts[::-1], SHORT) == expected[::-1]
    assert llm.engine.cache.stats().hit_tokens > 0


def test_forks_have_the_bits_of_a_cold_run(make_exact: MakeLLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=12, logprobs=2)
    expected = traces(make_exact(enable_prefix_caching=False, max_num_seqs=1), [tokens(100)], params)
    assert traces(make_exact(), [tokens(100)], params) == expected


def test_log_probabilities_of_prompts_have_the_same_bits(make_exact: MakeLLM) -> None:
    prompts, params = prompts_that_share(7, count=4), SamplingParams(max_tokens=1, prompt_logprobs=1)
    narrow, wide = make_exact(max_num_batched_tokens=100), make_exact()
    alone = [output.prompt_logprobs for p in prompts for output in narrow.generate([p], params, use_tqdm=False)]
    for llm in (narrow, wide):
        assert [output.prompt_logprobs for output in llm.generate(prompts, params, use_tqdm=False)] == alone


def test_preempted_answers_have_the_same_bits(make_exact: MakeLLM) -> None:
    prompts, slab = prompts_that_share(6, count=7), make_exact().engine.core.spec.slab_bytes
    # Where a slab holds many blocks, only long answers outgrow those that their prompts were admitted with.
    for max_tokens in (40, 200):
        params = replace(SAMPLED, max_tokens=max_tokens)
        expected = traces(make_exact(enable_prefix_caching=False), prompts, params)
        for num_slabs in (5, 7, 10, 14, 20, 28):
            try:
                llm = make_exact(memory=num_slabs * slab, max_model_len=640)
            except ConfigError:
                continue
            assert traces(llm, prompts, params) == expected
            if llm.engine.scheduler.num_preemptions:
                return
    pytest.fail("nothing was preempted")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_published_slot_holds_the_bits_of_a_cold_prefill(make_exact: MakeLLM, seed: int) -> None:
    llm = make_exact(max_num_batched_tokens=100)
    live_through_much(llm, seed, num_requests=16)
    cold = make_exact()
    published = list(published_snapshots(llm.engine.cache))
    assert len(published) > 5
    params = SamplingParams(temperature=0, max_tokens=2)
    for start in range(0, len(published), AT_ONCE):
        batch = published[start : start + AT_ONCE]
        cold.generate([decode(key) for _, key, _ in batch], params, use_tqdm=False)
        slots = {key: found.slot for _, key, found in published_snapshots(cold.engine.cache)}
        for _, key, snapshot in batch:
            mine, theirs = contents(llm, snapshot.slot), contents(cold, slots[key])
            assert torch.equal(mine, theirs), f"{snapshot.position} ({snapshot.kind}): {(mine != theirs).sum()} values"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.long), "bfloat16", "half"])
def test_the_demo_model_gives_the_same_bits(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if weights == "half":
        if not can_halve(torch.zeros(1, 1)):
            pytest.skip("this CPU does not multiply with weights in float16")
        monkeypatch.setattr(loading, "lay_out", lay_out_in_half)
    rng = random.Random(3)
    head = rng.choices(range(4000), k=110)
    prompts = [head[: rng.randint(64, 110)] + rng.choices(range(4000), k=20) for _ in range(2)]
    options = {"dtype": "float32" if weights == "half" else weights, "device": "cpu", "memory": "64MiB"}
    cold = LLM("demo", deterministic=True, enable_prefix_caching=False, **options)
    expected = [trace for prompt in prompts for trace in traces(cold, [prompt], SHORT)]
    llm = LLM("demo", deterministic=True, max_num_batched_tokens=100, **options)
    assert traces(llm, prompts, SHORT) == expected
    assert traces(llm, prompts[::-1], SHORT) == expected[::-1]
    assert llm.engine.cache.stats().hit_tokens >= 3 * 64
    # The comparison can fail: with a product whose sums depend on the number of rows, bits depend on the batch.
    monkeypatch.setattr(loading, "lay_out", DenseWeight)
    monkeypatch.setattr(F, "linear", linear_that_depends_on_the_batch)
    loose, batch = LLM("demo", enable_prefix_caching=False, **options), prompts[:2]
    assert traces(loose, batch, SHORT) != [trace for prompt in batch for trace in traces(loose, [prompt], SHORT)]
