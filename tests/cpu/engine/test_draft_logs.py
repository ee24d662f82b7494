"""Logs of what a draft layer drafts: rejected drafts are never read; requests are preempted and forked within them.

``test_speculation.py`` forces patterns of acceptance; here the demo model's layer drafts, and its drafts agree or not.
"""

from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.bench.evaluate import make_suite
from strandline.device.sizing import slabs_for
from strandline.env import DEBUG_CACHE
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_speculation import serve_with_poisoned_logs

SPECULATION = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
ADAPTIVE = {"adaptive": True}
DRAFTING = {"speculative_config": SPECULATION}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MAX_PROMPT_TOKENS = 400
LONGEST = 600


@pytest.fixture
def make_demo(monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return demo_maker(monkeypatch, device="cpu")


def demo_maker(monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> MakeLLM:
    """Build LLMs on the demo model; each step is settled before the next one is planned, and checked."""
    monkeypatch.setenv(DEBUG_CACHE, "1")
    settings = {"dtype": "float32", "memory": "64MiB", "max_model_len": LONGEST, "async_scheduling": False, **defaults}
    return lambda **options: LLM("demo", **{**settings, **options})


def prompts_of(llm: LLM) -> list[list[int]]:
    """Return short tasks of the demo model, of every kind that has some."""
    chats: list[Any] = [llm.render(task.messages) for task in make_suite(1, 6)]
    prompts = [chat["prompt_token_ids"] for chat in chats if len(chat["prompt_token_ids"]) < MAX_PROMPT_TOKENS]
    assert len(prompts) > 3
    return prompts


def parts(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Return hit tokens and the tokens of all outputs, request by request."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.num_cached_tokens, [x.token_ids for x in output.outputs]) for output in outputs]


def check_that_some_are_rejected(llm: LLM) -> None:
    counts = llm.engine.core.stats().speculation
    assert 20 < counts.num_accepted_tokens < counts.num_draft_tokens - 20


def test_rejected_drafts_of_the_layer_are_never_read(make_demo: MakeLLM) -> None:
    plain, llm = make_demo(), make_demo(**DRAFTING)
    prompts = prompts_of(llm)
    expected = [tokens for _, [tokens] in parts(plain, prompts, GREEDY)]
    assert serve_with_poisoned_logs(llm, prompts, GREEDY) == expected
    check_that_some_are_rejected(llm)


def test_requests_preempted_within_a_log_give_the_same_tokens(make_demo: MakeLLM) -> None:
    plain = make_demo(enable_prefix_caching=False)
    prompts = [prompt[:90] for prompt in prompts_of(plain)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [tokens for _, [tokens] in parts(plain, prompts, params)]
    spec = plain.engine.core.spec
    llm = make_demo(memory=(slabs_for(spec, 160) + 1) * spec.slab_bytes, max_model_len=160, **DRAFTING)
    assert [tokens for _, [tokens] in parts(llm, prompts, params)] == expected
    assert llm.engine.scheduler.num_preemptions > 0
    check_that_some_are_rejected(llm)


def test_forks_with_drafts_equal_forks_without(make_demo: MakeLLM) -> None:
    plain, llm = make_demo(), make_demo(**DRAFTING)
    prompts = prompts_of(llm)[:3]
    params = SamplingParams(n=3, seed=11, temperature=1.5, max_tokens=30, ignore_eos=True)
    for _ in range(2):  # again from snapshots
        expected = parts(plain, prompts, params)
        assert parts(llm, prompts, params) == expected
        assert any(len(set(map(tuple, outputs))) > 1 for _, outputs in expected)
    assert [hit for hit, _ in expected] == list(map(len, prompts))
    assert llm.engine.cache.stats().hit_tokens == plain.engine.cache.stats().hit_tokens > 0
    check_that_some_are_rejected(llm)


def peak_slots(llm: LLM, prompts: list[list[int]]) -> int:
    """Return the most slots that running requests hold at once."""
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), prompt, GREEDY)
    peak = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        use = llm.engine.cache.memory_use()
        peak = max(peak, use.num_slots - use.num_evictable_slots)
    return peak


def test_a_request_with_drafts_takes_two_logs_and_no_slot(make_demo: MakeLLM) -> None:
    """With adaptive depth: a log of drafts, and the log of decoded tokens that plain requests have."""
    plain, llm = make_demo(max_num_seqs=8), make_demo(max_num_seqs=8, speculative_config=SPECULATION | ADAPTIVE)
    spec, arena = llm.engine.core.spec, llm.engine.core.executor.runner.arena
    num_bytes = {
        kind: sum(log.nbytes for memory in arena.layers for log in (getattr(memory, kind) or {}).values())
        for kind in ("draft_log", "log")
    }
    num_logs = 1 + 8
    drafts = sum(tensor.num_bytes for layer in spec.layers for tensor in layer.draft_log)
    decoded = sum(tensor.num_bytes for layer in spec.layers for tensor in (layer.log.tensors if layer.log else ()))
    assert num_bytes == {"draft_log": num_logs * 3 * drafts, "log": num_logs * decoded}
    assert 0 < 3 * drafts + decoded < spec.raw_slot_bytes
    assert arena.bytes.nbytes == llm.engine.core.executor.facts.num_slabs * spec.slab_bytes
    assert spec.raw_slot_bytes == plain.engine.core.spec.raw_slot_bytes
    prompts = prompts_of(llm)
    assert 0 < peak_slots(llm, prompts) <= peak_slots(plain, prompts)
    assert llm.engine.core.stats().speculation.num_accepted_tokens > 0
