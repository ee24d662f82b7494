"""The number of threads of CPU operations: no more than the container may run at once.

OpenMP starts one thread for each core that the process may use. A quota of processor time (Docker's ``--cpus``,
Kubernetes' limits) does not limit cores: too many threads exhaust the quota of a period, mostly by waiting for each
other, and are then all suspended until the next period.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

QUOTAS: Final = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Where Linux says how much of every period's time a container may use: beside the period, or with it in a file of its
own; without a quota, no number or a negative one."""
PERIOD_FILE: Final = "cpu.cfs_period_us"

NUM_THREADS: Final = "OMP_NUM_THREADS"
"""The environment variable with the user's choice."""


def limit_threads(num_ranks: int = 1, num_engines: int = 1) -> str | None:
    """Take no more threads than the container's quota allows, unless the user chose; return a line for the user.

    Args:
        num_ranks: processes of each engine.
        num_engines: engines that share the cores.
    """
    num_cores, quota = torch.get_num_threads(), min(_quotas(), default=float("inf"))
    num_threads = max(1, int(min(num_cores, quota) / (num_ranks * num_engines)))
    if NUM_THREADS in os.environ or num_threads == num_cores:
        return None
    torch.set_num_threads(num_threads)
    if num_ranks > 1 or num_engines > 1:
        engines = f"{num_engines} engines" if num_engines > 1 else ""
        ranks = f"{num_ranks} ranks" if num_ranks > 1 else ""
        return f"threads: {num_threads} for each of {' of '.join(filter(None, (ranks, engines)))} on {num_cores} cores"
    return (
        f"threads: {num_threads}, since this container may use the time of {quota:.3g} of its {num_cores} cores "
        f"({NUM_THREADS}={num_cores} takes them all)"
    )


def num_cores() -> int:
    """Return how many cores this process may use at once, by its affinity and the container's quota."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def _quotas() -> Iterator[float]:
    """Yield each quota, in cores."""
    for path in QUOTAS:
        period = path.with_name(PERIOD_FILE)
        files = [file for file in (path, period) if file.is_file()]
        numbers = " ".join(file.read_text() for file in files).split()
        if len(numbers) == 2 and numbers[0].isdigit():
            yield int(numbers[0]) / int(numbers[1])


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which torch computes on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
