"""Mamba-2 against transformers, and at the limits of its time steps. Shape suffixes as in ``mamba2.py``."""

from importlib import import_module
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from strandline.kernels.batch import Slots
from strandline.kernels.binding import why_unavailable
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs, mamba2_prefill, mamba2_recurrent_reference

HEADS, GROUPS, STATE_DIM, HEAD_DIM = 6, 2, 16, 12


def random_inputs(num_tokens: int, head_dim: int = HEAD_DIM) -> Mamba2Inputs:
    return Mamba2Inputs(
        torch.randn(num_tokens, HEADS, head_dim),
        torch.randn(num_tokens, GROUPS, STATE_DIM),
        torch.randn(num_tokens, GROUPS, STATE_DIM),
        torch.randn(num_tokens, HEADS),
        torch.empty(HEADS).uniform_(0.001, 4).log(),
        torch.randn(HEADS),
        torch.randn(HEADS),
    )


@pytest.mark.parametrize(("dt_limit", "dt_factor"), [((0.0, torch.inf), 1.0), ((0.2, 1.0), 0.4)])
def test_prefill_equals_transformers(dt_limit: tuple[float, float], dt_factor: float) -> None:
    inputs = random_inputs(150)._replace(dt_limit=dt_limit, dt_factor=dt_factor)
    x_THV, B_TGK, C_TGK, dt_TH, A_log_H, D_H, dt_bias_H, *_ = inputs
    state_SHKV = torch.randn(3, HEADS, STATE_DIM, HEAD_DIM)
    expected_BTHV, expected_BHVK = mamba2_chunk_scan(
        x_THV[None],
        dt_factor * dt_TH[None],
        -A_log_H.exp(),
        B_TGK[None],
        C_TGK[None],
        chunk_size=256,
        D=D_H,
        dt_bias=dt_bias_H,
        initial_states=state_SHKV[1:2].mT,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    slots = Slots(torch.tensor([1]), torch.tensor([2]))
    out_THV = mamba2_prefill.reference(inputs, state_SHKV, slots, build_chunk_table([(0, 150)], [()]))
    torch.testing.assert_close(out_THV, expected_BTHV[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state_SHKV[2], expected_BHVK[0].mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dt", [-200.0, 20.0, 3e4, torch.inf])
def test_extreme_time_steps_keep_the_decay_between_0_and_1(dt: float) -> None:
    inputs = random_inputs(150)._replace(dt_limit=(0.0, 50.0))
    inputs.dt_TH[::7] = dt
    state_SHKV = torch.randn(3, HEADS, STATE_DIM, HEAD_DIM)
    before_HKV = state_SHKV[1].clone()
    slots = Slots(torch.tensor([1]), torch.tensor([2]))
    out_THV = mamba2_prefill.reference(inputs, state_SHKV, slots, build_chunk_table([(5, 155)], [()]))
    expected_THV, expected_HKV = mamba2_recurrent_reference(inputs, before_HKV)
    torch.testing.assert_close(out_THV, expected_THV, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(state_SHKV[2], expected_HKV, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(why_unavailable("Numba", "cpu") is not None, reason="needs Numba")
@pytest.mark.parametrize("head_dim", [24, 72])
def test_number_of_threads_changes_no_bit_of_prefills(head_dim: int) -> None:
    exact = random_inputs(130, head_dim=head_dim)
    tokens: list[Any] = [x.bfloat16() for x in exact[:4]]
    inputs = Mamba2Inputs(*tokens, *exact[4:])
    chunks = build_chunk_table([(5, 30), (37, 142)], [(), ((70, 5),)])
    slots = Slots(torch.tensor([1, 0]), torch.tensor([2, 3]))
    before_SHKV = torch.randn(6, HEADS, STATE_DIM, head_dim)
    kernel = import_module("strandline.kernels.recurrences.mamba2_prefill_numba").mamba2_prefill
    threads, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 7, 40):
            torch.set_num_threads(num_threads)
            state_SHKV = before_SHKV.clone()
            out_THV = kernel(inputs, state_SHKV, slots, chunks)
            results.append((out_THV, state_SHKV))
    finally:
        torch.set_num_threads(threads)
    for out_THV, state_SHKV in results[1:]:
        assert torch.equal(out_THV, results[0][0])
        assert torch.equal(state_SHKV, results[0][1])
    expected_SHKV = before_SHKV.clone()
    expected_THV = mamba2_prefill.reference(inputs, expected_SHKV, slots, chunks)
    assert (results[0][0] - expected_THV).norm() < 1e-2 * expected_THV.norm()  # outputs are rounded to bfloat16
    torch.testing.assert_close(results[0][1], expected_SHKV, rtol=1e-4, atol=1e-4)
