"""Audits: hits are replayed cold, which finds wrong snapshots; senders do not notice."""

from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.cache.inspection.published import published_snapshots
from strandline.errors import ConfigError
from strandline.records.outputs import RequestOutput
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.tiny import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = tokens(100, seed=1)
FLOAT32_DIFFERENCE = 1e-4
"""Logits of the tiny model differ by tens, and are rounded to 24 bits both times."""


def ask(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def rest(llm: LLM) -> None:
    """Step until nothing is left to do."""
    while llm.engine.core.has_unfinished:
        assert not llm.engine.step()


def test_audited_hits_differ_from_replays_by_rounding(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    rest(llm)
    assert llm.engine.core.audits.num_requests == 0
    for extra in (0, 1, 30):
        ask(llm, PROMPT + tokens(extra, seed=2))
        rest(llm)
    audits = llm.engine.core.audits
    assert (audits.num_requests, audits.num_tokens) == (3, 36)
    assert 0 < audits.largest_difference < FLOAT32_DIFFERENCE


def test_audit_finds_a_wrong_snapshot(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    for _, _, snapshot in published_snapshots(llm.engine.cache):
        for layer in llm.engine.core.executor.runner.arena.layers:
            if "state" in layer.states:
                layer.states["state"][snapshot.slot] += 30.0
    ask(llm, PROMPT + tokens(5, seed=3))
    rest(llm)
    audits = llm.engine.core.audits
    assert audits.largest_difference > 100 * FLOAT32_DIFFERENCE
    assert audits.largest_of is not None


def test_audit_reports_nan_as_infinite_from_then_on(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    for _, _, snapshot in published_snapshots(llm.engine.cache):
        llm.engine.core.executor.runner.arena.hidden_SE[snapshot.slot] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    for _ in range(2):
        ask(llm, PROMPT, params)
        rest(llm)
    assert llm.engine.core.audits.largest_difference == float("inf")


def test_audits_are_invisible_to_senders(make_llm: MakeLLM) -> None:
    def serve(llm: LLM) -> list[Any]:
        found: list[Any] = []
        for seed, logprobs in ((5, None), (6, 2), (7, None)):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=9, logprobs=logprobs, ignore_eos=True)
            output = ask(llm, PROMPT + tokens(seed, seed=seed), params)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs, output.num_cached_tokens))
        rest(llm)
        counters = llm.engine.cache.stats()
        found.append(len(llm.engine.cache.internals().reuse))
        return [*found, counters.queried_tokens, counters.hit_tokens, counters.missed_tokens, counters.queries]

    audited = make_llm(audit_rate=1.0)
    assert serve(audited) == serve(make_llm())
    assert audited.engine.core.audits.num_requests == 1


def test_requests_of_maximal_length_are_audited(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0, max_model_len=160, max_num_seqs=4)
    prompts = [PROMPT + tokens(8, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    ask(llm, PROMPT)
    for _ in range(2):
        llm.generate(prompts, params, use_tqdm=False)
        rest(llm)
    audits = llm.engine.core.audits
    assert audits.num_requests >= 2
    # The last token of a request that fills the model's length has no room for one behind it.
    assert audits.num_tokens == audits.num_requests * (160 - 108 - 1)
    assert audits.largest_difference < FLOAT32_DIFFERENCE


def test_aborted_request_is_not_replayed(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    llm.engine.add_request("gone", [*PROMPT, 1], GREEDY)
    llm.engine.step()
    llm.engine.abort("gone")
    rest(llm)
    assert llm.engine.core.audits.num_requests == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_nothing_is_compared_across_a_change_of_weights(make_llm: MakeLLM, tmp_path: Path, num_steps: int) -> None:
    llm = make_llm(audit_rate=1.0, max_num_batched_tokens=64)
    ask(llm, PROMPT)
    ask(llm, PROMPT)
    for _ in range(num_steps):  # the replay begins
        llm.engine.step()
    assert llm.engine.core.has_unfinished
    llm.update_weights_from_disk(str(save_tiny_model(tmp_path, seed=5)))
    rest(llm)
    assert llm.engine.core.audits.num_requests == 0
    ask(llm, PROMPT)
    ask(llm, PROMPT)
    rest(llm)
    assert llm.engine.core.audits.num_requests == 1
    assert llm.engine.core.audits.largest_difference < FLOAT32_DIFFERENCE


def test_audit_rate_is_the_share_that_is_replayed(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=0.3)
    ask(llm, PROMPT)
    for seed in range(60):
        ask(llm, PROMPT + tokens(3, seed=seed), SamplingParams(temperature=0, max_tokens=1))
        rest(llm)
    assert 6 <= llm.engine.core.audits.num_requests <= 30


@pytest.mark.parametrize("rate", [-0.1, 1.5, "all", True, float("nan")])
def test_audit_rate_must_be_a_share(make_llm: MakeLLM, rate: object) -> None:
    with pytest.raises(ConfigError, match="--audit-rate"):
        make_llm(audit_rate=rate)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"mamba_cache_mode": "none"}, "--mamba-cache-mode none"),
    ],
)
def test_audits_are_refused_where_nothing_hits(make_llm: MakeLLM, options: dict[str, Any], cause: str) -> None:
    make_llm(audit_rate=0.0, **options)
    with pytest.raises(ConfigError, match=f"--audit-rate replays what hits the cache; drop {cause}"):
        make_llm(audit_rate=0.1, **options)
