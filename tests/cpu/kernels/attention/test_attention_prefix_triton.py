"""The prefix kernel compiles with the installed version of Triton, by older and newer names of Gluon's functions."""

import os
from pathlib import Path

import pytest

from tests.cpu.server.forked import run_forked


@pytest.mark.parametrize("names", ["older", "newer"])
def test_prefix_kernel_compiles_with_each_versions_names(names: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    run = run_forked("tests.cpu.kernels.attention.compiled_prefix", names, environment=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "wgmma.mma_async" in run.stdout
    assert "cp.async.bulk.tensor" in run.stdout
