"""The Triton decode step of Gated DeltaNet on a GPU, at odd shapes and at those of Qwen3.5."""

import pytest
import torch

from strandline.kernels.batch import Slots
from strandline.kernels.recurrences.gdn_decode_triton import gdn_decode
from tests.cpu.kernels.recurrences.test_gdn_decode_triton import (
    DTYPES,
    Shape,
    check_batch_changes_no_bit,
    check_decode,
    check_gates,
    check_nan_stays_in_its_sequence,
    make_arena,
    make_inputs,
)

QWEN35 = Shape(16, 32, 128, 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [Shape(), Shape(1, 1, 8, 8), Shape(1, 3, 5, 7), Shape(2, 4, 24, 40), QWEN35], ids=str)
def test_decode_equals_the_recurrence_at_any_size_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    check_decode([1, 2, 0], [1, 3, 4], shape, dtype, "cuda")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_sequences", [1, 16, 33])
def test_decode_in_place_from_a_shared_slot_and_padded_rows(num_sequences: int, state_dtype: torch.dtype) -> None:
    slots = list(range(1, num_sequences + 1))
    check_decode(slots, slots, QWEN35, torch.bfloat16, "cuda", state_dtype)
    check_decode([num_sequences + 1] * num_sequences, slots, QWEN35, torch.bfloat16, "cuda", state_dtype)
    check_decode([*slots, 0, 0], [*slots, 0, 0], QWEN35, torch.bfloat16, "cuda", state_dtype)


def test_deterministic_decode_is_bitwise_independent_of_the_batch() -> None:
    check_batch_changes_no_bit(64, QWEN35, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates_neither_overflow_nor_round_away(dtype: torch.dtype) -> None:
    check_gates(dtype, "cuda")


def test_nan_in_one_sequence_stays_there() -> None:
    check_nan_stays_in_its_sequence("cuda")


def test_a_graph_replays_the_step_on_new_slots_and_inputs() -> None:
    src_N, dst_N = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    state_SHKV = make_arena(9, range(1, 9), QWEN35, "cuda")
    eager_SHKV = state_SHKV.clone()
    # Last: states and slots must be older than the launch before.
    inputs = make_inputs(4, QWEN35, torch.bfloat16, "cuda")
    gdn_decode(inputs, state_SHKV, Slots(src_N, dst_N))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_NHV = gdn_decode(inputs, state_SHKV, Slots(src_N, dst_N))
    src_N.copy_(torch.tensor([1, 2, 8, 0], device="cuda"))
    dst_N.copy_(torch.tensor([1, 3, 4, 0], device="cuda"))
    inputs.v_THV.normal_()
    graph.replay()
    expected_NHV = gdn_decode(inputs, eager_SHKV, Slots(src_N, dst_N))
    assert torch.equal(out_NHV, expected_NHV)
    assert torch.equal(state_SHKV.nan_to_num(99.0), eager_SHKV.nan_to_num(99.0))
