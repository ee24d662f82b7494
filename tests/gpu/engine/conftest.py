"""What the engine's tests on a GPU share: the tiny model of those on a CPU, and engines around it."""

from pathlib import Path

import pytest

from tests.cpu.engine.conftest import MakeLLM, llm_maker, model_dir

__all__ = ["make_llm", "model_dir"]

MAX_NUM_SEQS = 16
"""Few, so that few steps are captured."""


@pytest.fixture
def make_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build an LLM on the tiny model, on the GPU unless said otherwise."""
    return llm_maker(model_dir, monkeypatch, device="cuda", max_num_seqs=MAX_NUM_SEQS)
