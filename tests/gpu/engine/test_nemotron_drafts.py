"""On a GPU the draft layer of Nemotron 3 changes no token either, and drafts what the published layer does.

Drafts are those of greatest logits in another order of summation, so that a few may differ.
"""

from pathlib import Path

import pytest

from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.test_nemotron_drafts import GREEDY, NAME, NUM_TOKENS, SPECULATION, known_answers, spy_on
from tests.cpu.models import nemotron_drafts
from tests.gpu.engine.conftest import MAX_NUM_SEQS

DEVICE = "cuda"
PROMPTS = [tokens(count, seed=count) for count in (2, 40, 63, 65, 100)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nemotron_drafts.save(NAME, tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def make(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    options = {"max_num_seqs": MAX_NUM_SEQS, "memory": "64MiB", "max_model_len": 512}
    return llm_maker(directory, monkeypatch, device=DEVICE, **options)


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_tokens_are_those_of_plain_decoding(make: MakeLLM, *, is_eager: bool, is_overlapped: bool) -> None:
    expected = [text[-NUM_TOKENS:] for text in known_answers(make, PROMPTS)]
    llm = make(speculative_config=SPECULATION, enforce_eager=is_eager, async_scheduling=is_overlapped)
    assert answers(llm, PROMPTS, GREEDY) == expected
    assert answers(llm, PROMPTS, GREEDY) == expected  # resumed from snapshots
    assert llm.engine.core.stats().speculation.num_draft_tokens > 0


@pytest.mark.parametrize("is_eager", [False, True])
def test_drafts_are_those_of_the_published_layer(make: MakeLLM, *, is_eager: bool) -> None:
    known = known_answers(make, PROMPTS)
    llm = make(speculative_config=SPECULATION, enforce_eager=is_eager, async_scheduling=False)
    spy = spy_on(llm, known, [3, 1, 2, 0])
    assert answers(llm, PROMPTS, GREEDY) == [text[-NUM_TOKENS:] for text in known]
    drafted = [(text, drafts) for text, drafts in spy.seen.items() if drafts]
    oracle = nemotron_drafts.oracle(NAME)
    are_same = [oracle.drafts(text, len(drafts)) == drafts for text, drafts in drafted]
    assert len(drafted) > 10
    assert sum(are_same) > 0.9 * len(are_same)
