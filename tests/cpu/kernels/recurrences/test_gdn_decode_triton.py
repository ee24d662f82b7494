"""The Triton decode step against the per-token recurrence: outputs, states, and every slot that must not change.

The ``check_`` functions run on any device; tests/gpu runs them at the published models' shapes. Shape suffixes as in
``kernels/recurrences/gdn.py``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences import gdn
from tests.cpu.kernels.recurrences.test_gdn import Layer
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.recurrences.gdn_decode_triton import gdn_decode

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

FLOAT32_RATIO = 1e-5
"""Sums of 128 products of values near 1 in another order; a decay of exp(-70) is off by 70 roundings."""

BFLOAT16_RATIO = {"cpu": 8e-3, "cuda": 4e-3}
"""One rounding of the outputs, by at most 2 ** -9 of each; Triton's interpreter cuts off instead: at most 2 ** -8."""

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Shape:
    """Heads of keys and of values, and their sizes."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 64


def make_inputs(num_sequences: int, shape: Shape, dtype: torch.dtype, device: str) -> Layer:
    """Return random inputs; q, k, v, a and b are parts of one wide tensor's rows."""
    sizes = [shape.key_heads * shape.key_dim] * 2 + [shape.value_heads * shape.value_dim] + [shape.value_heads] * 2
    wide = torch.full((num_sequences, sum(sizes) + 48), torch.nan, device=device)
    wide[:, 16 : 16 + sum(sizes)].normal_()
    parts = wide.to(dtype)[:, 16 : 16 + sum(sizes)].split(sizes, dim=1)
    q_NGK, k_NGK = (x.unflatten(1, (shape.key_heads, shape.key_dim)) for x in parts[:2])
    v_NHV = parts[2].unflatten(1, (shape.value_heads, shape.value_dim))
    A_log_H = torch.empty(shape.value_heads, device=device).uniform_(0.001, 4).log()
    return Layer(q_NGK, k_NGK, v_NHV, parts[3], parts[4], A_log_H, torch.randn(shape.value_heads, device=device))


