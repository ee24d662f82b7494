"""Host memory below the device: what is evicted comes back, and the tokens are those of a run without a cache."""

from pathlib import Path

import pytest

from strandline import LLM, SamplingParams
from strandline.cache.stats import CacheStats
from strandline.device.executor import LaunchedStep
from strandline.device.uni_executor import UniExecutor
from strandline.errors import ConfigError
from strandline.records.account import Reason
from strandline.records.actions import Completion, LoadIn
from strandline.records.plan import StepPlan
from strandline.records.tier_stats import TierStats
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import GREEDY, answers, tokens
from tests.cpu.models import families

LENGTHS = (300, 257, 256, 191, 130, 65, 63)
PROMPTS = [tokens(count, seed=count) for count in LENGTHS]


def slabs(llm: LLM, count: int) -> int:
    """Return the bytes of this many slabs."""
    return count * llm.engine.core.spec.slab_bytes


def stats(llm: LLM) -> CacheStats:
    return llm.engine.core.cache.stats()


def tier_stats(llm: LLM) -> tuple[TierStats, ...]:
    return llm.engine.core.loads.stats()


def test_evicted_prompts_come_back_from_host_memory(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    expected = answers(cold, PROMPTS)
    llm = make_llm(memory=slabs(cold, 14), host_memory="8MiB", max_model_len=512)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert answers(llm, [prompt]) == [answer]
    assert stats(llm).num_snapshots_evicted > 0, "the device has room for few of them"
    hits = []
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        hits.append(output.num_cached_tokens)
    assert hits == list(LENGTHS), "every prompt is hit whole"
    after = stats(llm)
    assert after.loads.num_done >= len(PROMPTS) - 3
    assert after.loads.num_snapshots == after.loads.num_done
    assert after.loads.num_blocks > 0
    [host] = tier_stats(llm)
    assert host.num_snapshots_demoted > 0
    assert host.num_loads == after.loads.num_done
    assert host.num_loaded_bytes > 0


def test_next_turns_hit_what_was_evicted_between_turns(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    llm = make_llm(memory=slabs(cold, 14), host_memory="8MiB", max_model_len=512)
    conversations = [list(prompt) for prompt in PROMPTS]
    num_hits = 0
    for turn in range(3):
        for conversation in conversations:
            [output] = llm.generate([conversation], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == answers(cold, [conversation])[0]
            num_hits += output.num_cached_tokens > 0
            conversation += [*output.outputs[0].token_ids, *tokens(11, seed=turn)]
    assert num_hits == 2 * len(PROMPTS)
    assert stats(llm).loads.num_done > len(PROMPTS)


def test_requests_at_once_wait_for_their_loads(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    llm = make_llm(memory=slabs(cold, 16), host_memory="8MiB", max_model_len=512)
    expected = answers(cold, PROMPTS)
    assert [answers(llm, PROMPTS) for _ in range(3)] == [expected] * 3
    assert stats(llm).loads.num_done > 0


def test_load_that_ended_during_a_step_is_planned_next(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = make_llm(enable_prefix_caching=False)
    llm = make_llm(memory=slabs(cold, 14), host_memory="8MiB", max_model_len=512, async_scheduling=True)
    for prompt in PROMPTS:
        answers(llm, [prompt])
    executor, plans = llm.engine.core.executor, list[StepPlan]()
    assert isinstance(executor, UniExecutor)
    launch = executor.launch

    def noted(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(executor, "launch", noted)
    # Results report no transfers: as if all ended while the step after them ran.
    transfers, poll, is_polled = executor.runner.transfers, executor.poll_transfers, False
    take = transfers.take

    def polled() -> tuple[Completion, ...]:
        nonlocal is_polled
        is_polled = True
        ended = poll()
        is_polled = False
        return ended

    monkeypatch.setattr(executor, "poll_transfers", polled)
    monkeypatch.setattr(transfers, "take", lambda: take() if is_polled else ())
    llm.engine.add_request("other", tokens(20, seed=99), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    llm.engine.add_request("evicted", PROMPTS[0], GREEDY)
    while not any(isinstance(action, LoadIn) for action in plans[-1].actions):
        llm.engine.step()
    transfers.completions.put(transfers.completions.get(timeout=30))  # the load has ended
    llm.engine.step()
    assert any(sequence.request_id.startswith("evicted") for sequence in plans[-1].sequences)
    while llm.engine.has_unfinished:
        llm.engine.step()


def test_bits_do_not_depend_on_demotion(make_llm: MakeLLM) -> None:
    cold = make_llm(enable_prefix_caching=False)
    llm = make_llm(memory=slabs(cold, 14), host_memory="8MiB", max_model_len=512, deterministic=True)
    plain = make_llm(enable_prefix_caching=False, deterministic=True)
    expected = answers(plain, PROMPTS)
    assert [[answers(llm, [prompt])[0] for prompt in PROMPTS] for _ in range(2)] == [expected] * 2
    assert stats(llm).loads.num_done > 0


def test_keys_and_values_without_states_come_back(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory: Path = families.save("llama", tmp_path_factory.mktemp("families"))
    make = llm_maker(directory, monkeypatch, device="cpu")
    cold = make(enable_prefix_caching=False)
    expected = answers(cold, PROMPTS)
    llm = make(memory=slabs(cold, 12), host_memory="8MiB", max_model_len=512)
    assert [[answers(llm, [prompt])[0] for prompt in PROMPTS] for _ in range(2)] == [expected] * 2
    after = stats(llm)
    assert (after.loads.num_done > 0, after.loads.num_blocks > 0) == (True, True)
    assert after.hit_tokens > sum(LENGTHS) // 2


def test_without_host_memory_nothing_rests(make_llm: MakeLLM) -> None:
    llm = make_llm()
    answers(llm, PROMPTS[:2])
    assert tier_stats(llm) == ()
    assert stats(llm).missed_tokens[Reason.DEMOTED] == 0


def test_host_memory_is_refused_without_a_cache(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="--host-memory holds what the cache evicts; drop --no-enable-prefix-caching"):
        make_llm(host_memory="8MiB", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--host-memory holds what the cache evicts; drop --mamba-cache-mode none"):
        make_llm(host_memory="8MiB", mamba_cache_mode="none")
    with pytest.raises(ConfigError, match="--host-memory must be a size"):
        make_llm(host_memory="much")
    with pytest.raises(ConfigError, match=r"--host-memory of .* bytes is more than the .* lower it"):
        make_llm(host_memory="1000000GiB")
