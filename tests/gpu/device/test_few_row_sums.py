"""GPUs sum few rows in the order of their ranks, to the bit, and gather them; with the norm behind, too; in CUDA graphs
and outside."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strandline.device.ranks.process_ranks import ProcessRanks
from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.collectives.rank_sums import (
    MAX_ROW_BYTES,
    MAX_SENT_BYTES,
    MAX_SENT_ROWS,
    AddNorm,
    bind_sum_add_norm,
)
from strandline.kernels.operation import Workload
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered
from tests.gpu.device.rank_processes import EPS, NUM_RANKS, captured, expected, rows, run_ranks, shared

NUM_ROUNDS = 20
SHAPES = ((1, 2048), (3, 2048), (1, 2), (2, 90), (7, 5120), (64, 2560))
"""Rows and channels; as many rows as the kernel takes, and one more, follow."""

TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
"""Relative: one rounding to bfloat16; float32 adds squares in another order."""

NUM_LAYERS = 40
REPLAYS = 300


def max_rows(ranks: ProcessRanks) -> int:
    return MAX_SENT_ROWS // ranks.size


def shapes(ranks: ProcessRanks) -> tuple[tuple[int, int], ...]:
    return *SHAPES, (max_rows(ranks), 2048), (max_rows(ranks) + 1, 2048)


def kernels_of(ranks: ProcessRanks, dtype: torch.dtype) -> Kernels:
    workload = Workload("cuda", str(dtype).removeprefix("torch."))
    return bind_kernels([add_rms_norm, add_rms_norm_zero_centered], workload, ranks)


def compare_calls(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Sums of different shapes follow each other without a wait."""
    inputs = [rows(ranks.rank, shape, dtype, seed) for seed, shape in enumerate(shapes(ranks))]
    wanted = [expected(x) for x in inputs]
    for _ in range(NUM_ROUNDS):
        found = [ranks.sum(x.clone()) for x in inputs]
        for x, total, other in zip(inputs, found, wanted, strict=True):
            assert torch.equal(total, other), (x.shape, dtype)


def compare_gathers(ranks: ProcessRanks) -> None:
    """Between sums, whose buffers they share."""
    for num_rows in (1, 3, 64, max_rows(ranks), max_rows(ranks) + 1):
        for columns in (1, 65, 1024):
            x = torch.arange(num_rows * columns, device=f"cuda:{ranks.rank}").view(num_rows, columns)
            found = ranks.gather(x + 1_000_000_000_000 * ranks.rank)
            wanted = [x + 1_000_000_000_000 * rank for rank in range(ranks.size)]
            assert torch.equal(found, torch.cat(wanted, dim=1))
            assert bool((ranks.sum(torch.ones(num_rows, 2048, device=x.device)) == ranks.size).all())


def compare_norms(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    kernels = kernels_of(ranks, dtype)
    for add_norm in (add_rms_norm, add_rms_norm_zero_centered):
        together, alone = bind_sum_add_norm(kernels, add_norm), kernels[add_norm]
        for seed, shape in enumerate(shapes(ranks)):
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


def compare_graphs(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Graphs of different sizes are replayed many times in turn, and give the same every time."""
    device = torch.device("cuda", ranks.rank)
    add_norm = bind_sum_add_norm(kernels_of(ranks, dtype), add_rms_norm)
    graphs, firsts, kept = list[tuple[torch.cuda.CUDAGraph, Tensor]](), list[Tensor](), list[Tensor]()
    for num_rows in (1, 3, 64, max_rows(ranks), 2):
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
        others = [torch.empty_like(found) for _ in range(ranks.size)]
        dist.all_gather(others, found)
        assert all(torch.equal(found, other) for other in others)


def compare_others(ranks: ProcessRanks) -> None:
    """Strided and unaligned tensors, and what NCCL takes."""
    device = torch.device("cuda", ranks.rank)
    numbers = torch.arange(6 * 128.0, device=device)
    strided = numbers.view(128, 6).T * (ranks.rank + 1)
    assert torch.equal(ranks.sum(strided), numbers.view(128, 6).T * sum(range(1, ranks.size + 1)))
    # Only one rank's tensor is unaligned.
    halves = numbers.bfloat16()
    unaligned = torch.cat([halves[:1], halves])[1:] if ranks.rank == 0 else halves.clone()
    assert torch.equal(ranks.sum(unaligned), halves * ranks.size)
    for dtype in (torch.float16, torch.float64, torch.int64):
        assert ranks.sum(torch.full((100,), 7, dtype=dtype, device=device)).tolist() == [7 * ranks.size] * 100
    for count in (1, 3, MAX_ROW_BYTES // 2 + 2, MAX_SENT_BYTES // ranks.size):
        assert bool((ranks.sum(torch.ones(count, dtype=torch.bfloat16, device=device)) == ranks.size).all())
    assert ranks.sum(torch.ones(0, 8, device=device)).shape == (0, 8)
    assert ranks.least(ranks.rank + 5) == 5


def compare(ranks: ProcessRanks) -> None:
    assert ranks.few_rows is not None
    for dtype in (torch.bfloat16, torch.float32):
        compare_calls(ranks, dtype)
        compare_norms(ranks, dtype)
        compare_graphs(ranks, dtype)
    compare_gathers(ranks)
    compare_others(ranks)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gpus_sum_few_rows(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(compare, num_ranks, tmp_path)
