"""What the engine's tests share: a tiny model on disk, and engines around it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM
from strandline.cache.tiers import LoadCosts
from strandline.engine.workers import worker_link
from strandline.env import DEBUG_CACHE
from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.server.forked import fork_workers, templates

MakeLLM = Callable[..., LLM]
LOAD_TIMEOUT_S = 60.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3.5 in float32."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def llm_maker(model_dir: Path, monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> MakeLLM:
    """Build LLMs without a tokenizer; every step checks the cache and poisons freed memory.

    Loads always pay, and their limit is long: otherwise what is loaded would depend on how long a load takes on a busy
    machine.
    """
    monkeypatch.setenv(DEBUG_CACHE, "1")
    monkeypatch.setattr(LoadCosts, "gain_s", lambda *_: float("inf"))
    monkeypatch.setattr(LoadCosts, "limit_s", lambda *_: LOAD_TIMEOUT_S)

    def make(**options: Any) -> LLM:
        settings: dict[str, Any] = {"memory": "8MiB", "skip_tokenizer_init": True, **defaults}
        return LLM(str(model_dir), **{**settings, **options})

    return make


@pytest.fixture
def make_llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Build an LLM on the tiny model."""
    return llm_maker(model_dir, monkeypatch, device="cpu")


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Fork worker processes from one that has done their imports. ``test_executors.py`` starts true ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_link, "subprocess", fork_workers(templates().engines))
        yield
