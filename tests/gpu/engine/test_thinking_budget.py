"""Budgets of reasoning on a GPU: with CUDA graphs, overlapped steps and drafts, tokens are those of single steps."""

from dataclasses import replace
from typing import Any

import pytest

from strandline import LLM
from tests.cpu.engine.test_thinking_budget import CONFIG, MAX_NUM_SEQS, Answers, Request, serve, some_requests

VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False}},
    "more drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}},
}


def load(**options: Any) -> LLM:
    settings: dict[str, Any] = {"memory": "64MiB", "dtype": "float32", "max_num_seqs": MAX_NUM_SEQS}
    return LLM("demo", **{"device": "cuda", **settings, "reasoning_config": CONFIG, **options})


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy ones: where many draws lie next to each other, rounding decides."""
    return [(prompt, replace(params, temperature=0.0)) for prompt, params in some_requests(load(device="cpu"), 1)]


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> Answers:
    return serve(load(enforce_eager=True, async_scheduling=False), requests, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_budgets_end_between_graphs(name: str, requests: list[Request], expected: Answers) -> None:
    llm = load(**VARIANTS[name])
    assert serve(llm, requests, 1) == expected
    if "speculative_config" in VARIANTS[name]:
        assert llm.engine.core.stats().speculation.num_accepted_tokens > 0
