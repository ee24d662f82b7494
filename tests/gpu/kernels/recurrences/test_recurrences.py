"""The cases of Triton's recurrences without logs on a GPU, in float32 and bfloat16, and at the shapes of models."""

from dataclasses import replace

import pytest
import torch

from tests.cpu.kernels.recurrences import test_recurrences_triton as cases
from tests.cpu.kernels.recurrences.test_chunkwise import Kind, Prompt, decay_rates
from tests.cpu.kernels.recurrences.test_recurrences_triton import BFLOAT16_ERROR, DTYPES, KINDS

MODELS = {
    "nemotron-3-nano": replace(
        KINDS["mamba2"],
        tokens=((64, 64), (8, 128), (8, 128), (64,)),
        parameters=lambda: (decay_rates(64), torch.randn(64), torch.randn(64), (0.0, torch.inf)),
        state=(64, 128, 64),
    ),
    "kimi-linear": replace(
        KINDS["kda"],
        tokens=((32, 128), (32, 128), (32, 128), (32, 128), (32,)),
        parameters=lambda: (decay_rates(32), torch.randn(32, 128), None),
        state=(32, 128, 128),
    ),
    "minimax": replace(
        KINDS["lightning"],
        tokens=((64, 128), (64, 128), (64, 128)),
        parameters=lambda: (-torch.empty(64).uniform_(0.001, 1),),
        state=(64, 128, 128),
    ),
    "recurrent-gemma-9b": replace(
        KINDS["rglru"],
        tokens=((4096,), (4096,), (4096,), (1,)),
        parameters=lambda: (torch.randn(4096),),
        state=(4096,),
    ),
    "falcon-mamba-7b": replace(
        KINDS["mamba1"],
        tokens=((8192,), (8192,), (16,), (16,), (8192,)),
        parameters=lambda: (torch.randn(8192), torch.randn(8192), torch.empty(8192, 16).uniform_(0.001, 4).log()),
        state=(8192, 16),
    ),
}

EVERY = KINDS | MODELS


@pytest.fixture(params=EVERY)
def kind(request: pytest.FixtureRequest) -> Kind:
    return EVERY[request.param]


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_prefill_equals_torchs_at_any_length(kind: Kind, dtype: torch.dtype, limit: float) -> None:
    cases.check_lengths(kind, "cuda", dtype, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_empty_chunk_at_the_end_changes_no_bit(kind: Kind, dtype: torch.dtype) -> None:
    cases.check_empty_chunks(kind, "cuda", dtype)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_mixed_batch_treats_each_sequence_alone(kind: Kind, dtype: torch.dtype, limit: float) -> None:
    cases.check_mixed_batch(kind, "cuda", dtype, limit)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_a_thousand_tokens_with_cuts_stay_accurate(name: str, num_sequences: int) -> None:
    kind = MODELS[name]
    prompts = [Prompt(0, 1000, 0, 1, ((500, 2), (512, 3)))]
    prompts += [Prompt(500, 700, 4, 5 + i) for i in range(num_sequences - 1)]
    layer = cases.make_layer(kind, sum(p.end - p.start for p in prompts), torch.bfloat16, "cuda")
    cases.check_prefill(layer, cases.make_slots(kind, [4], "cuda"), prompts, BFLOAT16_ERROR)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_sequences_in_segments_equal_torchs(kind: Kind, dtype: torch.dtype, limit: float) -> None:
    cases.check_segments(kind, "cuda", dtype, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompt_in_steps_on_the_grid_is_bitwise_equal(kind: Kind, dtype: torch.dtype) -> None:
    cases.check_steps_on_the_grid(kind, "cuda", dtype)


@pytest.mark.parametrize("gate", cases.GATES)
@pytest.mark.parametrize("name", ["mamba2-odd", "kda-odd", "kimi-linear"])
def test_extreme_gates_neither_overflow_nor_lose_weak_ones(name: str, gate: float) -> None:
    cases.check_gate(EVERY[name], gate, "cuda")


@pytest.mark.parametrize("log2_decay", cases.LOG2_DECAYS)
@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("name", ["kda-odd", "kimi-linear"])
def test_prefill_where_decays_are_steady(name: str, log2_decay: float, dtype: torch.dtype, limit: float) -> None:
    cases.check_steady_decay(EVERY[name], log2_decay, "cuda", dtype, limit)


def test_nan_in_the_tokens_of_one_sequence_stays_there(kind: Kind) -> None:
    cases.check_nan_stays(kind, "cuda")


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_sequences", [1, 9, 33])
def test_decode_in_place_from_shared_slots_and_padded(kind: Kind, num_sequences: int, state_dtype: torch.dtype) -> None:
    slots = list(range(1, num_sequences + 1))
    cases.check_decode(kind, slots, slots, "cuda", torch.bfloat16, state_dtype)
    cases.check_decode(kind, [num_sequences + 1] * num_sequences, slots, "cuda", torch.bfloat16, state_dtype)
    cases.check_decode(kind, [*slots, 0, 0], [*slots, 0, 0], "cuda", torch.float32, state_dtype)


def test_deterministic_decode_does_not_depend_on_batch(kind: Kind) -> None:
    cases.check_batch_changes_no_bit(kind, "cuda", 40)
