"""Ranks that share one GPU sum many rows: one after another, or at the same time on streams of their own.

Messages have few blocks, so that the programs of all ranks run at once: those of one that wait must leave room.
"""

import pytest
import torch

from strandline.kernels.collectives import many_row_sums_triton
from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.collectives.many_row_sums import BLOCK_BYTES
from tests.cpu.kernels.collectives import test_rank_sums_triton as few_rows
from tests.cpu.kernels.collectives.test_many_row_sums_triton import (
    ALL,
    EPS,
    KINDS,
    MAX_GROUPS,
    buffers,
    check_last_rank,
    counters,
    inputs,
    rows_of,
    size_of,
)
from tests.cpu.kernels.collectives.test_rank_sums_triton import addresses

NUM_CALLS = 200
MAX_POLLS = 1 << 22
"""A few seconds: a sum that fails does not hang."""

CALLS = ((1, 0), (ALL, 0), (3, 1), (0, 7), (5, -8), (2, 16), (ALL, -1))
"""Blocks and elements beside them."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_ranks", "call"), [(2, (ALL, 0)), (2, (3, 1)), (3, (ALL, -1)), (8, (9, 3)), (8, (7, 1))])
def test_last_rank_adds_up_its_blocks(num_ranks: int, call: tuple[int, int], dtype: torch.dtype) -> None:
    check_last_rank(buffers(num_ranks, device="cuda"), call, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_on_streams_of_their_own_wait_for_each_other(num_ranks: int, dtype: torch.dtype) -> None:
    shared, streams = buffers(num_ranks, device="cuda"), [torch.cuda.Stream() for _ in range(num_ranks)]
    counted, address_N = [counters(num_ranks, device="cuda") for _ in range(num_ranks)], addresses(shared)
    sizes = [size_of(call, num_ranks, dtype) for call in CALLS]
    calls = [inputs(seed, num_ranks, sizes[seed % len(sizes)], dtype, "cuda") for seed in range(NUM_CALLS)]
    found = [[x_NM[rank].clone() for x_NM, _ in calls] for rank in range(num_ranks)]
    # Compiled before a kernel waits for the other.
    for x_NM, _ in calls[: len(CALLS)]:
        for rank in range(num_ranks):
            many_row_sums_triton.sum_elements(
                x_NM[rank].clone(), Connection(rank, address_N, counted[rank]), BLOCK_BYTES, max_polls=0
            )
    torch.cuda.synchronize()
    for messages in zip(*found, strict=True):
        for rank, x_M in enumerate(messages):
            with torch.cuda.stream(streams[rank]):
                many_row_sums_triton.sum_elements(
                    x_M, Connection(rank, address_N, counted[rank]), BLOCK_BYTES, max_polls=MAX_POLLS
                )
    torch.cuda.synchronize()
    for totals in found:
        assert all(torch.equal(x_M, wanted_M) for x_M, (_, wanted_M) in zip(totals, calls, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2048, 2560, 4096, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_streams_of_their_own_sum_and_normalise(size: int, dtype: torch.dtype, kind: str) -> None:
    shared, streams = buffers(2, device="cuda"), [torch.cuda.Stream() for _ in range(2)]
    counted, address_N = [counters(2, device="cuda") for _ in range(2)], addresses(shared)
    max_rows = 2 * MAX_GROUPS * rows_of(size, dtype)
    calls = [few_rows.inputs(seed, 2, max_rows - seed % 7 % max_rows, size, dtype, "cuda") for seed in range(40)]
    found = [[given.x_NTE[rank].clone() for given in calls] for rank in range(2)]

    def call(x_TE: torch.Tensor, given: few_rows.Inputs, rank: int, max_polls: int) -> torch.Tensor:
        norm = Norm(given.residual_TE, torch.empty_like(x_TE), given.weight_E, EPS, kind == "zero-centred")
        connection = Connection(rank, address_N, counted[rank])
        many_row_sums_triton.sum_add_norm_rows(x_TE, norm, connection, BLOCK_BYTES, rows_of(size, dtype), max_polls)
        return norm.normed_TE

    # Compiled before a kernel waits for the other.
    for given in calls[:7]:
        for rank in range(2):
            call(given.x_NTE[rank].clone(), given, rank, 0)
    # Memory comes from the cache: an allocation could wait for a kernel that waits.
    for stream in streams:
        with torch.cuda.stream(stream):
            reserved = [torch.empty_like(given.residual_TE) for given in calls]
        del reserved
    torch.cuda.synchronize()
    normed = []
    for index, given in enumerate(calls):
        for rank in range(2):
            with torch.cuda.stream(streams[rank]):
                normed.append(call(found[rank][index], given, rank, MAX_POLLS))
    torch.cuda.synchronize()
    for index, given in enumerate(calls):
        total_TE = given.x_NTE.float().sum(0).to(dtype)
        wanted_TE, total_TE = few_rows.NORMS[kind].reference(total_TE, given.residual_TE, given.weight_E, EPS)
        for rank in range(2):
            assert torch.equal(found[rank][index], total_TE)
            tolerance = few_rows.TOLERANCES[dtype]
            torch.testing.assert_close(normed[2 * index + rank], wanted_TE, rtol=tolerance, atol=1e-5)
