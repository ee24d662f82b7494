"""What every test gets: fixed seeds, one thread, and no test of the GPU where there is none.

With several workers (``-n 2 --dist loadfile``, as ``make test`` runs them) the tests of a file stay in one worker, and
so do those of files that share servers. Numba's kernels are compiled before the workers start, and not once in each.
"""

import gc
import importlib.util
import os
import random
import re
import signal
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

# Where there is no GPU, Triton's interpreter checks the kernels; it is chosen when their files are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP's threads spin before they sleep, which slows down what runs beside them on as few cores as there are workers.
# It is read when torch is loaded: by workers and by the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# OpenBLAS, with which Triton's interpreter multiplies, has threads that spin, too. NumPy reads this in workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Each HTTP client would read all certificates of the machine, which takes it 20 ms; here are none. Nothing in the tests
# asks a host that has one of theirs.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"

# The same examples on every run, so that a failure is the change's fault; `--long` draws ten times as many new ones.
# Tests that need more or fewer take a multiple of the profile's. No deadline: the first example of a test pays for
# imports, and shared machines stall.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=100)
settings.register_profile("long", database=None, deadline=None, max_examples=1000, print_blob=True)

SHARE_SERVERS = re.compile(
    r"tests/cpu/bench/test_serving_command.py|tests/cpu/server/test_(admin|anthropic|bad_bodies|cache_page"
    r"|cache_page_browser|client_tools|clients|cross_origin|data_parallel|diagnostics|docs|embeddings|fuzz"
    r"|generate|grammar_trials|host_check|http|http_process|label_reads|listener|no_token|openai|openapi|reasoning"
    r"|request_ids|response_store|responses|routed_experts|slow_clients|threads|tools|vllm_fields|weight_transfer).py"
)
"""Files whose tests ask the servers that session fixtures start; a second worker would start them again.

``tests/cpu/server/test_shared_servers.py`` compares them with what tests ask.
"""

STARTED_FIRST = ("server", "engine", "bench", "kernels", "models", "cache")
"""Folders of ``tests/cpu`` that take longest, in the order in which several workers take them up."""

# What a shell ignores for its background jobs, and nohup, children inherit; the processes that tests signal must not.
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How many threads share a sum changes its last bits; and the tests' tensors are too small to share.
torch.set_num_threads(1)


def pytest_report_header() -> list[str]:
    """Say what the run leaves out."""
    return [] if torch.cuda.is_available() else ["tests/gpu: left out, there is no CUDA device"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave tests/gpu out where there is no GPU: its files import Triton."""
    return True if is_gpu_test(collection_path) and not torch.cuda.is_available() else None


@cache
def is_gpu_test(path: Path) -> bool:
    """Whether a path is ``tests/gpu`` or below it."""
    return path == GPU_TESTS or GPU_TESTS in path.parents


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--long``."""
    parser.addoption(
        "--long",
        action="store_true",
        help="draw ten times as many examples for properties, new ones; run the cases marked long, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are drawn; compile Numba's kernels before several workers do it at the same time."""
    settings.load_profile("long" if config.getoption("long") else "fixed")
    is_worker = hasattr(config, "workerinput")
    if config.getoption("numprocesses", None) and not is_worker and importlib.util.find_spec("numba") is not None:
        from strandline.kernels.compilation import compile_kernels

        compile_kernels()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies under tests/gpu; without ``--long`` drop its cases; in a worker, start what takes longest."""
    for item in items:
        if is_gpu_test(item.path):
            item.add_marker(pytest.mark.gpu)
    if not config.getoption("long"):
        dropped = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=dropped)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn(item.path))  # the same order in all workers


@cache
def turn(path: Path) -> tuple[int, str]:
    """Return what the tests of a file are ordered by: its folder, then its name."""
    parts = path.relative_to(TESTS).parts
    ranks = {("cpu", folder): rank for rank, folder in enumerate(STARTED_FIRST)}
    return ranks.get(parts[:2], len(ranks)), str(path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported: what is loaded stays, and takes seconds to search."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Collect garbage as servers do: rarely, and not in what is loaded by now."""
    from strandline.gc_policy import freeze_gc

    freeze_gc()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, keep also the files together that share servers."""
    if config.getoption("dist") != "loadfile":
        return None
    scheduler = importlib.import_module("xdist.scheduler").LoadFileScheduling(config, log)
    scope_of = scheduler._split_scope
    scheduler._split_scope = lambda nodeid: "servers" if SHARE_SERVERS.match(nodeid) else scope_of(nodeid)
    return scheduler


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    # As `torch.manual_seed`, which formats a stack trace for each kind of device that is not there: 1 ms.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
