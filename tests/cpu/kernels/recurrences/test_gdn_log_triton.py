"""The Triton versions of decode with a log, in Triton's interpreter, against the per-token recurrence."""

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from random import Random

import pytest
import torch

from tests.cpu.kernels.recurrences import test_gdn_log as checks
from tests.cpu.kernels.recurrences.test_gdn_log import LOG_TOKENS, Setting, Shape

pytest.importorskip("triton")

from strandline.kernels.recurrences import gdn_log_triton
from strandline.kernels.recurrences.gdn_decode_triton import gdn_decode_logged
from strandline.kernels.recurrences.gdn_log_triton import gdn_fold

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter"),
    # NumPy, which the interpreter runs on, says so where a GPU is silent; the results are what the tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

TRITON = Setting(gdn_decode_logged, gdn_fold, shape=Shape(1, 2, 8, 24))

MAX_PROGRAMS = 65_535
"""The limit of CUDA, in every dimension of a launch but the first."""


def test_decode_with_log_of_any_length_equals_recurrence() -> None:
    for num_tokens in (1, LOG_TOKENS, 2 * LOG_TOKENS + 3):
        checks.check_however_full(num_tokens, TRITON, logs=[4])


@pytest.mark.parametrize("shape", [Shape(1, 3, 8, 20), Shape(1, 1, 128, 16), Shape(1, 2, 5, 7)], ids=str)
def test_a_log_holds_for_any_ratio_and_size_of_heads(shape: Shape) -> None:
    checks.check_however_full(LOG_TOKENS + 2, replace(TRITON, shape=shape, dtype=torch.bfloat16), logs=[7])


def test_batches_that_fill_the_device_take_larger_tiles() -> None:
    setting = replace(TRITON, shape=Shape(1, 1, 8, 40))
    checks.check_however_full(2, setting, logs=[1, 2, 3, 4, 5, 6])


def test_sequences_with_independent_lifetimes_do_not_interact() -> None:
    checks.check_sequences_that_come_and_go(Random(0), TRITON, num_steps=10)


def test_negative_eigenvalues_with_a_log_equal_the_recurrence() -> None:
    checks.check_however_full(LOG_TOKENS + 3, replace(TRITON, max_beta=2), logs=[4])


def test_a_shared_snapshot_is_read_and_never_written() -> None:
    checks.check_a_shared_snapshot_is_only_read(TRITON)


@pytest.mark.parametrize("logged", [0, 3])
def test_state_moves_to_another_slot_after_log_fold(logged: int) -> None:
    checks.check_a_state_that_moves(logged, TRITON)


def test_a_sequence_without_a_snapshot_starts_from_zeros() -> None:
    checks.check_from_zeros(TRITON)


@pytest.mark.parametrize("logged", [3, LOG_TOKENS])
def test_ended_sequence_changes_neither_state_nor_log(logged: int) -> None:
    checks.check_an_ended_sequence_changes_nothing(logged, TRITON)


@pytest.mark.parametrize("gate", ["vanishing", "strong once"])
def test_extreme_decays_in_log_neither_overflow_nor_lose_weak_ones(gate: str) -> None:
    checks.check_extreme_decays(gate, TRITON)


def test_state_without_log_is_written_every_step() -> None:
    checks.check_a_sequence_without_a_log(TRITON)


def test_fold_follows_plan() -> None:
    checks.check_fold_follows_plan(TRITON)


def test_nan_does_not_reach_other_sequences_or_next_log_holder() -> None:
    checks.check_nan_stays_in_its_sequence(TRITON)


def test_fold_of_several_layers_adds_each_layers_log() -> None:
    checks.check_folds_of_several_layers(TRITON)


def test_any_number_of_logs_is_folded_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = list[tuple[int, ...]]()

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **constants: None

    monkeypatch.setattr(gdn_log_triton, "_fold_kernel", Recorder())
    state_RSHKV, logs_N = torch.empty(3, 2, 256, 8, 40, device="meta"), torch.ones(4096, dtype=torch.int64)
    gdn_fold(state_RSHKV, checks.on_device(checks.make_logs(Shape(1, 256, 8, 40), 3), "meta"), logs_N, logs_N, logs_N)
    [grid] = grids
    assert prod(grid) == 3 * 4096 * 256 * 2
    assert max(grid[1:]) <= MAX_PROGRAMS
