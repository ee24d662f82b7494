"""Triton's Gated DeltaNet over rerun rows against torch's: the step's own outputs, zeros of no token, and states.

The ``check_`` function runs on any device; tests/gpu runs it at the published models' shapes. Shape suffixes as in
``kernels/recurrences/gdn.py``.
"""

import os
from dataclasses import replace

import pytest
import torch

from strandline.kernels.batch import Slots
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences import gdn
from strandline.kernels.recurrences.rerun import of_step
from tests.cpu.kernels.recurrences.test_conv1d_rerun_triton import LENGTHS, Lengths, make_step
from tests.cpu.kernels.recurrences.test_gdn_prefill_triton import FLOAT32_ERROR, Shape, make_layer
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.recurrences.gdn_prefill_triton import gdn_prefill
from strandline.kernels.recurrences.gdn_short_triton import FEW, MANY, Short, gdn_prefill_short

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

ALL_LENGTHS: Lengths = [
    (num_logged, num_rows, num_drafts)
    for num_logged in range(5)
    for num_rows in range(1, 5)
    for num_drafts in range(num_rows)
]
"""Every pattern of up to four logged tokens and four rows."""


def check_rerun(
    lengths: Lengths,
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    limit: float,
    num_fillers: int = 1,
    launch: Short | None = None,
) -> None:
    rerun, chunks, ends = make_step(lengths, 16, device, num_fillers)
    layer = make_layer(rerun.num_rows, shape, dtype, device)._replace(max_beta=2)
    # What no chunk holds must not be read.
    for tokens in layer[:5]:
        tokens[-1] = torch.nan
    state_shape = (2 * len(lengths) + 2, shape.value_heads, shape.key_dim, shape.value_dim)
    state_SHKV = torch.full(state_shape, torch.nan, device=device)
    is_read = ends["src"] != 0
    state_SHKV[ends["src"][is_read]] = torch.randn(int(is_read.sum()), *state_shape[1:], device=device)
    expected_SHKV = state_SHKV.cpu().clone()
    on_host, host_chunks, host_ends = make_step(lengths, 16, "cpu", num_fillers)
    slots = Slots(host_ends["src"], host_ends["dst"])
    expected_THV = gdn.gdn_prefill.reference(layer.exact(), expected_SHKV, slots, host_chunks, on_host)
    with poisoned_memory():
        slots = Slots(ends["src"], ends["dst"])
        out_THV = gdn_prefill_short(layer, state_SHKV, slots, chunks, rerun, launch)
    assert out_THV.dtype == dtype
    assert len(out_THV) == len(rerun.step_rows_T)
    assert not out_THV[-num_fillers:].any()
    out_error = (out_THV.cpu().float() - expected_THV).norm() / expected_THV.norm()
    assert float(out_error) <= limit
    is_written = expected_SHKV.isfinite()
    assert torch.equal(state_SHKV.cpu().isfinite(), is_written)
    state_error = (state_SHKV.cpu() - expected_SHKV)[is_written].norm() / expected_SHKV[is_written].norm()
    assert float(state_error) <= limit


@pytest.mark.parametrize("launch", [FEW, MANY], ids=str)
def test_own_outputs_of_every_pattern_are_torchs(launch: Short) -> None:
    check_rerun(ALL_LENGTHS, Shape(), "cpu", torch.float32, FLOAT32_ERROR, launch=launch)


@pytest.mark.parametrize("shape", [Shape(1, 3, 5, 7), Shape(2, 2, 24, 40)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_own_outputs_are_torchs_at_any_size(lengths: Lengths, shape: Shape) -> None:
    check_rerun(lengths, shape, "cpu", torch.float32, FLOAT32_ERROR)


@pytest.mark.parametrize("num_fillers", [1, 2, 3, 40])
@pytest.mark.parametrize("lengths", LENGTHS[:2])
def test_all_rows_of_no_token_are_zeros(lengths: Lengths, num_fillers: int) -> None:
    check_rerun(lengths, Shape(), "cpu", torch.float32, FLOAT32_ERROR, num_fillers)


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("is_short", [True, False])
def test_rerun_rows_are_left_out_by_every_version(launches: Launches, *, is_short: bool) -> None:
    rerun, chunks, ends = make_step(LENGTHS[1], 4, "cpu")
    rerun, chunks = (
        replace(rerun, is_padded=False, step_rows_T=rerun.step_rows_T[:-1]),
        replace(chunks, is_short=is_short),
    )
    layer = make_layer(rerun.num_rows, Shape(), torch.float32, "cpu")
    state_SHKV = torch.randn(2 * len(LENGTHS[1]) + 2, 2, 16, 16)
    slots = Slots(ends["src"], ends["dst"])
    every_RHV = gdn_prefill(layer, state_SHKV.clone(), slots, chunks, launches=launches)
    own_THV = gdn_prefill(layer, state_SHKV, slots, chunks, rerun, launches=launches)
    assert torch.equal(own_THV, of_step(rerun, every_RHV))


def test_a_step_without_rows_advances_states_alone() -> None:
    rerun, chunks, ends = make_step([(3, 0, 0), (1, 0, 0)], 4, "cpu")
    none = rerun.step_rows_T[:0]
    rerun = replace(rerun, is_padded=False, step_rows_T=none, draft_rows_K=none, draft_entries_K=none)
    layer = make_layer(rerun.num_rows, Shape(), torch.float32, "cpu")
    state_SHKV = torch.randn(6, 2, 16, 16)
    expected_SHKV = state_SHKV.clone()
    slots = Slots(ends["src"], ends["dst"])
    gdn.gdn_prefill.reference(layer, expected_SHKV, slots, chunks)
    out_THV = gdn_prefill_short(layer, state_SHKV, slots, chunks, rerun)
    assert out_THV.shape == (0, 2, 16)
    torch.testing.assert_close(state_SHKV, expected_SHKV)
