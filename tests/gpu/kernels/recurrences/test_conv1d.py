"""The Triton convolution on a GPU, at odd shapes and at those of Qwen3.5."""

import pytest
import torch

from strandline.kernels.batch import Slots
from strandline.kernels.recurrences.conv1d import Activation, Convolution
from strandline.kernels.recurrences.conv1d_triton import causal_conv1d_update
from tests.cpu.kernels.recurrences.test_conv1d_triton import (
    DTYPES,
    MIXED,
    WITH_IN_PLACE,
    Prompt,
    check_nan_stays_in_its_sequence,
    check_prefill,
    check_update,
    check_updates_equal_a_prefill,
    make_arena,
    make_tokens,
)

CHANNELS = 8192


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 63, 64, 65, 1000])
def test_prefill_equals_the_torch_version_at_any_length(num_tokens: int, dtype: torch.dtype) -> None:
    wanted = sorted({1, 2, 3, num_tokens // 2, num_tokens})
    cuts = tuple((37 + p, 3 + i) for i, p in enumerate(wanted) if 0 < p <= num_tokens)
    check_prefill([Prompt(37, 37 + num_tokens, src=2, dst=1, cuts=cuts)], CHANNELS, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [8, 37, 72, CHANNELS])
def test_prefill_of_a_mixed_batch_treats_each_sequence_alone(channels: int, dtype: torch.dtype) -> None:
    check_prefill(MIXED, channels, dtype, "cuda")


@pytest.mark.parametrize("width", [2, 4, 5, 10])
def test_a_cut_may_go_to_its_own_sequences_slot(width: int) -> None:
    check_prefill(WITH_IN_PLACE, 8192, torch.bfloat16, "cuda", width)


def test_cuts_find_their_sequence_among_many() -> None:
    prompts = [Prompt(i, i + 1 + i % 5, 0, 1 + i, cuts=((i + 1 + i % 3 % (1 + i % 5), 200 + i),)) for i in range(150)]
    check_prefill(prompts, 72, torch.bfloat16, "cuda")


@pytest.mark.parametrize("width", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_width_bias_and_activation(width: int, activation: Activation, has_bias: bool) -> None:
    prompts = [Prompt(0, 5, 1, 1), Prompt(3, 7, 0, 2, cuts=((4, 3), (5, 4)))]
    check_prefill(prompts, 37, torch.float32, "cuda", width, has_bias, activation)
    check_update([1, 2, 0], [1, 3, 4], 37, torch.float32, "cuda", width, has_bias, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [8, 37, CHANNELS])
@pytest.mark.parametrize("num_sequences", [1, 16, 17, 65])
def test_update_in_place_from_a_shared_window_and_padded_rows(
    num_sequences: int, channels: int, dtype: torch.dtype
) -> None:
    slots = list(range(1, num_sequences + 1))
    check_update(slots, slots, channels, dtype, "cuda")
    check_update([num_sequences + 1] * num_sequences, slots, channels, dtype, "cuda")
    check_update([*slots, 0, 0], [*slots, 0, 0], channels, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_token_by_token_change_no_bit_of_a_prefill(dtype: torch.dtype) -> None:
    check_updates_equal_a_prefill(CHANNELS, dtype, "cuda")


def test_nan_in_one_sequence_stays_there() -> None:
    check_nan_stays_in_its_sequence("cuda")


def test_a_graph_replays_the_update_on_new_slots_and_inputs() -> None:
    x_NC, weight_CW = make_tokens(4, CHANNELS, torch.bfloat16, "cuda"), torch.randn(CHANNELS, 4, device="cuda")
    weight_CW = weight_CW.bfloat16()
    window_SRC = make_arena(9, range(1, 9), CHANNELS, torch.bfloat16, "cuda", 3)
    eager_SRC = window_SRC.clone()
    src_N, dst_N = (torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2))
    convolution, slots = Convolution(weight_CW), Slots(src_N, dst_N)
    causal_conv1d_update(x_NC, convolution, window_SRC, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_NC = causal_conv1d_update(x_NC, convolution, window_SRC, slots)
    src_N.copy_(torch.tensor([1, 2, 8, 0], device="cuda"))
    dst_N.copy_(torch.tensor([1, 3, 4, 0], device="cuda"))
    x_NC.normal_()
    graph.replay()
    expected_NC = causal_conv1d_update(x_NC, convolution, eager_SRC, slots)
    assert torch.equal(y_NC, expected_NC)
    assert torch.equal(window_SRC.nan_to_num(99.0), eager_SRC.nan_to_num(99.0))