def make_arena(
    num_slots: int, filled: Sequence[int], shape: Shape, device: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the strided view of one layer's states: NaN everywhere but in the filled slots."""
    sizes = (shape.value_heads, shape.key_dim, shape.value_dim)
    num_elements = shape.value_heads * shape.key_dim * shape.value_dim
    arena_SX = torch.full((num_slots, num_elements + 448), torch.nan, dtype=dtype, device=device)
    state_SHKV = arena_SX[:, 64 : 64 + num_elements].unflatten(1, sizes)
    for slot in filled:
        state_SHKV[slot].normal_()
    return state_SHKV


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return ``|actual - expected| / |expected|``; NaN where either holds one."""
    difference = actual.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


def check_decode(
    src: Sequence[int],
    dst: Sequence[int],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    state_dtype: torch.dtype = torch.float32,
    inputs: Layer | None = None,
) -> None:
    """Assert outputs and states of one token per sequence, and that no other slot has changed a bit."""
    filled = sorted({*src} - {0})
    state_SHKV = make_arena(max(*src, *dst) + 2, filled, shape, device, state_dtype)
    before_SHKV = state_SHKV.cpu().clone()
    inputs = inputs or make_inputs(len(src), shape, dtype, device)
    slots = Slots(torch.tensor(src, device=device), torch.tensor(dst, device=device))
    with poisoned_memory():
        out_NHV = gdn_decode(inputs, state_SHKV, slots)
    assert out_NHV.dtype == dtype
    after_SHKV = state_SHKV.cpu()
    expected_SHKV = before_SHKV.clone()
    expected_NHV = torch.empty(out_NHV.shape)
    host = inputs.exact()
    for i, (src_slot, dst_slot) in enumerate(zip(src, dst, strict=True)):
        state_HKV = before_SHKV[src_slot].float() if src_slot else torch.zeros(before_SHKV.shape[1:])
        out_1HV, state_HKV = gdn.gdn_recurrent_reference(host.rows(i, i + 1), state_HKV)
        expected_NHV[i] = out_1HV[0]
        if dst_slot:
            expected_SHKV[dst_slot] = state_HKV
    out_ratio = FLOAT32_RATIO if dtype == torch.float32 else BFLOAT16_RATIO[device]
    state_ratio = FLOAT32_RATIO if state_dtype == torch.float32 else BFLOAT16_RATIO[device]
    assert error_ratio(out_NHV, expected_NHV) < out_ratio
    for slot in {*dst} - {0}:
        assert error_ratio(after_SHKV[slot], expected_SHKV[slot]) < state_ratio
    untouched = sorted({*range(len(after_SHKV))} - ({*dst} - {0}))
    assert torch.equal(after_SHKV[untouched].nan_to_num(99.0), before_SHKV[untouched].nan_to_num(99.0))


def check_batch_changes_no_bit(num_sequences: int, shape: Shape, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(num_sequences, shape, dtype, device)
    slots = torch.arange(1, num_sequences + 1, device=device)
    batch_SHKV = make_arena(num_sequences + 1, slots.tolist(), shape, device)
    alone_SHKV = batch_SHKV.clone()
    decode = partial(gdn_decode, launches=Launches.FIXED)
    out_NHV = decode(inputs, batch_SHKV, Slots(slots, slots))
    for i in {0, num_sequences // 2, num_sequences - 1}:
        one = Slots(slots[i : i + 1], slots[i : i + 1])
        assert torch.equal(decode(inputs.rows(i, i + 1), alone_SHKV, one)[0], out_NHV[i])
        assert torch.equal(alone_SHKV[i + 1], batch_SHKV[i + 1])


def check_gates(dtype: torch.dtype, device: str) -> None:
    """Decays from none to total, write strengths from 0 to 1."""
    shape = Shape(1, 2, 16, 16)
    for a in (-200.0, -8.0, 0.0, 25.0, 3e4, torch.inf):
        for b in (-200.0, 0.0, 200.0):
            inputs = make_inputs(2, shape, dtype, device)
            inputs = inputs._replace(a_TH=torch.full_like(inputs.a_TH, a), b_TH=torch.full_like(inputs.b_TH, b))
            check_decode([1, 2], [1, 3], shape, dtype, device, inputs=inputs)


def check_nan_stays_in_its_sequence(device: str) -> None:
    state_SHKV = make_arena(4, [1, 2, 3], Shape(), device)
    slots = torch.arange(1, 4, device=device)
    # Last: on a GPU, states and slots must be older than the launch before.
    inputs = make_inputs(3, Shape(), torch.float32, device)
    for x in inputs[:5]:
        x[1] = torch.nan
    out_NHV = gdn_decode(inputs, state_SHKV, Slots(slots, slots))
    assert out_NHV[[0, 2]].isfinite().all()
    assert out_NHV[1].isnan().all()
    assert state_SHKV[[1, 3]].isfinite().all()
    assert state_SHKV[2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(), Shape(1, 1, 8, 8), Shape(1, 3, 5, 7), Shape(2, 4, 24, 40), Shape(1, 2, 128, 128)], ids=str
)
def test_decode_equals_the_recurrence_at_any_size_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    check_decode([1, 2, 0], [1, 3, 4], shape, dtype, "cpu")


@pytest.mark.parametrize("num_sequences", [1, 2, 17])
def test_decode_in_place_from_a_shared_slot_and_from_nothing(num_sequences: int) -> None:
    slots = list(range(1, num_sequences + 1))
    check_decode(slots, slots, Shape(), torch.float32, "cpu")
    check_decode([num_sequences + 1] * num_sequences, slots, Shape(), torch.float32, "cpu")
    check_decode([0] * num_sequences, slots, Shape(), torch.float32, "cpu")


def test_negative_eigenvalues_equal_the_recurrence() -> None:
    inputs = make_inputs(3, Shape(), torch.float32, "cpu")._replace(max_beta=2)
    check_decode([1, 2, 0], [1, 3, 4], Shape(), torch.float32, "cpu", inputs=inputs)


def test_padded_rows_and_null_destinations_write_nothing() -> None:
    check_decode([1, 2, 0, 0], [1, 0, 0, 0], Shape(), torch.bfloat16, "cpu")


def test_a_state_in_bfloat16_is_rounded_once_per_step() -> None:
    check_decode([1, 2, 0], [1, 3, 4], Shape(), torch.bfloat16, "cpu", state_dtype=torch.bfloat16)


def test_deterministic_decode_does_not_depend_on_batch() -> None:
    check_batch_changes_no_bit(5, Shape(), torch.float32, "cpu")


# NumPy, which the interpreter runs on, says so where a GPU is silent; the results are what the test is about.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_extreme_gates_neither_overflow_nor_round_away() -> None:
    check_gates(torch.float32, "cpu")


def test_nan_in_one_sequence_stays_there() -> None:
    check_nan_stays_in_its_sequence("cpu")


def test_zero_keys_and_queries_give_zeros() -> None:
    inputs = make_inputs(2, Shape(), torch.float32, "cpu")
    inputs.q_TGK.zero_()
    inputs.k_TGK.zero_()
    state_SHKV = make_arena(3, [1, 2], Shape(), "cpu")
    slots = torch.tensor([1, 2])
    assert (gdn_decode(inputs, state_SHKV, Slots(slots, slots)) == 0).all()
    assert state_SHKV[1:].isfinite().all()
