"""Ranks in processes of their own sum many rows through memory that they share, as GPUs do over NVLink.

A kernel really waits here until another process has stored its blocks, and runs its programs one after another, as a
GPU does that has room for one. Numbers are such that sums have no rounding error. The ``check_`` functions run on any
device.
"""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from strandline.kernels.collectives import many_row_sums_triton, rank_sums_triton
from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.collectives.many_row_sums import BLOCK_BYTES, FLAG_BYTES
from strandline.kernels.expert_choices import ExpertChoices, added_up
from strandline.kernels.expert_choices_triton import add_choices
from strandline.kernels.ranks import add_in_order
from tests.cpu.kernels.collectives import test_rank_sums_triton as few_rows
from tests.cpu.kernels.collectives.test_rank_sums_triton import addresses, amid_nan, check_amid_nan
from tests.cpu.kernels.rank_processes import run_ranks

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

MAX_GROUPS = 3
EPS = 1e-6
KINDS = ("rms", "zero-centred")

ALL = -1
BLOCKS = ((1, 0), (0, 1), (ALL, 0), (1, 1), (2, -1), (0, 7), (ALL, -1), (3, 0), (1, -1), (2, 5), (ALL, 0), (4, 1))
"""Blocks and elements beside them of one call after another."""


def buffers(num_ranks: int, max_groups: int = MAX_GROUPS, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return buffers whose blocks are NaN and whose flags are zero."""
    num_places = 2 * (num_ranks - 1) * max_groups
    created = []
    for _ in range(num_ranks):
        buffer = torch.full((num_places * BLOCK_BYTES + num_places * FLAG_BYTES,), 0xFF, dtype=torch.uint8)
        buffer[num_places * BLOCK_BYTES :] = 0
        created.append(buffer.share_memory_() if device == "cpu" else buffer.to(device))
    return created


def flags(buffer: Tensor, num_ranks: int) -> Tensor:
    """Return the flags of a buffer: kinds, other ranks, groups."""
    num_places = len(buffer) // (BLOCK_BYTES + FLAG_BYTES)
    return buffer[num_places * BLOCK_BYTES :].view(torch.int32).view(2, num_ranks - 1, -1)


def counters(num_ranks: int, first_count: int = 0, device: torch.device | str = "cpu") -> Tensor:
    return torch.full((2, MAX_GROUPS * num_ranks), first_count, dtype=torch.int32, device=device)


def size_of(call: tuple[int, int], num_ranks: int, dtype: torch.dtype) -> int:
    blocks, elements = call
    return (MAX_GROUPS * num_ranks if blocks == ALL else blocks) * (BLOCK_BYTES // dtype.itemsize) + elements


def inputs(
    seed: int, num_ranks: int, size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the messages of all ranks, and their sum."""
    generator = torch.Generator().manual_seed(seed)
    x_NM = torch.randint(-16, 17, (num_ranks, size), generator=generator) / 8
    return x_NM.to(device, dtype), x_NM.sum(0).to(device, dtype)


def check_norm(given: few_rows.Inputs, kind: str, address_N: Tensor, counter_2B: Tensor, rank: int) -> None:
    """Sum this rank's rows, add the residual stream and normalise, and compare."""
    x_TE, residual_TE = amid_nan(given.x_NTE[rank]), amid_nan(given.residual_TE)
    normed_TE = amid_nan(torch.full_like(x_TE, torch.nan))
    norm = Norm(residual_TE, normed_TE, given.weight_E, EPS, kind == "zero-centred")
    connection, block_rows = Connection(rank, address_N, counter_2B), rows_of(x_TE.shape[1], x_TE.dtype)
    many_row_sums_triton.sum_add_norm_rows(x_TE, norm, connection, BLOCK_BYTES, block_rows)
    sum_TE = given.x_NTE.float().sum(0).to(x_TE.dtype)
    wanted_TE, total_TE = few_rows.NORMS[kind].reference(sum_TE, given.residual_TE.clone(), given.weight_E, EPS)
    torch.testing.assert_close(normed_TE, wanted_TE, rtol=few_rows.TOLERANCES[x_TE.dtype], atol=1e-6)
    assert torch.equal(x_TE, total_TE)
    assert torch.equal(residual_TE, given.residual_TE)
    check_amid_nan(x_TE)
    check_amid_nan(normed_TE)


def choices_of(rank: int, seed: int, shape: tuple[int, int], dtype: torch.dtype) -> ExpertChoices:
    """Return random choices of a rank, which holds two of its four experts; others' rows are NaN.

    Numbers are such that sums have no rounding error.
    """
    generator, (num_tokens, size), top_k = torch.Generator().manual_seed(10 * seed + rank), shape, 3

    def numbers(*shape: int) -> Tensor:
        return (torch.randint(-8, 9, shape, generator=generator) / 8).to(dtype)

    experts_TK = torch.randint(4, (num_tokens, top_k), generator=generator)
    out_AD = numbers(num_tokens * top_k, size)
    held = range(2 * (rank % 2), 2 * (rank % 2) + 2)
    out_AD[((experts_TK < held.start) | (experts_TK >= held.stop)).flatten()] = torch.nan
    weights_TK = torch.randint(3, (num_tokens, top_k), generator=generator) / 2
    shared_TD = numbers(num_tokens, 2 * size)[:, :size] if seed % 3 else None
    # A half or all of the shared expert's part.
    gate_T1 = (numbers(num_tokens, 1) > 0) * 100.0 if seed % 3 == 1 else None
    return ExpertChoices(out_AD, weights_TK, experts_TK, shared_TD, gate_T1, held, add_choices)


def check_choices(seed: int, shape: tuple[int, int], dtype: torch.dtype, connection: Connection) -> None:
    """Choices of all ranks are summed as if each rank had added up its own, to the bit, with a norm and without."""
    num_ranks, rank, size = len(connection.address_N), connection.rank, shape[1]
    blocks = (BLOCK_BYTES, rows_of(size, dtype))
    choices = [choices_of(other, seed, shape, dtype) for other in range(num_ranks)]
    total = add_in_order([added_up(of_rank) for of_rank in choices])
    sum_TE = amid_nan(torch.full(shape, torch.nan, dtype=dtype))
    many_row_sums_triton.sum_choices(choices[rank], sum_TE, connection, *blocks)
    assert torch.equal(sum_TE, total)
    check_amid_nan(sum_TE)
    residual_TE = (torch.arange(total.numel()) % 33 / 8 - 2).view(shape).to(dtype)
    weight_E, stream_TE, normed_TE = residual_TE[0].clone(), *(torch.full(shape, torch.nan, dtype=dtype) for _ in "12")
    norm = Norm(residual_TE, normed_TE, weight_E, EPS, is_zero_centered=False)
    many_row_sums_triton.sum_add_norm_rows(stream_TE, norm, connection, *blocks, choices=choices[rank])
    wanted_TE, total_TE = few_rows.NORMS["rms"].reference(total, residual_TE.clone(), weight_E, EPS)
    assert torch.equal(stream_TE, total_TE)
    torch.testing.assert_close(normed_TE, wanted_TE, rtol=few_rows.TOLERANCES[dtype], atol=1e-6)


def rows_of(size: int, dtype: torch.dtype) -> int:
    """Return how many rows of a size a block has."""
    return BLOCK_BYTES // dtype.itemsize // (1 << (size - 1).bit_length())


class Case(NamedTuple):
    num_ranks: int
    dtype: torch.dtype
    first_count: int
    depth: int
    channels: int
    num_calls: int = 5


def run_rank(rank: int, shared: list[Tensor], few: list[Tensor], case: Case) -> None:
    _, dtype, first_count, many_row_sums_triton.DEPTH, channels, num_sizes = case
    num_ranks = len(shared)
    counter_2B, counter_R = counters(num_ranks, first_count), torch.zeros(few_rows.MAX_ROWS, dtype=torch.int32)
    sizes = [size_of(call, num_ranks, dtype) for call in BLOCKS[:num_sizes]]
    block, block_rows, num_calls = BLOCK_BYTES // dtype.itemsize, rows_of(channels, dtype), [0] * len(counter_2B[0])
    for seed, size in enumerate(sizes):
        x_NM, wanted_M = inputs(seed, num_ranks, size, dtype)
        x_M = amid_nan(x_NM[rank])
        many_row_sums_triton.sum_elements(x_M, Connection(rank, addresses(shared), counter_2B), BLOCK_BYTES)
        assert torch.equal(x_M, wanted_M), size
        check_amid_nan(x_M)
        # Sums of few rows in between have buffers of their own.
        given = few_rows.inputs(seed, num_ranks, 1 + seed % 2, 64, dtype)
        few_rows.check_call(given, "sum", addresses(few), counter_R, rank, few_rows.MAX_WORDS)
        num_rows = max(1, size * block_rows // block)
        if seed % 2:
            given = few_rows.inputs(seed, num_ranks, num_rows, channels, dtype)
            check_norm(given, KINDS[seed // 2 % 2], addresses(shared), counter_2B, rank)
        else:
            check_choices(seed, (num_rows, channels), dtype, Connection(rank, addresses(shared), counter_2B))
        for index in range(MAX_GROUPS * num_ranks):
            num_calls[index] += (index * block < size) + (1 if seed % 2 else 2) * (index * block_rows < num_rows)
    assert 0 < int(counter_2B[1].min()) <= int(counter_2B.max()) <= many_row_sums_triton.LAST_EPOCH
    for index in range(MAX_GROUPS * num_ranks):
        received = int(counter_2B[1, index]) - first_count - num_calls[index]
        assert received % many_row_sums_triton.LAST_EPOCH == 0
        if index % num_ranks != rank:
            assert counter_2B[0, index] == counter_2B[1, index]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, torch.bfloat16, 0, depth=1, channels=2048),
        Case(2, torch.float32, many_row_sums_triton.LAST_EPOCH - 3, depth=128, channels=90),
        Case(3, torch.bfloat16, many_row_sums_triton.LAST_EPOCH - 2, depth=2, channels=2560, num_calls=4),
        pytest.param(Case(2, torch.bfloat16, 0, depth=1, channels=2048, num_calls=12), marks=pytest.mark.long),
        pytest.param(Case(4, torch.float32, 0, depth=1, channels=4096), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_processes_sum_messages_call_after_call(case: Case) -> None:
    num_ranks = case.num_ranks
    codes = run_ranks(run_rank, num_ranks, buffers(num_ranks), few_rows.buffers(num_ranks), case)
    assert codes == [0] * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "call", "dtype"),
    [
        *[(2, (rows, add), dtype) for rows, add in ((ALL, 0), (3, 1)) for dtype in (torch.bfloat16, torch.float32)],
        (3, (ALL, -1), torch.float32),
        pytest.param(8, (9, 3), torch.bfloat16, marks=pytest.mark.long),
        (8, (7, 1), torch.bfloat16),
    ],
)
def test_last_rank_adds_up_its_blocks(num_ranks: int, call: tuple[int, int], dtype: torch.dtype) -> None:
    check_last_rank(buffers(num_ranks), call, dtype)


def check_last_rank(shared: list[Tensor], call: tuple[int, int], dtype: torch.dtype) -> None:
    """The others store their parts and do not wait; the last one waits for these, and not for their sums."""
    num_ranks, device = len(shared), shared[0].device
    last, block = num_ranks - 1, BLOCK_BYTES // dtype.itemsize
    size = size_of(call, num_ranks, dtype)
    counted = [counters(num_ranks, device=device) for _ in range(num_ranks)]
    for seed in range(3):
        x_NM, wanted_M = inputs(seed, num_ranks, size, dtype, device)
        for rank in range(num_ranks):
            found_M = x_NM[rank].clone()
            many_row_sums_triton.sum_elements(
                found_M, Connection(rank, addresses(shared), counted[rank]), BLOCK_BYTES, max_polls=0
            )
        for start in range(last * block, size, num_ranks * block):
            owned, group = slice(start, min(start + block, size)), start // block // num_ranks
            assert torch.equal(found_M[owned], wanted_M[owned])
            for rank in range(last):
                # Kind 1, and the last of the other ranks.
                position = ((num_ranks - 1) + last - 1) * MAX_GROUPS + group
                stored = shared[rank][position * BLOCK_BYTES :].view(dtype)[: owned.stop - start]
                assert torch.equal(stored, wanted_M[owned])
                assert int(flags(shared[rank], num_ranks)[1, last - 1, group]) == seed + 1
    num_blocks = -(-size // block)
    for rank, counter_2B in enumerate(counted):
        received = [3 * (index < num_blocks) for index in range(MAX_GROUPS * num_ranks)]
        assert counter_2B[1].tolist() == received
        sent = [count * (index % num_ranks != rank) for index, count in enumerate(received)]
        assert counter_2B[0].tolist() == sent


def test_flags_are_set_for_blocks_that_exist_alone() -> None:
    shared, dtype = buffers(3), torch.bfloat16
    x_NM, _ = inputs(0, 3, size_of((4, 1), 3, dtype), dtype)
    for rank in range(3):
        many_row_sums_triton.sum_elements(
            x_NM[rank], Connection(rank, addresses(shared), counters(3)), BLOCK_BYTES, max_polls=0
        )
    # Ranks 0 and 1 have two of the five blocks, and rank 2 has one.
    assert flags(shared[0], 3).tolist() == [[[1, 1, 0], [1, 1, 0]], [[1, 1, 0], [1, 0, 0]]]
    assert flags(shared[1], 3).tolist() == [[[1, 1, 0], [1, 1, 0]], [[1, 1, 0], [1, 0, 0]]]
    assert flags(shared[2], 3).tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 1, 0], [1, 1, 0]]]


