"""What every test gets: fixed seeds, one thread, and no test of the GPU where there is none."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# Where there is no GPU, Triton's interpreter checks the kernels; it is chosen when their files are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GPU_TESTS = Path(__file__).parent / "gpu"

# The same examples on every run, so that a failure is the change's fault. `HYPOTHESIS_PROFILE=search` looks for new
# ones. No deadline: the first example of a test pays for imports, and shared machines stall.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# How many threads share a sum changes its last bits; and the tests' tensors are too small to share.
torch.set_num_threads(1)


def pytest_report_header() -> list[str]:
    """Say what the run leaves out."""
    return [] if torch.cuda.is_available() else ["tests/gpu: left out, there is no CUDA device"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave tests/gpu out where there is no GPU: its files import Triton."""
    is_gpu_test = collection_path == GPU_TESTS or GPU_TESTS in collection_path.parents
    return True if is_gpu_test and not torch.cuda.is_available() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies under tests/gpu."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
