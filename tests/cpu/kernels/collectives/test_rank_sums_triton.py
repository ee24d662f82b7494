"""Ranks in processes of their own sum rows through memory that they share, as GPUs do over NVLink.

A kernel really waits here until another process has stored its words. Numbers are such that sums have no rounding
error: the interpreter cuts bfloat16 off where a GPU rounds it. The ``check_`` functions run on any device.
"""

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.operation import Operation
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered

pytest.importorskip("triton")

from strandline.kernels.collectives import rank_sums_triton
from tests.cpu.kernels.rank_processes import run_ranks

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

MAX_ROWS, MAX_WORDS = 8, 64
EPS = 1e-6
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
"""Relative: float32 adds squares in another order; the interpreter cuts bfloat16 off, twice."""

NORMS: dict[str, Operation[..., Any]] = {"rms": add_rms_norm, "zero-centred": add_rms_norm_zero_centered}

ROWS = (1, 8, 3, 1, 1, 5, 8, 2, 7, 1, 4)
"""Rows of one call after another: each row has epochs of its own."""

KINDS = ("rms", "sum", "zero-centred", "gather")


class Inputs(NamedTuple):
    x_NTE: Tensor
    residual_TE: Tensor
    weight_E: Tensor


def inputs(
    seed: int, num_ranks: int, num_rows: int, size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x_NTE = torch.randint(-16, 17, (num_ranks, num_rows, size), generator=generator) / 8
    residual_TE = torch.randint(-16, 17, (num_rows, size), generator=generator) / 8
    weight_E = torch.randn(size, generator=generator)
    return Inputs(*(x.to(device, dtype) for x in (x_NTE, residual_TE, weight_E)))


def amid_nan(x: Tensor) -> Tensor:
    """Return a tensor in the middle of a storage that is NaN before and behind."""
    wide = x.new_full((len(x) + 2, *x.shape[1:]), torch.nan)
    wide[1:-1] = x
    return wide[1:-1]


def check_amid_nan(x: Tensor) -> None:
    wide = x._base
    assert wide is not None
    assert bool(wide[0].isnan().all())
    assert bool(wide[-1].isnan().all())
    assert not bool(x.isnan().any())


def buffers(num_ranks: int, max_rows: int = MAX_ROWS, max_words: int = MAX_WORDS) -> list[Tensor]:
    shape = (2, num_ranks, max_rows, max_words)
    return [torch.zeros(shape, dtype=torch.int64).share_memory_() for _ in range(num_ranks)]


def addresses(shared: list[Tensor]) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in shared], device=shared[0].device)


def check_call(given: Inputs, kind: str, address_N: Tensor, counter_R: Tensor, rank: int, max_words: int) -> None:
    """Sum this rank's rows, with a norm or without, or gather them, and compare."""
    x_TE, residual_TE, total_TE = amid_nan(given.x_NTE[rank]), given.residual_TE, given.x_NTE.float().sum(0)
    total_TE = total_TE.to(x_TE.dtype)
    if kind == "gather":
        words_TW = x_TE.view(torch.int32)
        out_TC = rank_sums_triton.gather_rows(words_TW, Connection(rank, address_N, counter_R), max_words)
        assert torch.equal(out_TC.view(x_TE.dtype), torch.cat(list(given.x_NTE), dim=1))
        return
    if kind == "sum":
        rank_sums_triton.sum_rows(x_TE, Connection(rank, address_N, counter_R), max_words)
    else:
        norm = Norm(residual_TE, torch.empty_like(x_TE), given.weight_E, EPS, kind == "zero-centred")
        rank_sums_triton.sum_add_norm_rows(x_TE, norm, Connection(rank, address_N, counter_R), max_words)
        normed_TE = norm.normed_TE
        wanted_TE, total_TE = NORMS[kind].reference(total_TE, residual_TE.clone(), given.weight_E, EPS)
        torch.testing.assert_close(normed_TE, wanted_TE, rtol=TOLERANCES[x_TE.dtype], atol=1e-6)
    assert torch.equal(x_TE, total_TE)
    check_amid_nan(x_TE)


