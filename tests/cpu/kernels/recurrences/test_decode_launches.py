"""Launches of decode steps whose states fit registers."""

import pytest

from strandline.kernels.recurrences.decode_launches import (
    HEADS,
    HEADS_WITH_LOG,
    MAX_NUMBERS,
    DecodeLaunch,
    fit_registers,
)

LAUNCHES = sorted({HEADS.few, HEADS.many, HEADS_WITH_LOG.few, HEADS_WITH_LOG.many})


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("key_dim", [64, 128, 192, 256, 512])
def test_threads_hold_no_more_of_a_state_than_registers_do(launch: DecodeLaunch, key_dim: int) -> None:
    block_v, num_warps = fit_registers(launch, key_dim)
    block_k = 1 << (key_dim - 1).bit_length()
    assert block_v * block_k <= MAX_NUMBERS * 32 * num_warps


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_launches_of_short_keys_are_those_measured(launch: DecodeLaunch) -> None:
    assert fit_registers(launch, 128) == launch
