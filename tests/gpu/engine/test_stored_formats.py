"""Engines of every family with experts answer on a GPU as on dequantised weights, in every kind of format."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strandline import LLM, SamplingParams
from strandline.device.dtypes import E4M3_CAPABILITY
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.models.quantized import TOLERANCE_FP8
from tests.cpu.models.storage.test_stored_formats import FAMILIES, MAIN, save

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products in e4m3 on this GPU"
)

SPARSE = FAMILIES[FAMILIES.index("qwen3_moe") :]

MAX_ERRORS = {"fp8 blocks": TOLERANCE_FP8, "compressed": 0.02, "fp4 modelopt": 0.02}
"""``|log-probabilities - those of dequantised weights|`` over the latter's deviations from their mean, in float32."""


FEW = [tokens(4, seed=seed) for seed in range(16)]
"""Prompts whose experts are computed choice by choice."""


def log_probabilities(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Return those of the prompts' tokens, each prompt in a step of its own."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    entries = [next(iter(entry.values())) for x in outputs for entry in x.prompt_logprobs or () if entry]
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("format", MAIN)
@pytest.mark.parametrize("name", SPARSE)
def test_log_probabilities_are_near_those_of_dequantised_weights(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 512}
    make = llm_maker(save(name, format, tmp_path)[0], monkeypatch, memory="32MiB", enforce_eager=True, **settings)
    kept, dequantized = make(enable_prefix_caching=False), make(enable_prefix_caching=False, dequantize=True)
    report: Any = kept.engine.core.executor.runner.model.weights_report  # type: ignore[attr-defined]
    assert len(report.kept) > 0
    for prompts in (FEW, [tokens(300)]):
        found, expected = (log_probabilities(llm, prompts) for llm in (kept, dequantized))
        assert float((found - expected).norm() / (expected - expected.mean()).norm()) < MAX_ERRORS[format]
