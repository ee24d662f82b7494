"""Layers with windows on a GPU, of one size and of two: the hits and answers of engines that keep whole paths."""

from pathlib import Path

import pytest

from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.test_window_blocks import TWO_SIZES, check_answers_and_hits, save


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["gemma3", f"gemma3{TWO_SIZES}", f"lfm3-odd{TWO_SIZES}"])
def test_answers_and_hits_are_those_of_whole_paths(
    family: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(family, tmp_path, monkeypatch)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
    make_llm = llm_maker(directory, monkeypatch, device="cuda", enforce_eager=enforce_eager, **settings)
    check_answers_and_hits(make_llm, monkeypatch)
