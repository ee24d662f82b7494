"""Ranks that share one GPU sum and gather rows: one after another, or at the same time on streams of their own."""

import pytest
import torch

from strandline.kernels.collectives import rank_sums_triton
from strandline.kernels.collectives.connection import Connection
from tests.cpu.kernels.collectives.test_rank_sums_triton import KINDS, MAX_ROWS, addresses, check_last_rank, inputs

NUM_CALLS = 200
MAX_POLLS = 1 << 22
"""A few seconds: a sum that fails does not hang."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (2, 2048), (3, 5120), (8, 258)])
def test_last_rank_finds_the_rows_of_all_others(kind: str, dtype: torch.dtype, num_ranks: int, size: int) -> None:
    shared = [torch.zeros(2, num_ranks, 3, 8192, dtype=torch.int64, device="cuda") for _ in range(num_ranks)]
    check_last_rank(shared, kind, dtype, size)


@pytest.mark.parametrize("size", [64, 2048, 5120])
def test_ranks_on_two_streams_wait_for_each_other(size: int) -> None:
    shared = [torch.zeros(2, 2, MAX_ROWS, 4096, dtype=torch.int64, device="cuda") for _ in range(2)]
    counters = [torch.zeros(MAX_ROWS, dtype=torch.int32, device="cuda") for _ in range(2)]
    address_N, streams = addresses(shared), [torch.cuda.Stream() for _ in range(2)]
    calls = [inputs(seed, 2, 1 + seed % MAX_ROWS, size, torch.bfloat16, "cuda") for seed in range(NUM_CALLS)]
    found = [[given.x_NTE[rank].clone() for given in calls] for rank in range(2)]
    # Compiled before a kernel waits for the other.
    for rank in range(2):
        rank_sums_triton.sum_rows(
            calls[0].x_NTE[rank].clone(), Connection(rank, address_N, counters[rank]), 4096, max_polls=0
        )
    torch.cuda.synchronize()
    for totals in zip(*found, strict=True):
        for rank, x_TE in enumerate(totals):
            with torch.cuda.stream(streams[rank]):
                rank_sums_triton.sum_rows(x_TE, Connection(rank, address_N, counters[rank]), 4096, max_polls=MAX_POLLS)
    torch.cuda.synchronize()
    for rows in found:
        assert all(torch.equal(x_TE, given.x_NTE.sum(0)) for x_TE, given in zip(rows, calls, strict=True))
