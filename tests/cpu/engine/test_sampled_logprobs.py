"""Log-probabilities of sampled tokens are those that the same weights give them when they come as a prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline import LLM, SamplingParams
from tests.cpu.engine.tiny import VOCAB_SIZE, save_tiny_model

BOUNDS = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest difference: sums in another order in float32; a few units in the last of eight places of logits up to 16 in
bfloat16, where the mean is less than a tenth of it."""
PROMPT = list(range(80))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("sampled"), initializer_range=0.2)


def sampled(llm: LLM) -> list[tuple[list[int], Tensor]]:
    """Return outputs of one prompt with the log-probabilities of their tokens."""
    params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=24, logprobs=0, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return [(each.token_ids, logprobs_of(each.token_ids, each.logprobs)) for each in output.outputs]


def recomputed(llm: LLM, outputs: list[list[int]]) -> list[Tensor]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([[*PROMPT, *ids] for ids in outputs], params, use_tqdm=False)
    return [logprobs_of(ids, each.prompt_logprobs[len(PROMPT) :]) for ids, each in zip(outputs, found, strict=True)]


def logprobs_of(ids: list[int], entries: Any) -> Tensor:
    return torch.tensor([entry[token].logprob for token, entry in zip(ids, entries, strict=True)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_sampled_logprobs_are_close_to_recomputed_ones(directory: Path, dtype: str) -> None:
    with LLM(str(directory), memory="32MiB", device="cpu", dtype=dtype, skip_tokenizer_init=True) as llm:
        for _ in range(2):  # without hits, and with
            outputs = sampled(llm)
            again = recomputed(llm, [ids for ids, _ in outputs])
            difference = torch.cat([a - b for (_, a), b in zip(outputs, again, strict=True)]).abs()
            assert difference.max() < BOUNDS[dtype]
            assert difference.mean() < BOUNDS[dtype] / 10


@pytest.mark.parametrize("dtype", BOUNDS)
def test_deterministic_samples_have_the_same_bits(directory: Path, dtype: str) -> None:
    options: dict[str, Any] = {"memory": "32MiB", "device": "cpu", "dtype": dtype, "skip_tokenizer_init": True}
    with LLM(str(directory), **options, deterministic=True) as llm:
        first = sampled(llm)
        # Hits, beside other requests.
        others = [list(range(length)) for length in range(1, VOCAB_SIZE, 13)]
        params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=24, logprobs=0, ignore_eos=True)
        *_, output = llm.generate([*others, PROMPT], params, use_tqdm=False)
        assert output.num_cached_tokens > 0
        for (ids, logprobs), each in zip(first, output.outputs, strict=True):
            assert each.token_ids == ids
            assert torch.equal(logprobs_of(each.token_ids, each.logprobs), logprobs)
