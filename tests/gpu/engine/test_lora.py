"""Adapters on a GPU: CUDA graphs of steps with adapters give the tokens of merged weights, also while slots change."""

from typing import Any

import pytest
from torch import Tensor

from strandline import LLM
from strandline.device.steps.graphs import CapturedStep
from tests.cpu.engine.test_lora import PROMPTS, MakeLLM, Models, answers, make, models
from tests.cpu.engine.tiny import greedy_tokens

__all__ = ["make", "models"]

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the slots of adapters that replayed steps have room for."""
    found: list[int] = []
    replay = CapturedStep.replay

    def noting(step: CapturedStep, *arguments: Any) -> Tensor:
        found.append(step.padded.size.num_adapters)
        return replay(step, *arguments)

    monkeypatch.setattr(CapturedStep, "replay", noting)
    return found


def check(llm: LLM, models: Models) -> None:
    """Compare answers with those of merged weights: of all adapters and of none, and of prefixes that hit."""
    prompts, requests = [PROMPTS[0]] * 4 + PROMPTS, [*models.requests, None] * 2
    for _ in range(2):
        found = answers(llm, prompts, requests)
        for index, model in enumerate([*models.merged, models.base]):
            ours = found[index::4]
            assert greedy_tokens(model, prompts[index::4], ours) == ours


@pytest.mark.parametrize("max_loras", [1, 2, 3])
@pytest.mark.parametrize("speculation", [None, SPECULATION], ids=["plain", "drafts"])
def test_graphs_give_the_tokens_of_merged_weights(
    models: Models, make: MakeLLM, replayed: list[int], max_loras: int, speculation: dict[str, Any] | None
) -> None:
    llm = make(device="cuda", dtype="float32", max_loras=max_loras, max_num_seqs=8, speculative_config=speculation)
    check(llm, models)
    assert max_loras in replayed
    replayed.clear()
    found = answers(llm, PROMPTS, [None] * len(PROMPTS))
    assert greedy_tokens(models.base, PROMPTS, found) == found
    assert {*replayed} == {0}


def test_eager_steps_give_the_tokens_of_merged_weights(models: Models, make: MakeLLM) -> None:
    check(make(device="cuda", dtype="float32", enforce_eager=True), models)


def test_deterministic_steps_give_the_tokens_of_merged_weights(models: Models, make: MakeLLM) -> None:
    check(make(device="cuda", dtype="float32", deterministic=True, max_num_seqs=8), models)
