"""Logs of drafts on a GPU: the CPU's tests, with steps with drafts in CUDA graphs and without.

Each step is settled before the next one is planned, so that the tests know what was accepted.
"""

from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_draft_logs import (
    demo_maker,
    test_forks_with_drafts_equal_forks_without,
    test_rejected_drafts_of_the_layer_are_never_read,
    test_requests_preempted_within_a_log_give_the_same_tokens,
)
from tests.cpu.engine.test_speculation import (
    SPECULATION,
    test_acceptance_of_requests_adds_up_to_that_of_the_engine,
    test_preempted_within_a_log_gives_the_same_tokens,
    test_rejected_drafts_are_never_read,
)
from tests.gpu.engine.conftest import MAX_NUM_SEQS

__all__ = [
    "test_acceptance_of_requests_adds_up_to_that_of_the_engine",
    "test_forks_with_drafts_equal_forks_without",
    "test_preempted_within_a_log_gives_the_same_tokens",
    "test_rejected_drafts_are_never_read",
    "test_rejected_drafts_of_the_layer_are_never_read",
    "test_requests_preempted_within_a_log_give_the_same_tokens",
]

DEVICE = "cuda"


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"device": DEVICE, "max_num_seqs": MAX_NUM_SEQS, "enforce_eager": request.param}


@pytest.fixture
def make_demo(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> MakeLLM:
    return demo_maker(monkeypatch, **settings)


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, memory="64MiB", async_scheduling=False, **settings)


@pytest.fixture
def make_speculating(make: MakeLLM) -> MakeLLM:
    def speculating(**options: Any) -> LLM:
        return make(speculative_config=SPECULATION, **options)

    return speculating
