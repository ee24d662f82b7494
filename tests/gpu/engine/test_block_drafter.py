"""Drafters with their own files on a GPU, in CUDA graphs and without: the CPU's tests."""

from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from tests.cpu.engine.conftest import MakeLLM
from tests.cpu.engine.test_block_drafter import MIXED, NUM_DRAFTS, SYNTHETIC, check_drafts, note_drafts
from tests.cpu.engine.test_exactness import answers, tokens
from tests.cpu.engine.tiny_drafter import (
    BLOCK_DRAFTERS,
    EagleReference,
    Reference,
    load_oracle,
    save_drafter,
    save_eagle,
)

PROMPTS = [tokens(count, seed=count) for count in (5, 63, 64, 65, 100, 300)]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafter"))


def drafting(make_llm: MakeLLM, drafter: Path, config: dict[str, Any], **options: Any) -> LLM:
    default = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
    return make_llm(speculative_config={**default, **config}, memory="64MiB", max_model_len=512, **options)


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("config", [{}, SYNTHETIC], ids=["standard", "synthetic"])
@pytest.mark.parametrize("kind", [*BLOCK_DRAFTERS, "eagle3"])
def test_drafts_are_those_of_the_reference(
    make_llm: MakeLLM,
    model_dir: Path,
    kind: str,
    config: dict[str, Any],
    is_eager: bool,
    tmp_path: Path,
) -> None:
    drafter, oracle = tmp_path, load_oracle(model_dir)
    if kind == "eagle3":
        reference: Reference | EagleReference = EagleReference(oracle, save_eagle(drafter))
    else:
        reference = Reference(oracle, save_drafter(drafter, **BLOCK_DRAFTERS[kind]))
    method = "dflash" if kind == "dflash2" else kind
    llm = drafting(make_llm, drafter, {"method": method, **config}, enforce_eager=is_eager)
    params = [MIXED[index % len(MIXED)] for index in range(len(PROMPTS))]
    for _ in range(2):
        # The second time, prompts are hit whole.
        drafted = note_drafts(llm)
        found = answers(llm, PROMPTS, params)
        check_drafts(reference, drafted)
        if not config:
            assert found == answers(make_llm(memory="64MiB", max_model_len=512), PROMPTS, params)


def test_adaptive_depths_give_the_tokens_of_plain_decoding(make_llm: MakeLLM, drafter: Path) -> None:
    llm = drafting(make_llm, drafter, {"adaptive": True})
    plain = make_llm(memory="64MiB", max_model_len=512)
    params = [MIXED[index % len(MIXED)] for index in range(len(PROMPTS))]
    for _ in range(3):
        assert answers(llm, PROMPTS, params) == answers(plain, PROMPTS, params)
