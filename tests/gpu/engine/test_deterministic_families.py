"""Deterministic engines give the same bits for every family on a GPU, from CUDA graphs and from launched kernels."""

from collections.abc import Iterator

import pytest

from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_deterministic_families import (
    CASES,
    expected,
    test_bits_depend_on_neither_batch_nor_cache,
    test_bits_do_not_depend_on_how_prompts_are_split,
)
from tests.cpu.models import families
from tests.gpu.engine.test_families import SETTINGS

__all__ = [
    "expected",
    "test_bits_depend_on_neither_batch_nor_cache",
    "test_bits_do_not_depend_on_how_prompts_are_split",
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, dtype = request.param
    return name, dtype


@pytest.fixture(scope="module")
def make_exact(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLLM]:
    directory = families.save(case[0], tmp_path_factory.mktemp("families"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield llm_maker(directory, monkeypatch, deterministic=True, dtype=case[1], memory="32MiB", **SETTINGS)
