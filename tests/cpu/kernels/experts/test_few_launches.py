"""Launches for experts of few tokens: no thread holds more numbers than where they were measured."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline.kernels.experts.few_launches import FEW_INPUTS, MAX_WARPS, WIDE_FACTOR, choose_few
from strandline.kernels.experts.moe import RELU_SQUARED, ExpertWeights, SharedExpert
from strandline.kernels.gemm.formats.coded import CodedFormat
from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, ScaledWeight
from strandline.kernels.sizes import next_power_of_2
from tests.cpu.kernels.gemm.formats import ALL_FORMATS

FEW = {format: few for format in ALL_FORMATS if (few := format.launches.few_experts)}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def down_of(format: Format, size: int) -> Any:
    """Return weights whose shape alone counts."""
    if isinstance(format, CodedFormat):
        return CodedWeight(format, meta(2, 8, size * format.bits // 32), meta(2, 8, size // 32), size, 32)
    return ScaledWeight(meta(2, 8, size), meta(2, 1, 1))


def inputs_of_thread(format: Format, num_tokens: int, top_k: int, size: int, shared_size: int) -> tuple[float, Any]:
    experts = ExpertWeights(down_of(format, size), down_of(format, size), RELU_SQUARED)
    shared = SharedExpert(meta(num_tokens, shared_size), DenseWeight(meta(8, shared_size)))
    launches = choose_few(experts, shared, num_tokens, top_k)
    assert launches is not None
    down = launches[1]
    inputs = max(next_power_of_2(top_k) * next_power_of_2(size), next_power_of_2(shared_size))
    return inputs * down.block_n / down.warps, down


@given(
    st.sampled_from(list(FEW)),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 64).map(lambda x: 128 * x),
    st.integers(1, 32).map(lambda x: 128 * x),
)
def test_threads_hold_no_more_than_measured(
    format: Format, num_tokens: int, top_k: int, size: int, shared_size: int
) -> None:
    found, down = inputs_of_thread(format, num_tokens, top_k, size, shared_size)
    measured, most_inputs = FEW[format][num_tokens > 1][1], FEW_INPUTS
    wide = format.launches.few_experts_wide
    if found * down.warps / down.block_n > FEW_INPUTS and wide is not None:
        measured, most_inputs = wide, WIDE_FACTOR * FEW_INPUTS
    assert found <= most_inputs * measured.block_n / measured.warps or (down.block_n, down.warps) == (1, MAX_WARPS)
    assert down.block_n <= measured.block_n


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("format", FEW)
def test_measured_sizes_have_the_measured_launches(format: Format, num_tokens: int) -> None:
    assert inputs_of_thread(format, num_tokens, 8, 512, 512)[1] == FEW[format][num_tokens > 1][1]


@pytest.mark.parametrize(("num_tokens", "channels", "blocks"), [(3, 2048, 4), (3, 4096, 1), (2, 2048, 1), (4, 2048, 1)])
def test_three_tokens_take_tiles_in_turn_if_all_programs_fit(num_tokens: int, channels: int, blocks: int) -> None:
    down = ScaledWeight(meta(2, channels, 512), meta(2, 1, 1))
    launches = choose_few(ExpertWeights(down, down, RELU_SQUARED), None, num_tokens, 8)
    assert launches is not None
    assert launches[1].blocks == blocks