def test_a_rank_that_is_alone_gives_up_after_its_polls() -> None:
    shared, counter_2B = buffers(2), counters(2)
    x_M = torch.ones(size_of((2, 0), 2, torch.float32))
    many_row_sums_triton.sum_elements(x_M, Connection(0, addresses(shared), counter_2B), BLOCK_BYTES, max_polls=20)
    assert bool(x_M.isnan().all())
    assert counter_2B.tolist() == [[0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_sums_are_added_in_the_order_of_the_ranks() -> None:
    """With the kernel for few rows, too: the way that a tensor takes does not change its bits."""
    values = (1.0, 2.0**-24, 2.0**-24, -1.0)
    shared, few = buffers(4), few_rows.buffers(4)
    for rank, value in enumerate(values):
        many_M, few_TE = torch.full((8 * 4096,), value), torch.full((1, 8), value)
        many_row_sums_triton.sum_elements(
            many_M, Connection(rank, addresses(shared), counters(4)), BLOCK_BYTES, max_polls=0
        )
        counter_R = torch.zeros(few_rows.MAX_ROWS, dtype=torch.int32)
        rank_sums_triton.sum_rows(few_TE, Connection(rank, addresses(few), counter_R), few_rows.MAX_WORDS, max_polls=0)
    total = torch.zeros(())
    for value in values:
        total = total + value
    assert bool((few_TE == total).all())
    assert bool((many_M[3 * 4096 : 4 * 4096] == total).all())
