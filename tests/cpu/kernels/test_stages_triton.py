"""Kernels take fewer stages where a GPU has too little shared memory."""

from typing import Any

import pytest

from strandline.errors import ConfigError

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from strandline.kernels.stages_triton import fewer_stages, staged

LIMIT = 100_000


def _kernel() -> None:
    """Stand for a kernel."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of launches on a GPU where a stage takes as many bytes as ``BLOCK`` says."""
    found = list[dict[str, Any]]()

    def run(self: Any, *, grid: tuple[int], warmup: bool, **options: Any) -> None:
        assert grid
        assert not warmup
        found.append(options)
        stages = options["num_stages"] * options.get("NUM_STAGES", 1)
        if stages * options["BLOCK"] > LIMIT:
            raise OutOfResources(stages * options["BLOCK"], LIMIT, "shared memory")

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def test_launch_takes_the_most_stages_that_fit(launched: list[dict[str, Any]]) -> None:
    kernel = staged(JITFunction(_kernel))
    for grid in ((1,), (2,)):
        kernel[grid](num_stages=4, BLOCK=45_000)
    assert [options["num_stages"] for options in launched] == [4, 3, 2, 2]
    kernel[(1,)](num_stages=4, BLOCK=25_000)
    assert launched[-1]["num_stages"] == 4


def test_launch_that_fits_in_no_stages_is_refused(launched: list[dict[str, Any]]) -> None:
    kernel = staged(JITFunction(_kernel))
    with pytest.raises(
        ConfigError, match=r"_kernel needs 120,000 of shared memory with one stage, .* has 100,000; choose"
    ):
        kernel[(1,)](num_stages=2, BLOCK=120_000)
    assert [options["num_stages"] for options in launched] == [2, 1]


def test_stages_of_one_loop_are_fewer_after_those_of_all() -> None:
    options: dict[str, Any] | None = {"NUM_STAGES": 2, "num_stages": 2, "BLOCK": 3}
    found = []
    while options is not None:
        found.append((options["num_stages"], options["NUM_STAGES"]))
        options = fewer_stages(options)
    assert found == [(2, 2), (1, 2), (1, 1)]