def run_rank(rank: int, shared: list[Tensor], size: int, dtype: torch.dtype, first_count: int) -> None:
    counter_R = torch.full((MAX_ROWS,), first_count, dtype=torch.int32)
    for index, num_rows in enumerate(ROWS):
        given = inputs(index, len(shared), num_rows, size, dtype)
        check_call(given, KINDS[index % len(KINDS)], addresses(shared), counter_R, rank, MAX_WORDS)
    for row, count in enumerate(counter_R.tolist()):
        num_calls = sum(row < num_rows for num_rows in ROWS)
        assert (count - first_count - num_calls) % rank_sums_triton.LAST_EPOCH == 0


@pytest.mark.parametrize(
    ("num_ranks", "size", "dtype", "first_count"),
    [
        (2, 128, torch.bfloat16, 0),
        pytest.param(2, 50, torch.float32, 0, marks=pytest.mark.long),
        (2, 6, torch.bfloat16, rank_sums_triton.LAST_EPOCH - 3),
        (3, 33, torch.float32, 1),
        pytest.param(3, 90, torch.bfloat16, 0, marks=pytest.mark.long),
        pytest.param(4, 33, torch.float32, 1, marks=pytest.mark.long),
    ],
)
def test_processes_sum_rows_call_after_call(num_ranks: int, size: int, dtype: torch.dtype, first_count: int) -> None:
    codes = run_ranks(run_rank, num_ranks, buffers(num_ranks), size, dtype, first_count)
    assert codes == [0] * num_ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (2, 2048), (3, 5120), (8, 258)])
def test_last_rank_finds_the_rows_of_all_others(kind: str, dtype: torch.dtype, num_ranks: int, size: int) -> None:
    check_last_rank(buffers(num_ranks, 3, 8192), kind, dtype, size)


def check_last_rank(shared: list[Tensor], kind: str, dtype: torch.dtype, size: int) -> None:
    """The others store their rows and do not wait.

    Args:
        shared: buffers of three rows.
    """
    num_ranks, max_words, device = len(shared), shared[0].shape[-1], shared[0].device
    for seed in range(3):
        given = inputs(seed, num_ranks, 2, size, dtype, device)
        counters = [torch.full((3,), seed, dtype=torch.int32, device=device) for _ in range(num_ranks)]
        for rank in range(num_ranks - 1):
            x_TE = given.x_NTE[rank].clone()
            rank_sums_triton.sum_rows(x_TE, Connection(rank, addresses(shared), counters[rank]), max_words, max_polls=0)
        check_call(given, kind, addresses(shared), counters[-1], num_ranks - 1, max_words)
        assert [counter_R.tolist() for counter_R in counters] == [[seed + 1, seed + 1, seed]] * num_ranks
    used = size * dtype.itemsize // 4
    assert not shared[-1][:, :, 2].any()
    assert not shared[-1][:, :, :2, used:].any()


def test_a_rank_may_be_one_call_ahead() -> None:
    shared = buffers(2)
    counters = [torch.zeros(MAX_ROWS, dtype=torch.int32) for _ in range(2)]
    for seed in range(0, 8, 2):
        calls = [inputs(seed + ahead, 2, 3 - ahead, 128, torch.bfloat16) for ahead in range(2)]
        for given in calls:
            x_TE = given.x_NTE[0].clone()
            rank_sums_triton.sum_rows(x_TE, Connection(0, addresses(shared), counters[0]), MAX_WORDS, max_polls=0)
        for given in calls:
            x_TE = given.x_NTE[1].clone()
            rank_sums_triton.sum_rows(x_TE, Connection(1, addresses(shared), counters[1]), MAX_WORDS, max_polls=20)
            assert torch.equal(x_TE, given.x_NTE.sum(0))


def test_a_rank_that_is_alone_gives_up_after_its_polls() -> None:
    shared = buffers(2)
    counter_R = torch.zeros(MAX_ROWS, dtype=torch.int32)
    x_TE = torch.ones(2, 8)
    rank_sums_triton.sum_rows(x_TE, Connection(0, addresses(shared), counter_R), MAX_WORDS, max_polls=20)
    assert x_TE.eq(1).all()
    assert counter_R.tolist() == [1, 1] + [0] * (MAX_ROWS - 2)
