"""GPUs sum many rows in the order of their ranks, to the bit; with the norm behind, too; in CUDA graphs and outside."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strandline.device.ranks.process_ranks import ProcessRanks
from strandline.kernels.collectives.many_row_sums import BLOCK_BYTES, MAX_SUM_BYTES
from strandline.kernels.collectives.rank_sums import bind_sum_add_norm
from strandline.kernels.expert_choices import ExpertChoices, added_up
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered
from tests.gpu.device.rank_processes import EPS, NUM_RANKS, captured, expected, rows, run_ranks, shared
from tests.gpu.device.test_few_row_sums import TOLERANCES, decoder, kernels_of

NUM_ROUNDS = 20
REPLAYS = 100
SUMS_OF_GRAPH = 8

BLOCK = BLOCK_BYTES // 4
"""Elements of a block in float32, and of half a block in bfloat16."""

SHAPES = (
    (300, 2048),
    (1, 2048),
    (8192, 2048),
    (4096, 2048),
    (7, 3),
    (257, 2048),
    (4 * BLOCK + 1,),
    (64, 2048),
    (4 * BLOCK - 1,),
    (1001, 2560),
    (2 * BLOCK + 8,),
    (8192, 1024),
    (8208, 2048),
    (9217, 2048),
    (20000, 2048),
)
"""Small messages between large ones; few rows, which another kernel sums; and the last ones, which are summed in parts
in float32 or in both dtypes."""


NORM_SHAPES = (
    (300, 2048),
    (8208, 2048),
    (1, 2048),
    (4095, 2048),
    (257, 4096),
    (20001, 2560),
    (1000, 2560),
    (2048, 5120),
    (300, 8200),
)
"""Rows and channels; the last ones are normalised by another kernel in float32, or in both dtypes."""


CHOICES = ((8208, 2048), (5, 2048), (300, 2048), (1001, 2560), (10000, 2048), (200, 8200))
"""Tokens and channels of choices; of the last ones, sums are taken in parts, or choices are added up before."""


def compare_calls(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Sums of different shapes follow each other without a wait."""
    inputs = [rows(ranks.rank, shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    wanted = [expected(x) for x in inputs]
    for _ in range(NUM_ROUNDS):
        found = [ranks.sum(x.clone()) for x in inputs]
        for x, total, other in zip(inputs, found, wanted, strict=True):
            assert torch.equal(total, other), (x.shape, dtype)


def compare_strided(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Strided tensors, and one that begins in the middle of a vector on one rank alone."""
    x = rows(ranks.rank, (2048, 600), dtype, 1)
    assert torch.equal(ranks.sum(x.T), expected(x.T.contiguous()))
    behind = torch.cat([x.flatten()[:1], x.flatten()])[1:] if ranks.rank == 0 else x.flatten().clone()
    assert torch.equal(ranks.sum(behind), expected(x).flatten())


def compare_graphs(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Graphs of different sizes are replayed many times in turn, and give the same every time."""
    graphs, firsts, kept = list[tuple[torch.cuda.CUDAGraph, Tensor]](), list[Tensor](), list[Tensor]()
    for num_rows in (4096, 300, 64, 2049, 1):
        x = rows(ranks.rank, (num_rows, 2048), dtype, num_rows)
        kept.append(x)

        def run(x: Tensor = x) -> Tensor:
            total = x.clone()
            for _ in range(SUMS_OF_GRAPH):
                total = ranks.sum(total).mul_(0.5).add_(x)
            return total

        wanted = x.clone()
        for _ in range(SUMS_OF_GRAPH):
            wanted = expected(wanted).mul_(0.5).add_(x)
        firsts.append(wanted)
        graphs.append(captured(run))
    for index in range(REPLAYS):
        for graph, found in graphs:
            if index % 20 == 0:
                found.fill_(torch.nan)
            graph.replay()
        if index % 20 == 0:
            assert all(torch.equal(found, first) for (_, found), first in zip(graphs, firsts, strict=True))
    assert all(torch.equal(found, first) for (_, found), first in zip(graphs, firsts, strict=True))


def compare_norms(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    kernels = kernels_of(ranks, dtype)
    for add_norm in (add_rms_norm, add_rms_norm_zero_centered):
        together, alone = bind_sum_add_norm(kernels, add_norm), kernels[add_norm]
        for seed, shape in enumerate(NORM_SHAPES):
            x = rows(ranks.rank, shape, dtype, seed)
            residual, weight = shared(ranks.rank, shape, dtype), shared(ranks.rank, shape[1:], dtype)
            normed, total = together(x.clone(), residual, weight, EPS)
            wanted, wanted_total = alone(expected(x), residual, weight, EPS)
            assert torch.equal(total, wanted_total), (shape, dtype)
            torch.testing.assert_close(normed, wanted, rtol=TOLERANCES[dtype], atol=1e-5)


def compare_norms_in_graphs(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    add_norm = bind_sum_add_norm(kernels_of(ranks, dtype), add_rms_norm)
    graphs, firsts, kept = list[tuple[torch.cuda.CUDAGraph, Tensor]](), list[Tensor](), list[Tensor]()
    for num_rows in (4096, 300, 64, 2049):
        x = rows(ranks.rank, (num_rows, 2048), dtype, num_rows)
        residual, weight = torch.zeros_like(x), torch.ones(2048, dtype=dtype, device=x.device)
        kept += [x, residual, weight]

        def run(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> Tensor:
            return decoder(add_norm, x.clone(), residual, weight)

        firsts.append(run().clone())
        graphs.append(captured(run))
    for _ in range(10):
        for graph, found in graphs:
            found.fill_(torch.nan)
            graph.replay()
        assert all(torch.equal(found, first) for (_, found), first in zip(graphs, firsts, strict=True))
    for _, found in graphs:
        others = [torch.empty_like(found) for _ in range(ranks.size)]
        dist.all_gather(others, found)
        assert all(torch.equal(found, other) for other in others)


def choices_of(ranks: ProcessRanks, num_tokens: int, size: int, dtype: torch.dtype) -> ExpertChoices:
    """Return random choices among 16 experts, which are divided among the ranks; rows of others' are NaN."""
    device, top_k = torch.device("cuda", torch.cuda.current_device()), 8
    generator = torch.Generator(device).manual_seed(num_tokens)
    experts_TK = torch.rand(num_tokens, 16, device=device, generator=generator).topk(top_k).indices
    held = range(16 * ranks.rank // ranks.size, 16 * (ranks.rank + 1) // ranks.size)
    out_AD = rows(ranks.rank, (num_tokens * top_k, size), dtype, num_tokens)
    out_AD[((experts_TK < held.start) | (experts_TK >= held.stop)).flatten()] = torch.nan
    weights_TK = torch.rand(num_tokens, top_k, device=device, generator=generator)
    shared_TD, gate_T1 = rows(ranks.rank, (num_tokens, size + 8), dtype, 1).split([size, 8], dim=1)
    return ExpertChoices(out_AD, weights_TK, experts_TK, shared_TD, gate_T1[:, 2:3], held, add_choices)


def compare_choices(ranks: ProcessRanks, dtype: torch.dtype) -> None:
    """Choices of experts are summed as if each rank had added up its own, to the bit."""
    add_norm = bind_sum_add_norm(kernels_of(ranks, dtype), add_rms_norm)
    for num_tokens, size in CHOICES:
        choices = choices_of(ranks, num_tokens, size, dtype)
        added = added_up(choices)
        residual, weight = torch.ones_like(added), torch.ones(size, dtype=dtype, device=added.device)
        wanted, normed = ranks.sum(added.clone()), add_norm(added.clone(), residual, weight, EPS)

        def run(choices: ExpertChoices = choices, residual: Tensor = residual, weight: Tensor = weight) -> Tensor:
            return torch.stack([ranks.sum(choices), *add_norm(choices, residual, weight, EPS)])

        graph, found = captured(run)
        for _ in range(3):
            found.fill_(torch.nan)
            graph.replay()
            assert torch.equal(found, torch.stack([wanted, *normed])), (num_tokens, size, dtype)
        assert bool(wanted.isfinite().all())


def compare(ranks: ProcessRanks) -> None:
    assert ranks.many_rows is not None
    assert 8208 * 2048 * 2 <= MAX_SUM_BYTES < 9217 * 2048 * 2
    for dtype in (torch.bfloat16, torch.float32):
        compare_calls(ranks, dtype)
        compare_strided(ranks, dtype)
        compare_graphs(ranks, dtype)
        compare_norms(ranks, dtype)
        compare_norms_in_graphs(ranks, dtype)
        compare_choices(ranks, dtype)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gpus_sum_many_rows(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(compare, num_ranks, tmp_path)
