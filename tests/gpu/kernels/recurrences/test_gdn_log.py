"""The Triton decode step with a log on a GPU, at odd shapes and at those of Qwen3.5."""

from dataclasses import replace
from random import Random

import pytest
import torch

from strandline.kernels.recurrences.gdn_log import LOG_TOKENS
from tests.cpu.kernels.recurrences import test_gdn_log as checks
from tests.cpu.kernels.recurrences.test_gdn_log import LENGTHS, SHAPES, Setting, Shape

GPU = Setting(device="cuda")
QWEN35 = replace(GPU, shape=Shape(16, 32, 128, 128), dtype=torch.bfloat16)


@pytest.mark.parametrize("setting", [GPU, QWEN35], ids=["small", "Qwen3.5"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_logged_decode_equals_the_recurrence_at_any_log_length(num_tokens: int, setting: Setting) -> None:
    checks.check_however_full(num_tokens, setting)
    checks.check_however_full(num_tokens, setting, logs=[8, 2, 3, 1, 5, 6, 7, 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_log_holds_for_any_ratio_and_size_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    checks.check_however_full(11, replace(GPU, shape=shape, dtype=dtype), logs=[7, 2])


@pytest.mark.parametrize("seed", range(5))
def test_sequences_that_start_end_and_fold_stay_independent(seed: int) -> None:
    checks.check_sequences_that_come_and_go(Random(seed), replace(GPU, shape=QWEN35.shape))


def test_a_shared_snapshot_is_read_and_never_written() -> None:
    checks.check_a_shared_snapshot_is_only_read(QWEN35)


@pytest.mark.parametrize("logged", [0, 3, LOG_TOKENS])
def test_state_moves_to_another_slot_when_folded(logged: int) -> None:
    checks.check_a_state_that_moves(logged, QWEN35)


def test_a_sequence_without_a_snapshot_starts_from_zeros() -> None:
    checks.check_from_zeros(QWEN35)


@pytest.mark.parametrize("logged", [0, 3, LOG_TOKENS])
def test_ended_sequence_changes_neither_state_nor_log(logged: int) -> None:
    checks.check_an_ended_sequence_changes_nothing(logged, QWEN35)


@pytest.mark.parametrize("gate", ["vanishing", "absent", "strong once"])
def test_extreme_decays_neither_overflow_nor_lose_weak_ones(gate: str) -> None:
    checks.check_extreme_decays(gate, QWEN35)


def test_state_without_a_log_is_written_every_step() -> None:
    checks.check_a_sequence_without_a_log(QWEN35)


def test_fold_follows_plan() -> None:
    checks.check_fold_follows_plan(QWEN35)


def test_nan_stays_in_its_sequence_and_its_log() -> None:
    checks.check_nan_stays_in_its_sequence(GPU)


def test_fold_adds_each_layer_its_own_log() -> None:
    checks.check_folds_of_several_layers(GPU)
