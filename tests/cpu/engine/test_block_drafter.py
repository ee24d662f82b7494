"""A drafter of blocks drafts what its reference implementation does, also behind hits, and changes no token."""

from collections.abc import Callable
from pathlib import Path

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.drafting import DraftLayerDrafter
from strandline.engine.request import Request
from strandline.env import DEBUG_CACHE
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.engine.tiny_drafter import Reference, save_drafter

NUM_DRAFTS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SYNTHETIC = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4, 0.3],
}
MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def reference(model: Path, drafter: Path) -> Reference:
    return Reference(model, drafter)


@pytest.fixture
def make(model: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build LLMs on the tiny model; every step checks the cache."""
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(speculation: dict[str, object] | None = None, **options: object) -> LLM:
        default = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
        settings = {"memory": "32MiB", "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
        config = {**default, **(speculation or {})}
        return LLM(str(model), **{"speculative_config": config, **settings, **options})

    return make


class Spy(DraftLayerDrafter):
    """Notes what was drafted, by the prompt and the number of tokens before."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        drafts = super().propose(request, max_tokens)
        self.seen.setdefault(request.prompt_ids, {})[request.num_tokens] = request.drafts
        return drafts


def spy_on(llm: LLM) -> Spy:
    spy = llm.engine.scheduler.drafts.drafter = Spy()
    return spy


def check_drafts(reference: Reference, spy: Spy, prompt: list[int], answer: list[int]) -> int:
    """Compare all drafts of a request with the reference; return how often it drafted."""
    whole, seen = prompt + answer, spy.seen[tuple(prompt)]
    features = reference.features(whole)
    found = {count: list(drafts) for count, drafts in seen.items() if drafts}
    expected = {
        count: reference.drafts(features[: count - 1], whole[count - 1], len(drafts)) for count, drafts in found.items()
    }
    assert found == expected
    return len(found)


@pytest.mark.parametrize("speculation", [{}, SYNTHETIC], ids=["standard", "synthetic"])
@pytest.mark.parametrize("step_tokens", [7, 65, 4096])
def test_drafts_are_those_of_the_reference(
    make: MakeLLM, reference: Reference, speculation: dict[str, object], step_tokens: int
) -> None:
    llm = make(speculation, max_num_batched_tokens=step_tokens)
    spy = spy_on(llm)
    for count in (1, 9, 63, 64, 130):
        prompt = tokens(count, seed=count)
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert check_drafts(reference, spy, prompt, list(output.outputs[0].token_ids)) >= 3
