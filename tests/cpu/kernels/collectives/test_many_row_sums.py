"""Sums of many rows take what fits in their buffers, however it lies in memory."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.collectives.many_row_sums import (
    BLOCK_BYTES,
    FLAG_BYTES,
    MAX_SUM_BYTES,
    ManyRowSums,
    buffer_shape,
    counter_shape,
    num_blocks,
)
from strandline.kernels.expert_choices import ExpertChoices, added_up
from strandline.kernels.rowwise.norm import add_rms_norm, add_rms_norm_zero_centered
from tests.cpu.kernels.collectives.test_rank_sums import EPS, of_shape


def many_row_sums(num_ranks: int) -> list[ManyRowSums]:
    pytest.importorskip("triton")
    buffers = [torch.zeros(buffer_shape(num_ranks), dtype=torch.int64) for _ in range(num_ranks)]
    address_N = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counters = [torch.zeros(counter_shape(num_ranks), dtype=torch.int32) for _ in range(num_ranks)]
    return [ManyRowSums(Connection(rank, address_N, counters[rank], buffers)) for rank in range(num_ranks)]


def small_sums(blocks: int) -> list[ManyRowSums]:
    """Return the sums of two ranks whose buffers have room for some blocks."""
    pytest.importorskip("triton")
    buffers = [torch.zeros(blocks * (BLOCK_BYTES + FLAG_BYTES) // 8, dtype=torch.int64) for _ in range(2)]
    address_N = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counters = [torch.zeros(2, blocks, dtype=torch.int32) for _ in range(2)]
    return [ManyRowSums(Connection(rank, address_N, counters[rank], buffers)) for rank in range(2)]


def test_dtype_chooses_what_is_summed() -> None:
    can_sum = many_row_sums(2)[0].can_sum
    assert can_sum(of_shape(8192, 2048))
    assert can_sum(of_shape(MAX_SUM_BYTES, dtype=torch.float32))
    assert can_sum(of_shape(3, 5, 7))
    assert can_sum(of_shape())
    assert not can_sum(of_shape(0, 2048))
    assert not can_sum(of_shape(300, 2048, dtype=torch.float16))
    assert not can_sum(of_shape(300, 2048, dtype=torch.int64))


def test_rows_of_up_to_a_block_are_normalised() -> None:
    can_add_norm = many_row_sums(2)[0].can_add_norm
    assert can_add_norm(of_shape(8192, 2048))
    assert can_add_norm(of_shape(1, 8192))
    assert can_add_norm(of_shape(100_000, 5120))
    assert can_add_norm(of_shape(1, 4096, dtype=torch.float32))
    assert not can_add_norm(of_shape(1, 8193))
    assert not can_add_norm(of_shape(1, 4097, dtype=torch.float32))
    assert not can_add_norm(of_shape(300, 2048, dtype=torch.float16))


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


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_strided_tensors_are_summed_and_normalised(is_zero_centered: bool) -> None:
    x_ET, residual_ET, weight_E = torch.arange(96.0).view(24, 4), torch.ones(24, 4), torch.randn(24)
    first, second = many_row_sums(2)
    second.sum(x_ET.T.clone(), max_polls=0)
    assert first.can_add_norm(x_ET.T)
    normed_TE, total_TE = first.add_norm(x_ET.T, residual_ET.T, weight_E, EPS, is_zero_centered=is_zero_centered)
    operation = add_rms_norm_zero_centered if is_zero_centered else add_rms_norm
    wanted_TE, _ = operation.reference(2 * x_ET.T, residual_ET.T, weight_E, EPS)
    assert torch.equal(total_TE, 2 * x_ET.T + 1)
    torch.testing.assert_close(normed_TE, wanted_TE, rtol=2e-6, atol=1e-6)


class Launches:
    """Stands for the kernels, and keeps what each launch is given."""

    def __init__(self) -> None:
        self.parts = list[tuple[Tensor, ...]]()
        self.choices = list[ExpertChoices | None]()

    def sum_elements(self, x_M: Tensor, *_: object) -> None:
        self.parts.append((x_M.clone(),))
        x_M.mul_(2)

    def sum_choices(self, choices: ExpertChoices, sum_TE: Tensor, *_: object) -> None:
        self.choices.append(choices)
        sum_TE.copy_(2 * added_up(choices))

    def sum_add_norm_rows(self, x_TE: Tensor, norm: Norm, *rest: Any) -> None:
        self.choices.append(rest[-1])
        if rest[-1] is not None:
            x_TE.copy_(added_up(rest[-1]))
        self.parts.append((x_TE.clone(), norm.residual_TE.clone()))
        x_TE.mul_(2).add_(norm.residual_TE)
        norm.normed_TE.copy_(-x_TE)


def choices_of(num_tokens: int, size: int) -> ExpertChoices:
    """Return random choices of two experts for each token, with a shared expert behind a gate."""

    def add(choices: ExpertChoices) -> Tensor:
        weighted_TKE = choices.weights_TK.unsqueeze(-1) * choices.out_AD.view(len(choices), 2, -1)
        assert choices.shared_TD is not None
        assert choices.shared_gate_T1 is not None
        return weighted_TKE.sum(1) + choices.shared_TD * choices.shared_gate_T1.sigmoid()

    experts_TK, weights_TK = torch.randint(4, (num_tokens, 2)), torch.rand(num_tokens, 2)
    shared = (torch.randn(num_tokens, size), torch.randn(num_tokens, 1))
    return ExpertChoices(torch.randn(num_tokens * 2, size), weights_TK, experts_TK, *shared, range(4), add)


@pytest.mark.parametrize("size", [1, 4096, 4 * 4096, 4 * 4096 + 1, 9 * 4096 + 7, 12 * 4096])
def test_a_large_message_is_summed_in_parts_of_one_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, launches = small_sums(blocks=4)[0], Launches()
    monkeypatch.setattr(sums, "_kernels", launches)
    x_M = torch.randn(size)
    assert torch.equal(sums.sum(x_M.clone()), 2 * x_M)
    sizes = [len(part) for (part,) in launches.parts]
    assert len(sizes) == -(-size // (4 * 4096))
    assert set(sizes[:-1]) <= {max(sizes)}
    assert max(sizes) <= 4 * 4096


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100])
def test_many_rows_are_normalised_in_parts(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, launches = small_sums(blocks=4)[0], Launches()
    monkeypatch.setattr(sums, "_kernels", launches)
    # Four rows of 1,000 channels fit in a block.
    x_TE, residual_TE = torch.randn(num_rows, 1000), torch.randn(num_rows, 1000)
    normed_TE, total_TE = sums.add_norm(x_TE.clone(), residual_TE, torch.ones(1000), EPS, is_zero_centered=False)
    assert torch.equal(total_TE, x_TE * 2 + residual_TE)
    assert torch.equal(normed_TE, -total_TE)
    assert len(launches.parts) == -(-num_rows // 16)
    assert torch.equal(torch.cat([part for part, _ in launches.parts]), x_TE)
    assert torch.equal(torch.cat([part for _, part in launches.parts]), residual_TE)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100])
def test_choices_are_summed_in_parts(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums, launches = small_sums(blocks=4)[0], Launches()
    monkeypatch.setattr(sums, "_kernels", launches)
    choices, residual_TE = choices_of(num_rows, 1000), torch.randn(num_rows, 1000)
    added_TE = added_up(choices)
    assert sums.can_sum(choices)
    torch.testing.assert_close(sums.sum(choices), 2 * added_TE)
    normed_TE, total_TE = sums.add_norm(choices, residual_TE, torch.ones(1000), EPS, is_zero_centered=False)
    torch.testing.assert_close(total_TE, added_TE * 2 + residual_TE)
    assert torch.equal(normed_TE, -total_TE)
    assert len(launches.choices) == 2 * -(-num_rows // 16)


def test_choices_of_wide_rows_are_added_up_before() -> None:
    can_sum = many_row_sums(2)[0].can_sum
    assert can_sum(choices_of(1, 4096))
    assert not can_sum(choices_of(1, 4097))
