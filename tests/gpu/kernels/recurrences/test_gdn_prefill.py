"""The cases of Triton's Gated DeltaNet prefill on a GPU, in float32 and bfloat16, and at the real shape."""

import pytest
import torch

from tests.cpu.kernels.recurrences import test_gdn_prefill_triton as cases
from tests.cpu.kernels.recurrences.test_gdn_prefill_triton import REAL, Prompt, Shape

DTYPES = [
    pytest.param(torch.float32, cases.FLOAT32_ERROR, id="float32"),
    pytest.param(torch.bfloat16, cases.BFLOAT16_ERROR, id="bfloat16"),
]


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [Shape(), REAL], ids=str)
def test_outputs_and_states_are_torchs_at_any_length(shape: Shape, dtype: torch.dtype, limit: float) -> None:
    cases.check_lengths(shape, "cuda", dtype, limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40), REAL], ids=str)
def test_a_mixed_batch_treats_each_sequence_alone(shape: Shape, dtype: torch.dtype, limit: float) -> None:
    cases.check_mixed_batch(shape, "cuda", dtype, limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40), REAL], ids=str)
@pytest.mark.parametrize("num_sequences", [1, 7, 20])
def test_few_tokens_per_sequence_are_torchs(num_sequences: int, shape: Shape, dtype: torch.dtype, limit: float) -> None:
    cases.check_verification(num_sequences, shape, "cuda", dtype, limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_thousand_tokens_with_cuts_stay_accurate(dtype: torch.dtype, limit: float) -> None:
    layer = cases.make_layer(3000, REAL, dtype, "cuda")
    prompts = [Prompt(0, 2000, 0, 1, ((1000, 2), (1024, 3))), Prompt(500, 1500, 4, 5, ((1499, 6),))]
    cases.check(layer, cases.make_arena([4], REAL, "cuda"), prompts, limit)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [Shape(), Shape(1, 3, 5, 7), Shape(2, 2, 24, 40), Shape(2, 4, 128, 128)], ids=str)
@pytest.mark.parametrize("max_segments", [2, 3, 7])
def test_sequences_in_segments_are_torchs(
    max_segments: int, shape: Shape, dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.check_segments(shape, "cuda", dtype, limit, monkeypatch, max_segments, num_chunks=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_steps_are_divided_as_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.check_padded_segments("cuda", dtype, monkeypatch)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [REAL, Shape(8, 16, 128, 128), Shape(4, 8, 128, 128)], ids=str)
def test_a_long_prompt_stays_accurate(shape: Shape, dtype: torch.dtype, limit: float) -> None:
    layer = cases.make_layer(4500, shape, dtype, "cuda")
    layer.A_log_H[::2] = -9.0
    prompts = [Prompt(0, 4400, 0, 1, ((1000, 2), (1024, 3), (4399, 4))), Prompt(500, 600, 5, 5)]
    cases.check(layer, cases.make_arena([5], shape, "cuda"), prompts, limit)


@pytest.mark.parametrize("gate", cases.GATES)
def test_extreme_gates_neither_overflow_nor_lose_the_weak_ones(gate: str) -> None:
    cases.check_gates(gate, "cuda")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_repeated_keys_written_at_full_strength_stay_accurate(dtype: torch.dtype, limit: float) -> None:
    cases.check_repeated_keys("cuda", dtype, limit)


def test_nan_in_the_tokens_of_one_sequence_stays_there() -> None:
    cases.check_nan_stays("cuda")
