"""The tests for GPUs are found, so that a machine with one does not stop at the first name that is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COLLECT = """
import sys

import pytest
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda device=None: (9, 0)
sys.exit(pytest.main(["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", "tests/gpu"]))
"""
"""Collects as on a machine with two Hopper GPUs."""


def test_all_files_of_gpu_tests_are_collected() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", COLLECT]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    names = {line.split("::")[0] for line in found.stdout.splitlines() if "::" in line}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").rglob("test_*.py")}
    assert names == files
