"""Sliding windows in the engine: memory stays bounded, what is cached is hit, and tokens are the same.

Freed memory is NaN here, so that a kernel that reads behind a window changes the tokens.
"""

from pathlib import Path

import pytest

from strandline import SamplingParams
from strandline.cache.resume import AT_SNAPSHOTS, BehindWindows
from strandline.ids import BLOCK_TOKENS
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_exactness import tokens
from tests.cpu.models import families

WINDOW_TOKENS = 70
LONG = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("recurrent_gemma-odd", tmp_path_factory.mktemp("windows"))


@pytest.fixture
def make_llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    return llm_maker(directory, monkeypatch, device="cpu")


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 65])
def test_long_answers_and_next_turns_are_those_of_kept_keys(make_llm: MakeLLM, max_num_batched_tokens: int) -> None:
    answers = []
    for more in ({}, {"host_memory": "8MiB"}):
        llm = make_llm(memory="8MiB", max_num_batched_tokens=max_num_batched_tokens, **more)
        rule = llm.engine.cache.internals().rule
        assert rule == (AT_SNAPSHOTS if more else BehindWindows(WINDOW_TOKENS))
        first = tokens(300)
        [output] = llm.generate([first], LONG, use_tqdm=False)
        num_blocks = llm.engine.cache.memory_use().num_blocks
        assert (num_blocks < 550 // BLOCK_TOKENS) == (not more)
        longer = [*first, *output.outputs[0].token_ids, *tokens(5, seed=1)]
        again = llm.generate([longer, [*first[:200], *tokens(50, seed=2)]], LONG, use_tqdm=False)
        assert again[0].num_cached_tokens == 549
        answers.append([output.outputs[0].token_ids, *(each.outputs[0].token_ids for each in again)])
    assert answers[0] == answers[1]
