"""N-grams beside a draft layer take the place of its drafts where the last tokens are found once more."""

from collections.abc import Callable
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.engine.drafting import Drafter
from strandline.engine.request import Request
from strandline.env import DEBUG_CACHE
from strandline.records.events import SpeculationStats

NUM_DRAFTS = 3
LAYER = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
BOTH = {**LAYER, "prompt_lookup_min": 3, "prompt_lookup_max": 4}
COPIED = "The red house is far away. The old boat is in the city. The quiet letter is far away. " * 3
MAX_TOKENS = 24


class Spy:
    """Keeps what a drafter proposes, beside what the layer drafted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.proposed: list[tuple[Request, int, tuple[int, ...], tuple[int, ...]]] = []

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        drafts = self._drafter.propose(request, max_tokens)
        self.proposed.append((request, request.num_tokens, request.drafts[:max_tokens], drafts))
        return drafts


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any] | None], LLM]:
    monkeypatch.setenv(DEBUG_CACHE, "1")

    def make(config: dict[str, Any] | None) -> LLM:
        return LLM("demo", memory="64MiB", dtype="float32", device="cpu", speculative_config=config)

    return make


def run(llm: LLM) -> tuple[list[Any], SpeculationStats]:
    """Return answers with their hits: to a text that repeats itself, to a question, and to what follows both."""
    encode, found = llm.get_tokenizer().encode, []
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for text in (COPIED, "What is speculative decoding?"):
        prompt = list(encode(text))
        for _ in range(2):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.num_cached_tokens))
            prompt = [*prompt, *output.outputs[0].token_ids, 5]
    return found, llm.engine.core.stats().speculation


def test_tokens_and_hits_are_those_without_drafts(make: Callable[..., LLM]) -> None:
    expected, _ = run(make(None))
    with_layer, by_layer = run(make(LAYER))
    with_both, by_both = run(make(BOTH))
    assert with_layer == with_both == expected
    assert by_both != by_layer
    assert by_both.num_accepted_tokens > 0


def test_ngrams_replace_drafts_where_they_are_found(make: Callable[..., LLM]) -> None:
    llm = make(BOTH)
    drafts = llm.engine.scheduler.drafts
    assert drafts.has_layer
    spy = Spy(drafts.drafter)
    drafts.drafter = spy
    run(llm)
    num_found = 0
    for request, num_tokens, by_layer, proposed in spy.proposed:
        tokens = [*request.prompt_ids, *request.output_ids][:num_tokens]
        last = tokens[-3:]
        places = [place for place in range(num_tokens - 3) if tokens[place : place + 3] == last]
        continuations = [tuple(tokens[place + 3 : place + 3 + len(by_layer)]) for place in places]
        assert len(proposed) == len(by_layer)
        assert proposed in (by_layer, *continuations)
        num_found += proposed != by_layer
        if not any(len(tokens) == len(by_layer) for tokens in continuations):
            assert proposed == by_layer
    assert 0 < num_found < len(spy.proposed)
