"""Deterministic engines give the same bits for every family on a GPU, from CUDA graphs and from launched kernels."""

from collections.abc import Iterator

import pytest

from strandline.errors import ConfigError
from tests.cpu.engine.conftest import MakeLLM, llm_maker
from tests.cpu.engine.test_deterministic_families import (
    CASES,
    expected,
    test_bits_depend_on_neither_batch_nor_cache,
    test_bits_do_not_depend_on_how_prompts_are_split,
)
from tests.cpu.models import families
from tests.gpu.engine.test_families import SETTINGS, UNCAPTURED

__all__ = [
    "expected",
    "test_bits_depend_on_neither_batch_nor_cache",
    "test_bits_do_not_depend_on_how_prompts_are_split",
]

CAPTURED = [case for case in CASES if str(case.values[0][0]).split("-")[0] not in UNCAPTURED]


@pytest.fixture(scope="module", params=CAPTURED, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, dtype = request.param
    return name, dtype


@pytest.fixture(scope="module")
def make_exact(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLLM]:
    directory = families.save(case[0], tmp_path_factory.mktemp("families"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield llm_maker(directory, monkeypatch, deterministic=True, dtype=case[1], memory="32MiB", **SETTINGS)


@pytest.mark.parametrize("name", UNCAPTURED)
def test_families_without_batch_invariant_kernels_are_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.save(name, tmp_path_factory.mktemp("families"))
    with pytest.raises(ConfigError, match="--deterministic needs Triton kernels on a GPU: "):
        llm_maker(directory, monkeypatch, deterministic=True, memory="32MiB", **SETTINGS)()
