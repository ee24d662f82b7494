"""Tokens sampled with drafts follow the model's distribution, whatever is drafted: chi-square against transformers.

``test_speculation.py`` finds that they are those of plain decoding, seed by seed. Here they are counted: behind a
prompt, what follows each first token, and what follows a draft that was accepted.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from strandline import LLM, SamplingParams
from strandline.engine.requests.request import Request
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import tokens

NUM_SEEDS = 1500
TEMPERATURE = 2.0
TOP_K = 4
"""So that few tokens follow one another, and each is counted often enough."""

MIN_EXPECTED = 5.0
"""Tokens that are expected less often are counted together."""

LEAST_P_VALUE = 1e-3
"""Seeds are fixed: a right sampler passes, or does not, once and for all."""

PROMPT = tokens(20, seed=4)


class FixedDrafter:
    """Drafts the same tokens in every step."""

    def __init__(self, drafts: tuple[int, ...]) -> None:
        self.drafts = drafts

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        del request
        return self.drafts[:max_tokens]


@pytest.fixture
def make(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(model_dir, monkeypatch, device="cpu", memory="64MiB")


def log_shares(model_dir: Path, text: list[int]) -> torch.Tensor:
    """Return the log-probability of each next token, as the sampling parameters make it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([text]), use_cache=False).logits[0, -1].double()
    is_kept = logits >= logits.topk(TOP_K).values[-1]
    return (logits / TEMPERATURE).where(is_kept, -torch.inf).log_softmax(-1)


def sampled(llm: LLM, drafts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield four tokens by each seed."""
    llm.engine.scheduler.drafts.drafter = FixedDrafter(drafts)
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=4) for seed in range(NUM_SEEDS)
    ]
    for output in llm.generate([PROMPT] * NUM_SEEDS, params, use_tqdm=False):
        yield tuple(output.outputs[0].token_ids)


def p_value(model_dir: Path, found: dict[tuple[int, ...], Counter[int]]) -> float:
    """Return how likely counts at least as far from the model's distribution are.

    Args:
        found: how often each token was sampled, by the tokens after the prompt that it followed.
    """
    statistic, degrees = 0.0, 0
    for behind, counts in found.items():
        expected = counts.total() * log_shares(model_dir, [*PROMPT, *behind]).exp()
        actual = torch.tensor([counts[token] for token in range(len(expected))], dtype=torch.float64)
        is_rare = expected < MIN_EXPECTED
        if bool((actual[expected == 0] > 0).any()):
            return 0.0
        pairs = [(actual[~is_rare], expected[~is_rare]), (actual[is_rare].sum()[None], expected[is_rare].sum()[None])]
        for observed, wanted in pairs if float(expected[is_rare].sum()) > 0 else pairs[:1]:
            statistic += float(((observed - wanted) ** 2 / wanted).sum())
            degrees += len(wanted)
        degrees -= 1
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def count(found: list[tuple[int, ...]], places: tuple[int, ...]) -> dict[tuple[int, ...], Counter[int]]:
    """Return how often tokens followed others, where these are frequent enough to tell."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for answer in found:
        for index in places:
            counts.setdefault(answer[:index], Counter())[answer[index]] += 1
    return {behind: counter for behind, counter in counts.items() if counter.total() >= 20 * MIN_EXPECTED}


def drafts_of(model_dir: Path, rank: int) -> tuple[int, int]:
    """Return drafts behind the prompt and its likeliest next token, by how many tokens are likelier than each."""
    first = int(log_shares(model_dir, PROMPT).argmax())
    second = int(log_shares(model_dir, [*PROMPT, first]).argsort(descending=True)[rank])
    third = int(log_shares(model_dir, [*PROMPT, first, second]).argsort(descending=True)[rank])
    return second, third


@pytest.mark.parametrize("rank", [1, 3])
def test_sampled_tokens_follow_the_models_distribution(make: MakeLLM, model_dir: Path, rank: int) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}
    llm = make(speculative_config=speculation)
    found = list(sampled(llm, drafts_of(model_dir, rank)))
    counts = llm.engine.core.stats().speculation
    assert all(accepted > 20 for accepted in counts.num_accepted_by_position)
    assert counts.num_rejected_tokens > NUM_SEEDS
    assert p_value(model_dir, count(found, (0, 1, 2))) > LEAST_P_VALUE


def test_drafts_accepted_by_chance_do_not_follow_it(make: MakeLLM, model_dir: Path) -> None:
    """What the test above would miss if it could not fail."""
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.3, 0.1]}
    speculation: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False, **synthetic}
    found = list(sampled(make(speculative_config=speculation), drafts_of(model_dir, 3)))
    assert p_value(model_dir, count(found, (0, 1))) < 1e-9
