"""Both versions of operations on a CPU, and Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest

from strandline import env
from strandline.kernels.binding import why_unavailable
from tests.interpreter import multiply_rows_alike, prepare_interpreter

prepare_interpreter()


@pytest.fixture(scope="module", params=["torch", "numba"])
def each_version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a module's tests once with reference implementations, once with Numba versions where there are any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.NUMBA, "0" if request.param == "torch" else "1")
        if request.param == "numba" and why_unavailable("Numba", "cpu"):
            pytest.skip("Numba is not installed, or torch's threads are not GNU OpenMP's")
        yield request.param


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter add the products of every row of a tile in one order, for tests that compare bits.

    BLAS adds up some rows in another order than others; which ones depends on the CPU.
    """
    monkeypatch.setattr(np, "matmul", multiply_rows_alike)
