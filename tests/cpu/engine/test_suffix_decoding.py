"""Suffix decoding in an engine: tokens and hits of plain decoding, in every salt as if it were the only one."""

from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.drafting.suffix_drafter import SuffixDrafter
from strandline.records.events import SpeculationStats
from strandline.records.outputs import RequestOutput
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import answers, tokens

SUFFIX = {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, device="cpu", memory="64MiB")


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str = "") -> list[RequestOutput]:
    given: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    if not salt:
        given = prompts
    return llm.generate(given, params, use_tqdm=False)


def parts(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.num_cached_tokens, [x.token_ids for x in output.outputs]) for output in outputs]


def drafts_of(outputs: list[RequestOutput]) -> list[SpeculationStats]:
    return [output.speculation for output in outputs]


def drafter_of(llm: LLM) -> SuffixDrafter:
    drafter = llm.engine.scheduler.drafts.drafter
    assert isinstance(drafter, SuffixDrafter)
    return drafter


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"seed": 3, "n": 3}], ids=str)
def test_repeated_requests_give_the_same_tokens_and_hits(make: MakeLLM, options: dict[str, Any]) -> None:
    prompts = [tokens(count, seed=count) for count in (1, 40, 63, 100)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    plain, llm = make(), make(speculative_config=SUFFIX)
    for _ in range(3):
        assert parts(run(llm, prompts, params)) == parts(run(plain, prompts, params))
    counts = llm.engine.core.stats().speculation
    # The same seeds give the same answers: those that are repeated are drafted.
    assert counts.num_accepted_tokens > 100


def test_an_earlier_answer_is_drafted_as_a_whole(make: MakeLLM) -> None:
    llm, prompt = make(speculative_config={**SUFFIX, "num_speculative_tokens": 16}), tokens(50)
    [first] = run(llm, [prompt], GREEDY)
    [second] = run(llm, [prompt], GREEDY)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    counts = second.speculation
    assert counts.num_accepted_tokens >= 0.8 * counts.num_draft_tokens
    # Drafts of at most 12 tokens: with the token behind them, 40 tokens take few steps.
    assert counts.num_drafts <= 8


def test_other_salts_change_no_draft_of_an_engine(make: MakeLLM) -> None:
    prompts = [tokens(count, seed=count) for count in (20, 50, 70)]
    alone, shared = make(speculative_config=SUFFIX), make(speculative_config=SUFFIX)
    for _ in range(2):
        for salt in ("b", "", "c"):
            run(shared, prompts, GREEDY, salt)
        found, expected = (run(llm, prompts, GREEDY, "a") for llm in (shared, alone))
        assert parts(found) == parts(expected)
        assert drafts_of(found) == drafts_of(expected)
    # Within a salt, they do.
    repeated = sum(each.num_accepted_tokens for each in drafts_of(run(shared, prompts, GREEDY, "b")))
    unseen = sum(each.num_accepted_tokens for each in drafts_of(run(shared, prompts, GREEDY, "new")))
    assert repeated > unseen


def test_preempted_requests_give_the_same_tokens(make: MakeLLM) -> None:
    prompts = [tokens(60, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = answers(make(enable_prefix_caching=False), prompts, params)
    slab = make(speculative_config=SUFFIX).engine.core.spec.slab_bytes
    llm = make(speculative_config=SUFFIX, memory=16 * slab, max_model_len=256)
    for _ in range(2):
        assert answers(llm, prompts, params) == expected
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 100


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_are_kept_once_and_aborted_ones_never(make: MakeLLM, is_async: bool) -> None:
    llm, prompt = make(speculative_config=SUFFIX, async_scheduling=is_async), tokens(50)
    llm.engine.add_request("aborted", prompt, GREEDY)
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort("aborted")
    while llm.engine.has_unfinished:
        llm.engine.step()
    kept = drafter_of(llm).answers
    assert kept.num_tokens == 0
    [output] = run(llm, [prompt], GREEDY)
    num_context = min(len(prompt), 18)
    assert kept.num_tokens == num_context + len(output.outputs[0].token_ids) + 1
