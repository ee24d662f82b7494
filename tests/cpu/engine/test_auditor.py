"""Audits: hits are replayed cold, and a wrong snapshot is found out; nobody notices otherwise."""

from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.errors import ConfigError
from strandline.records.outputs import RequestOutput
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_exactness import tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = tokens(100, seed=1)
FLOAT32_DIFFERENCE = 1e-4
"""Logits of the tiny model lie tens apart, and both ways round them to 24 bits."""


def ask(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def rest(llm: LLM) -> None:
    """Step until nothing is left to do."""
    while llm.engine.core.has_unfinished:
        assert not llm.engine.step()


def test_every_hit_is_replayed_and_differs_by_rounding(make_llm: MakeLLM) -> None:
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


def test_a_wrong_snapshot_is_found_out(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    for _, _, snapshot in llm.engine.cache.snapshots():
        for layer in llm.engine.core.executor.runner.arena.layers:
            if "state" in layer.states:
                layer.states["state"][snapshot.slot] += 30.0
    ask(llm, PROMPT + tokens(5, seed=3))
    rest(llm)
    audits = llm.engine.core.audits
    assert audits.largest_difference > 100 * FLOAT32_DIFFERENCE
    assert audits.largest_of is not None


def test_what_is_no_number_is_found_out_and_stays_so(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    for _, _, snapshot in llm.engine.cache.snapshots():
        llm.engine.core.executor.runner.arena.hidden_SE[snapshot.slot] = float("nan")
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    for _ in range(2):
        ask(llm, PROMPT, params)
        rest(llm)
    assert llm.engine.core.audits.largest_difference == float("inf")


def test_senders_see_nothing_of_it(make_llm: MakeLLM) -> None:
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


def test_what_is_as_long_as_may_be_is_replayed_too(make_llm: MakeLLM) -> None:
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


def test_an_aborted_request_is_not_replayed(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=1.0)
    ask(llm, PROMPT)
    llm.engine.add_request("gone", [*PROMPT, 1], GREEDY)
    llm.engine.step()
    llm.engine.abort("gone")
    rest(llm)
    assert llm.engine.core.audits.num_requests == 0


def test_a_share_of_the_hits_is_replayed(make_llm: MakeLLM) -> None:
    llm = make_llm(audit_rate=0.3)
    ask(llm, PROMPT)
    for seed in range(60):
        ask(llm, PROMPT + tokens(3, seed=seed), SamplingParams(temperature=0, max_tokens=1))
        rest(llm)
    assert 6 <= llm.engine.core.audits.num_requests <= 30


@pytest.mark.parametrize("rate", [-0.1, 1.5, "all", True, float("nan")])
def test_a_rate_is_a_share(make_llm: MakeLLM, rate: object) -> None:
    with pytest.raises(ConfigError, match="audit_rate"):
        make_llm(audit_rate=rate)
