"""Processes of ranks, each on a GPU, in which tests compare what the ranks compute together."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strandline.device.ranks.process_ranks import ProcessRanks
from strandline.device.ranks.rendezvous import Rendezvous

EPS = 1e-6
MAX_WAIT_S = 400
NUM_RANKS = [
    pytest.param(count, marks=pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs"))
    for count in (2, 4)
]


def expected(x: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, in the order of the ranks, rounded once."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(x.dtype)


def rows(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(shape, generator=generator).to(f"cuda:{rank}", dtype)


def shared(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what is the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(f"cuda:{rank}", dtype)


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of a function and its result; what the function reads must stay in memory."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = function()
    return graph, found


def run_ranks(compare: Callable[[ProcessRanks], None], num_ranks: int, directory: Path) -> None:
    """Run a comparison on every rank; it must end without an error on all."""
    (directory / "ranks").mkdir()
    meeting = str(directory / "ranks" / "meeting")
    context = multiprocessing.get_context("spawn")
    members = [Rendezvous(rank, num_ranks, meeting) for rank in range(num_ranks)]
    processes = [context.Process(target=_run_rank, args=(compare, member)) for member in members]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MAX_WAIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * num_ranks


def _run_rank(compare: Callable[[ProcessRanks], None], rendezvous: Rendezvous) -> None:
    ranks = ProcessRanks(rendezvous, torch.device("cuda", rendezvous.rank))
    ranks.connect()
    with torch.inference_mode():
        compare(ranks)
    torch.cuda.synchronize()
    ranks.close()
