"""Two GPUs sum and gather few rows as NCCL, to the bit; with the norm behind, too; in CUDA graphs and outside.

Any order of adding two numbers gives the same bits.
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strandline.device.process_ranks import ProcessRanks, RankPlace
from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.norm import add_rms_norm, add_rms_norm_zero_centered
from strandline.kernels.operation import Workload
from strandline.kernels.rank_sums import MAX_ROW_BYTES, MAX_SENT_BYTES, MAX_SENT_ROWS, AddNorm, bind_sum_add_norm

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

NUM_RANKS = 2
MAX_WAIT_S = 400
NUM_ROUNDS = 20
EPS = 1e-6
MAX_ROWS, MAX_BYTES = MAX_SENT_ROWS // NUM_RANKS, MAX_SENT_BYTES // NUM_RANKS
SHAPES = ((1, 2048), (3, 2048), (1, 2), (2, 90), (7, 5120), (64, 2560), (MAX_ROWS, 2048), (MAX_ROWS + 1, 2048))
"""Rows and channels; the last one is left to NCCL."""

TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
"""Relative: one rounding to bfloat16; float32 adds squares in another order."""

NUM_LAYERS = 40
REPLAYS = 300


def expected(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def rows(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(shape, generator=generator).to(f"cuda:{rank}", dtype)


def shared(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what is the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(f"cuda:{rank}", dtype)


def kernels_of(ranks: ProcessRanks, dtype: torch.dtype) -> Kernels:
    workload = Workload("cuda", str(dtype).removeprefix("torch."))
    return bind_kernels([add_rms_norm, add_rms_norm_zero_centered], workload, ranks)


def compare_calls(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Sums of different shapes follow each other without a wait."""
    inputs = [rows(ranks.rank, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    wanted = [expected(x) for x in inputs]
    for _ in range(NUM_ROUNDS):
        found = [ranks.sum(x.clone()) for x in inputs]
        for x, total, other in zip(inputs, found, wanted, strict=True):
            assert torch.equal(total, other), (x.shape, dtype)


def compare_gathers(ranks: ProcessRanks) -> None:
    """Between sums, whose buffers they share."""
    for num_rows in (1, 3, 64, MAX_ROWS, MAX_ROWS + 1):
        for columns in (1, 65, 1024):
            x = torch.arange(num_rows * columns, device=f"cuda:{ranks.rank}").view(num_rows, columns)
            found = ranks.gather(x + 1_000_000_000_000 * ranks.rank)
            assert torch.equal(found, torch.cat([x, x + 1_000_000_000_000], dim=1))
            assert bool((ranks.sum(torch.ones(num_rows, 2048, device=x.device)) == 2).all())


def compare_norms(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    kernels = kernels_of(ranks, dtype)
    for add_norm in (add_rms_norm, add_rms_norm_zero_centered):
        together, alone = bind_sum_add_norm(kernels, add_norm), kernels[add_norm]
        for seed, shape in enumerate(SHAPES):
            x = rows(ranks.rank, shape, dtype, seed)
            residual, weight = shared(ranks.rank, shape, dtype), shared(ranks.rank, shape[1:], dtype)
            normed, total = together(x.clone(), residual, weight, EPS)
            wanted, wanted_total = alone(expected(x), residual, weight, EPS)
            assert torch.equal(total, wanted_total), (shape, dtype)
            torch.testing.assert_close(normed, wanted, rtol=TOLERANCES[dtype], atol=1e-5)


def decoder(add_norm: AddNorm, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Compute as layers do: each part reads the norm of the sum of what all ranks' parts before it have made."""
    for _ in range(NUM_LAYERS):
        x, residual = add_norm(x, residual, weight, EPS)
    return residual


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of a function and its result; what the function reads must stay in memory."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = function()
    return graph, found


def compare_graphs(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Graphs of different sizes are replayed many times in turn, and give the same every time."""
    device = torch.device("cuda", ranks.rank)
    add_norm = bind_sum_add_norm(kernels_of(ranks, dtype), add_rms_norm)
    graphs, firsts, kept = list[tuple[torch.cuda.CUDAGraph, Tensor]](), list[Tensor](), list[Tensor]()
    for num_rows in (1, 3, 64, MAX_ROWS, 2):
        x = rows(ranks.rank, (num_rows, 2048), dtype, num_rows)
        residual, weight = torch.zeros_like(x), torch.ones(2048, dtype=dtype, device=device)
        kept += [x, residual, weight]

        def run(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> Tensor:
            return decoder(add_norm, x.clone(), residual, weight)

        firsts.append(run().clone())
        graphs.append(captured(run))
    for index in range(REPLAYS):
        for graph, found in graphs:
            if index % 100 == 0:
                found.fill_(torch.nan)
            graph.replay()
        if index % 100 == 0:
            assert all(torch.equal(found, first) for (_, found), first in zip(graphs, firsts, strict=True))
    for (_, found), first in zip(graphs, firsts, strict=True):
        assert torch.equal(found, first)
        others = [torch.empty_like(found) for _ in range(NUM_RANKS)]
        dist.all_gather(others, found)
        assert torch.equal(*others)


def compare_others(ranks: ProcessRanks) -> None:
    """Strided and unaligned tensors, and what NCCL takes."""
    device = torch.device("cuda", ranks.rank)
    numbers = torch.arange(6 * 128.0, device=device)
    strided = numbers.view(128, 6).T * (ranks.rank + 1)
    assert torch.equal(ranks.sum(strided), numbers.view(128, 6).T * 3)
    # Only one rank's tensor is unaligned.
    halves = numbers.bfloat16()
    unaligned = torch.cat([halves[: 1 - ranks.rank], halves])[1 - ranks.rank :]
    assert torch.equal(ranks.sum(unaligned), halves * 2)
    for dtype in (torch.float16, torch.float64, torch.int64):
        assert ranks.sum(torch.full((100,), 7, dtype=dtype, device=device)).tolist() == [14] * 100
    for count in (1, 3, MAX_ROW_BYTES // 2 + 2, MAX_BYTES):
        assert bool((ranks.sum(torch.ones(count, dtype=torch.bfloat16, device=device)) == 2).all())
    assert ranks.sum(torch.ones(0, 8, device=device)).shape == (0, 8)
    assert ranks.least(ranks.rank + 5) == 5


def run_rank(place: RankPlace) -> None:
    ranks = ProcessRanks(place, torch.device("cuda", place.rank))
    assert ranks.few_rows is not None
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            compare_calls(ranks, dtype)
            compare_norms(ranks, dtype)
            compare_graphs(ranks, dtype)
        compare_gathers(ranks)
        compare_others(ranks)
    torch.cuda.synchronize()
    ranks.close()


def test_two_gpus_sum_few_rows(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    meeting = str(tmp_path / "place" / "meeting")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(RankPlace(rank, NUM_RANKS, meeting),)) for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MAX_WAIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
