"""The kernels of a configuration fit into GPUs with less shared memory than those that they are measured on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.kernel_matrix import Resources, Row

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("architecture", "model", "kernel"),
    [
        ("sm_89", "qwen3.5-4b", "*_advance_kernel"),
        pytest.param("sm_89", "qwen3.5-35b-a3b", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "qwen3.5-35b-a3b-fp8", "*", marks=pytest.mark.long),
        pytest.param("sm_86", "nemotron-3-nano-30b-a3b", "*", marks=pytest.mark.long),
        pytest.param("sm_86", "qwen3.5-35b-a3b-mxfp8", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "glm-5.3-flash-cut", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "inkling-cut", "*", marks=pytest.mark.long),
        pytest.param("sm_120", "qwen4-exp-cut", "*", marks=pytest.mark.long),
    ],
)
def test_largest_tiles_fit(architecture: str, model: str, kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "tools/kernel_matrix.py", "--brief", "--processes", "1", "--gpus", architecture]
    command += ["--kernel", kernel, f"benchmarks/configs/{model}"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert f"| {architecture} | {model}" in run.stdout


@pytest.mark.parametrize(
    ("shared_kib", "stack_bytes", "problem"),
    [
        (99, 1024, ""),
        (100, 0, "102400 bytes of shared memory, 101376 are there"),
        (99, 1032, "a thread spills 1032 bytes, more than 1024"),
    ],
)
def test_kernel_beyond_a_limit_is_a_problem(shared_kib: int, stack_bytes: int, problem: str) -> None:
    row = Row("sm_89", "model", "kernel", {}, False, Resources(shared_kib * 1024, 255, stack_bytes))
    assert row.problem == problem
