"""Engines of every family with experts answer on a GPU as the reference, in every kind of format."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.models.driver import Driver, Part, Running
from tests.cpu.models.quantized import load
from tests.cpu.models.storage.test_stored_formats import FAMILIES, MAIN, save

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products in e4m3 on this GPU"
)

SPARSE = FAMILIES[FAMILIES.index("qwen3_moe") :]

MAX_ERROR = 0.02
"""``|log-probabilities - those of the reference|`` over the latter's deviations from their mean, in float32.

The reference rounds what a format rounds. Dequantised weights would be another model in FP8: a token whose experts are
nearly equal chooses another one when inputs are rounded.
"""


FEW = [tokens(4, seed=seed) for seed in range(16)]
"""Prompts whose experts are computed choice by choice."""


def log_probabilities(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Return those of the prompts' tokens, each prompt in a step of its own."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    entries = [next(iter(entry.values())) for x in outputs for entry in x.prompt_logprobs or () if entry]
    return torch.tensor([entry.logprob for entry in entries])


def reference_log_probabilities(directory: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Return those that torch's operations give on a CPU for the weights as they are stored."""
    model, values = load(directory, keeps_quantized=True), list[torch.Tensor]()
    for prompt in prompts:
        (logits_TV,), _ = Driver(model).step([Part(Running(), prompt)])
        following = torch.tensor(prompt[1:]).unsqueeze(1)
        values.append(logits_TV[:-1].float().log_softmax(-1).gather(1, following).flatten())
    return torch.cat(values)


@pytest.mark.parametrize("format", MAIN)
@pytest.mark.parametrize("name", SPARSE)
def test_log_probabilities_are_near_those_of_the_reference(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(name, format, tmp_path)[0]
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 512}
    llm = llm_maker(directory, monkeypatch, memory="32MiB", enforce_eager=True, **settings)(enable_prefix_caching=False)
    report: Any = llm.engine.core.executor.runner.model.weights_report  # type: ignore[attr-defined]
    assert len(report.stored) > 0
    for prompts in (FEW, [tokens(300)]):
        found, expected = log_probabilities(llm, prompts), reference_log_probabilities(directory, prompts)
        assert float((found - expected).norm() / (expected - expected.mean()).norm()) < MAX_ERROR
