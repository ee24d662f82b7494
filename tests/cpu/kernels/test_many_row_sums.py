"""Sums of many rows take what fits in their buffers, however it lies in memory."""

import os

import pytest
import torch
from torch import Tensor

from strandline.kernels.many_row_sums import (
    BLOCK_BYTES,
    FLAG_BYTES,
    MAX_SUM_BYTES,
    ManyRowSums,
    buffer_shape,
    counter_shape,
    num_blocks,
)
from strandline.kernels.rank_sums import Connection
from tests.cpu.kernels.test_rank_sums import of_shape


def many_row_sums(num_ranks: int) -> list[ManyRowSums]:
    pytest.importorskip("triton")
    buffers = [torch.zeros(buffer_shape(num_ranks), dtype=torch.int64) for _ in range(num_ranks)]
    address_N = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counters = [torch.zeros(counter_shape(num_ranks), dtype=torch.int32) for _ in range(num_ranks)]
    return [ManyRowSums(Connection(rank, address_N, counters[rank], buffers)) for rank in range(num_ranks)]


def test_dtype_and_size_choose_what_is_summed() -> None:
    can_sum = many_row_sums(2)[0].can_sum
    assert can_sum(of_shape(8192, 2048))
    assert can_sum(of_shape(MAX_SUM_BYTES // 4, dtype=torch.float32))
    assert can_sum(of_shape(3, 5, 7))
    assert can_sum(of_shape())
    assert not can_sum(of_shape(8193, 2048))
    assert not can_sum(of_shape(MAX_SUM_BYTES // 4 + 1, dtype=torch.float32))
    assert not can_sum(of_shape(0, 2048))
    assert not can_sum(of_shape(300, 2048, dtype=torch.float16))
    assert not can_sum(of_shape(300, 2048, dtype=torch.int64))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
def test_buffers_have_room_for_the_largest_message(num_ranks: int) -> None:
    blocks = num_blocks(num_ranks)
    assert blocks * BLOCK_BYTES >= MAX_SUM_BYTES
    assert blocks % num_ranks == 0
    assert counter_shape(num_ranks) == (2, blocks)
    (words,) = buffer_shape(num_ranks)
    needed = 2 * (num_ranks - 1) * (blocks // num_ranks) * (BLOCK_BYTES + FLAG_BYTES)
    assert needed <= words * 8 < needed + 8


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_unaligned_tensors_are_summed(dtype: torch.dtype) -> None:
    numbers = (torch.arange(96) % 16).to(dtype)
    strided, cube = numbers.view(24, 4).T, numbers.view(2, 2, 24)
    unaligned = torch.cat([numbers[:1], numbers])[1:].view(4, 24)
    for x in (strided, cube, unaligned, numbers, numbers[:1], numbers[0]):
        sums = many_row_sums(2)
        wanted: Tensor = x * 2
        # The first rank owns the only block: it finds the other's part.
        sums[1].sum(x.clone(), max_polls=0)
        total = sums[0].sum(x.clone())
        assert torch.equal(total, wanted)
        assert total.is_contiguous()
