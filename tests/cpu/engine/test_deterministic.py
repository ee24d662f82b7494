"""Deterministic: snapshots and steps of prompts lie on the 64-token grid, and nothing generated is found by others.

``test_bits.py`` compares bits.
"""

import random
from typing import Any

import pytest
from torch import Tensor

from strandline import LLM, SamplingParams
from strandline.cache.inspection.published import published_snapshots
from strandline.device.sampling.sampler import LogprobTensors
from strandline.device.sizing import require_determinism
from strandline.errors import ConfigError
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.binding import bind_kernels
from strandline.kernels.operation import Workload
from strandline.records.tokens import TokenBuffer
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.engine.tiny import VOCAB_SIZE


def prompts_that_share(seed: int, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    heads = [rng.choices(range(VOCAB_SIZE), k=250) for _ in range(2)]
    sizes = [1, 5, 63, 64, 65, 130]
    return [
        rng.choice(heads)[: rng.randint(1, 250)] + rng.choices(range(VOCAB_SIZE), k=rng.choice(sizes))
        for _ in range(count)
    ]


@pytest.mark.parametrize("step_tokens", [64, 100, 1000])
def test_tokens_are_those_of_the_usual_engine(make_llm: MakeLLM, step_tokens: int) -> None:
    prompts = prompts_that_share(1)
    expected = answers(make_llm(enable_prefix_caching=False), prompts)
    llm = make_llm(deterministic=True, max_num_batched_tokens=step_tokens)
    assert answers(llm, prompts) == expected
    assert answers(llm, prompts) == expected


def test_snapshots_lie_on_the_grid_within_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(deterministic=True, memory="64MiB")
    prompts = prompts_that_share(2)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=150), use_tqdm=False)
    ends = {len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts} - {0}
    positions = {snapshot.position for _, _, snapshot in published_snapshots(llm.engine.cache)}
    assert positions >= ends
    assert not any(position % BLOCK_TOKENS for position in positions)
    assert max(positions) == max(ends)


def test_generated_tokens_are_not_found_in_the_cache(make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(deterministic=True), tokens(100)
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    account = llm.engine.cache.lookup(TokenBuffer(prompt + output.outputs[0].token_ids))
    assert account.hit == 64
    assert {miss.reason.value for miss in account.misses} == {"diverged"}


def test_prompts_step_on_the_grid_and_outputs_token_by_token(make_llm: MakeLLM) -> None:
    llm = make_llm(deterministic=True, max_num_batched_tokens=100)
    core = llm.engine.core
    for index, prompt in enumerate(prompts_that_share(3)):
        llm.engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=20))
    while (plan := core.scheduler.plan()) is not None:
        assert plan.sequences
        for sequence in plan.sequences:
            request = core.scheduler._requests[sequence.request_id]
            num_prompt = request.num_prompt_tokens
            if sequence.end <= num_prompt:
                assert sequence.start % BLOCK_TOKENS == 0 or sequence.start == sequence.end
                assert sequence.end % BLOCK_TOKENS == 0 or sequence.end == num_prompt
                assert sequence.is_prefill or sequence.start == sequence.end
            else:
                assert sequence.start >= num_prompt
                assert sequence.end == sequence.start + 1
                assert not sequence.is_prefill
                assert not sequence.cuts
        core.scheduler.commit(plan, core.executor.runner.run(plan))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_preempted_requests_start_over_and_give_the_same_tokens(make_llm: MakeLLM, is_overlapped: bool) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = answers(make_llm(enable_prefix_caching=False), prompts, params)
    slab = make_llm().engine.core.spec.slab_bytes
    llm = make_llm(deterministic=True, memory=16 * slab, max_model_len=256, async_scheduling=is_overlapped)
    assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0
    assert all(snapshot.position % BLOCK_TOKENS == 0 for _, _, snapshot in published_snapshots(llm.engine.cache))


def test_forks_share_the_prompt_as_far_as_whole_blocks_go(make_llm: MakeLLM) -> None:
    prompt = tokens(100)
    llm = make_llm(deterministic=True)
    params = SamplingParams(n=3, seed=11, max_tokens=12)
    [forked] = llm.generate([prompt], params, use_tqdm=False)
    [usual] = make_llm().generate([prompt], params, use_tqdm=False)
    assert [o.token_ids for o in forked.outputs] == [o.token_ids for o in usual.outputs]
    assert llm.engine.cache.stats().hit_tokens == 2 * 64


def test_a_marked_position_is_rounded_down(make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(deterministic=True), tokens(200)
    llm.generate({"prompt_token_ids": prompt, "marks": [150]}, GREEDY, use_tqdm=False)
    assert positions(llm) == [128, 192]


def positions(llm: LLM) -> list[int]:
    return sorted(snapshot.position for _, _, snapshot in published_snapshots(llm.engine.cache))


def test_log_probabilities_of_prompts_are_computed_by_whole_blocks(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a step computes several blocks together."""
    num_rows, compute = list[int](), LogprobTensors.of

    def counting(logits_NP: Tensor, tokens_N: Tensor, *others: Any) -> LogprobTensors:
        num_rows.append(len(tokens_N))
        return compute(logits_NP, tokens_N, *others)

    monkeypatch.setattr(LogprobTensors, "of", counting)
    for step_tokens in (100, 1000):
        llm = make_llm(deterministic=True, max_num_batched_tokens=step_tokens)
        monkeypatch.setattr(llm.engine.core.executor.runner, "_is_exact_on_cpu", False)
        llm.generate([tokens(200)], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert num_rows == [64, 64, 64, 7] * 2


def test_steps_must_have_room_for_a_block(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens must be at least 64"):
        make_llm(deterministic=True, max_num_batched_tokens=63)


def test_recurrent_states_must_be_kept_in_float32() -> None:
    def spec(state: str) -> ModelSpec:
        kept = (TensorSpec("state", (2, 3), state, is_recurrent=True), TensorSpec("window", (3, 2), "bfloat16"))
        return ModelSpec((kv_spec(1, 8, "bfloat16"), LayerSpec(states=kept)), 4, "bfloat16")

    kernels = bind_kernels((), Workload("cpu", "bfloat16"))
    require_determinism(spec("float32"), kernels)
    with pytest.raises(ConfigError, match="needs states in float32, the model's are bfloat16"):
        require_determinism(spec("bfloat16"), kernels)
