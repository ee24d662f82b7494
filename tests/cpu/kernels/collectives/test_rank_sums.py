"""Which sums over ranks take the kernel for few rows, and which are taken one by one with the norm behind them."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.collectives.connection import Connection
from strandline.kernels.collectives.rank_sums import (
    MAX_ROW_BYTES,
    MAX_SENT_BYTES,
    MAX_SENT_ROWS,
    FewRowSums,
    bind_sum_add_norm,
    buffer_shape,
)
from strandline.kernels.expert_choices import ExpertChoices
from strandline.kernels.operation import Operation, Workload
from strandline.kernels.ranks import ONE_RANK
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered
from strandline.kernels.rowwise.quantizing import add_rms_norm_quantized
from tests.cpu.models.few_rows import CountingFewRows, CountingManyRows
from tests.cpu.models.rank_threads import RankThread, RankThreads

OPERATIONS = (add_rms_norm, add_rms_norm_zero_centered, add_rms_norm_quantized)
EPS = 1e-6


def connection(num_ranks: int, rank: int, buffers: list[Tensor]) -> Connection:
    counter_R = torch.zeros(buffer_shape(num_ranks)[2], dtype=torch.int32)
    return Connection(rank, torch.tensor([buffer.data_ptr() for buffer in buffers]), counter_R, buffers)


def few_row_sums(num_ranks: int) -> list[FewRowSums]:
    pytest.importorskip("triton")
    buffers = [torch.zeros(buffer_shape(num_ranks), dtype=torch.int64) for _ in range(num_ranks)]
    return [FewRowSums(connection(num_ranks, rank, buffers)) for rank in range(num_ranks)]


def of_shape(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor that takes no memory of its size."""
    return torch.zeros((), dtype=dtype).expand(shape)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_shape_and_dtype_choose_the_way(num_ranks: int) -> None:
    can_sum = few_row_sums(num_ranks)[0].can_sum
    max_rows, max_bytes = MAX_SENT_ROWS // num_ranks, MAX_SENT_BYTES // num_ranks
    assert can_sum(of_shape(1, 2048))
    assert can_sum(of_shape(max_rows, max_bytes // max_rows // 2))
    assert can_sum(of_shape(1, MAX_ROW_BYTES // 4, dtype=torch.float32))
    assert can_sum(of_shape(2, 3, 64))
    assert can_sum(of_shape(dtype=torch.float32))
    assert not can_sum(of_shape(max_rows + 1, 2))
    assert not can_sum(of_shape(max_rows, max_bytes // max_rows // 2 + 2))
    assert not can_sum(of_shape(1, MAX_ROW_BYTES // 2 + 2))
    assert not can_sum(of_shape(1, 3))
    assert not can_sum(of_shape(0, 2048))
    assert not can_sum(of_shape(8, dtype=torch.int64))
    assert not can_sum(of_shape(1, 2048, dtype=torch.float16))


def test_matrices_of_few_short_rows_are_gathered() -> None:
    can_gather = few_row_sums(2)[0].can_gather
    assert can_gather(of_shape(1, 1, dtype=torch.int64))
    assert can_gather(of_shape(MAX_SENT_ROWS // 2, 64, dtype=torch.int64))
    assert can_gather(of_shape(1, MAX_ROW_BYTES // 8, dtype=torch.int64))
    assert can_gather(of_shape(3, 2, dtype=torch.float16))
    assert not can_gather(of_shape(MAX_SENT_ROWS // 2 + 1, 1, dtype=torch.int64))
    assert not can_gather(of_shape(1, MAX_ROW_BYTES // 8 + 1, dtype=torch.int64))
    assert not can_gather(of_shape(128, 1025, dtype=torch.int64))
    assert not can_gather(of_shape(3, 3, dtype=torch.float16))
    assert not can_gather(of_shape(0, 8, dtype=torch.int64))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_matrices_are_gathered_side_by_side(dtype: torch.dtype) -> None:
    parts = [torch.randint(-9, 9, (6, 5), generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    *others, last = few_row_sums(3)
    for sums, part in zip(others, parts, strict=False):
        sums.gather(part.T, max_polls=0)
    assert torch.equal(last.gather(parts[2].T), torch.cat([part.T for part in parts], dim=1))


def test_buffers_have_room_for_what_is_taken() -> None:
    for num_ranks in (2, 3, 4, 8):
        parities, senders, rows, words = buffer_shape(num_ranks)
        assert (parities, senders) == (2, num_ranks)
        assert rows * words * 4 >= MAX_SENT_BYTES // num_ranks
        assert words * 4 == MAX_ROW_BYTES


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_unaligned_tensors_are_summed(dtype: torch.dtype) -> None:
    numbers = (torch.arange(96) % 16).to(dtype)
    strided, cube = numbers.view(24, 4).T, numbers.view(2, 2, 24)
    unaligned = torch.cat([numbers[:1], numbers])[1:].view(4, 24)
    first, second = few_row_sums(2)
    for x in (strided, cube, unaligned, numbers.clone()):
        assert first.can_sum(x)
        first.sum(x.clone(), max_polls=0)
        wanted = x * 2
        total = second.sum(x)
        assert torch.equal(total, wanted)
        assert total.is_contiguous()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_strided_tensors_are_summed_and_normalised(is_zero_centered: bool) -> None:
    x_ET, residual_ET, weight_E = torch.arange(96.0).view(24, 4), torch.ones(24, 4), torch.randn(24)
    first, second = few_row_sums(2)
    first.sum(x_ET.T.clone(), max_polls=0)
    normed_TE, total_TE = second.add_norm(x_ET.T, residual_ET.T, weight_E, EPS, is_zero_centered=is_zero_centered)
    operation = add_rms_norm_zero_centered if is_zero_centered else add_rms_norm
    wanted_TE, _ = operation.reference(2 * x_ET.T, residual_ET.T, weight_E, EPS)
    assert torch.equal(total_TE, 2 * x_ET.T + 1)
    torch.testing.assert_close(normed_TE, wanted_TE, rtol=2e-6, atol=1e-6)


def kernels_of(ranks: Any, *, is_deterministic: bool = False) -> Kernels:
    return bind_kernels(OPERATIONS, Workload("any", "float32", is_deterministic=is_deterministic), ranks)


def test_one_rank_runs_the_operation_itself() -> None:
    kernels = kernels_of(ONE_RANK)
    assert all(bind_sum_add_norm(kernels, operation) is kernels[operation] for operation in OPERATIONS)


Outcome = tuple[Tensor, Tensor, CountingFewRows, CountingManyRows]


def summed(
    operation: Operation[..., Any],
    max_rows: int,
    max_many: int = 0,
    *,
    is_deterministic: bool = False,
    are_choices: bool = False,
) -> list[Outcome]:
    def call(ranks: RankThread) -> Outcome:
        few, many = CountingFewRows(ranks, max_rows), CountingManyRows(ranks, max_many)
        ranks.few_rows, ranks.many_rows = few, many
        add_norm = bind_sum_add_norm(kernels_of(ranks, is_deterministic=is_deterministic), operation)
        x = choices_of(ranks.rank + 1.0) if are_choices else torch.full((4, 128), ranks.rank + 1.0)
        normed, total = add_norm(x, torch.ones(4, 128), torch.ones(128), EPS)
        return getattr(normed, "plain_TI", normed), total, few, many

    return RankThreads(2).run(call)


def choices_of(number: float) -> ExpertChoices:
    """Return two choices of each of four tokens, which are this number when added up."""
    weights_TK, experts_TK = torch.full((4, 2), 0.5), torch.zeros(4, 2, dtype=torch.long)
    out_AD = torch.full((8, 128), number)
    return ExpertChoices(out_AD, weights_TK, experts_TK, None, None, None, lambda choices: choices.out_AD[:4].clone())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize(
    "change",
    [
        partial(summed, max_rows=4),
        partial(summed, max_rows=3),
        partial(summed, max_rows=3, max_many=4),
        partial(summed, max_rows=4, is_deterministic=True),
        partial(summed, max_rows=3, max_many=4, is_deterministic=True),
        partial(summed, max_rows=4, are_choices=True),
        partial(summed, max_rows=3, max_many=4, are_choices=True),
        partial(summed, max_rows=3, are_choices=True),
        partial(summed, max_rows=3, max_many=4, are_choices=True, is_deterministic=True),
    ],
)
def test_every_way_sums_adds_and_normalises(
    operation: Operation[..., Any], change: Callable[[Operation[..., Any]], list[Outcome]]
) -> None:
    wanted, wanted_total = operation.reference(torch.full((4, 128), 3.0), torch.ones(4, 128), torch.ones(128), EPS)
    for normed, total, *_ in change(operation):
        assert torch.equal(total, wanted_total)
        assert torch.equal(normed, getattr(wanted, "plain_TI", wanted))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("max_rows", "max_many"), [(4, 4), (3, 4), (3, 3)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_few_or_many_rows_are_summed_and_normalised_together(
    operation: Operation[..., Any], max_rows: int, max_many: int, is_deterministic: bool
) -> None:
    is_together = not is_deterministic and operation is not add_rms_norm_quantized
    for _, _, few, many in summed(operation, max_rows, max_many, is_deterministic=is_deterministic):
        assert few.num_add_norms == (is_together and max_rows == 4)
        assert many.num_add_norms == (is_together and max_rows == 3 and max_many == 4)
