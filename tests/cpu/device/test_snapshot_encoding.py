"""The encoding of what rests below the device: how far states that come back differ from those that left."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.device.stores.host_store import HostStore
from strandline.device.stores.snapshot_encoding import AsIs, Encoding, slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.ids import BlockId, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import LoadIn, SnapshotCopy, StoreOut
from strandline.specs import SNAPSHOT_DTYPES, LayerSpec, ModelSpec, TensorSpec, kv_spec

WINDOW = TensorSpec("window", (3, 7), "bfloat16")
STATE = TensorSpec("state", (2, 5, 9), "float32", is_recurrent=True)
FLAT = TensorSpec("state", (11,), "float32", is_recurrent=True)
ROUNDED = TensorSpec("state", (2, 3), "bfloat16", is_recurrent=True)
DELTA, VECTOR, HALF = LayerSpec(states=(WINDOW, STATE)), LayerSpec(states=(FLAT,)), LayerSpec(states=(ROUNDED,))
ATTENTION = kv_spec(1, 4, "bfloat16")
SPEC = ModelSpec((DELTA, ATTENTION, DELTA, VECTOR, HALF, DELTA, ATTENTION), 6, "bfloat16")
NUM_DELTA = 3
TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max

SINGLES = st.floats(width=32)
"""All of them: zeros of both signs, the smallest and the largest, NaN and infinities."""
ROWS = st.lists(st.one_of(SINGLES, st.floats(-1, 1, width=32)), min_size=9, max_size=9)


def returned(arena: ArenaTensors, encoding: Encoding, slot: int = 1) -> ArenaTensors:
    """Return memory that holds a slot as it comes back; all else is NaN."""
    back = ArenaTensors(SPEC, arena.num_slabs)
    back.bytes.fill_(255)
    rest_X = encoding.encode(arena.slot(SlotId(slot))).clone()
    room_X = encoding.room(back.slot(SlotId(slot)))
    room_X.copy_(rest_X)
    encoding.decode(room_X, back.slot(SlotId(slot)))
    return back


def arena_of(state_LHKV: Tensor) -> ArenaTensors:
    """Return memory whose slot 1 has these states in its layers of two tensors, and different bytes elsewhere."""
    arena = ArenaTensors(SPEC, 3)
    arena.bytes.copy_(torch.arange(len(arena.bytes)) % 251)
    for layer, state_HKV in zip([0, 2, 5], state_LHKV, strict=True):
        arena.layers[layer].states["state"][1] = state_HKV
    arena.layers[3].states["state"][1] = state_LHKV.flatten()[:11]
    return arena


def states_of(arena: ArenaTensors) -> Tensor:
    return torch.stack([arena.layers[layer].states["state"][1] for layer in (0, 2, 5)])


def drawn(rows: list[list[float]]) -> Tensor:
    """Return states for all layers that contain these rows."""
    row_RV = torch.tensor(rows, dtype=torch.float32)
    return row_RV.repeat(math.ceil(NUM_DELTA * 10 / len(rows)), 1)[: NUM_DELTA * 10].view(NUM_DELTA, 2, 5, 9)


@given(st.lists(ROWS, min_size=1, max_size=7))
@settings(max_examples=60)
def test_int8_is_off_by_at_most_half_a_step(rows: list[list[float]]) -> None:
    state_LHKV = drawn(rows)
    back_LHKV = states_of(returned(arena_of(state_LHKV), slot_encoding(SPEC, "int8")))
    is_finite = state_LHKV.isfinite()
    assert torch.equal(back_LHKV.isfinite(), is_finite)
    assert bool(back_LHKV[~is_finite].isnan().all())
    exact, found = (torch.where(is_finite, x.double(), 0) for x in (state_LHKV, back_LHKV))
    step = (exact.abs().amax(-1, keepdim=True) / 127).clamp(min=TINY)
    assert bool(((exact - found).abs() <= step * (0.5 + 1e-4)).all())
    assert bool((found[exact == 0] == 0).all()), "zeros stay zeros"


@given(st.lists(ROWS, min_size=1, max_size=7))
@settings(max_examples=60)
def test_bfloat16_is_off_by_at_most_its_rounding(rows: list[list[float]]) -> None:
    state_LHKV = drawn(rows)
    back_LHKV = states_of(returned(arena_of(state_LHKV), slot_encoding(SPEC, "bfloat16")))
    is_finite = state_LHKV.isfinite()
    assert torch.equal(back_LHKV[~is_finite], state_LHKV[~is_finite]) or bool(state_LHKV.isnan().any())
    assert torch.equal(back_LHKV.isfinite(), is_finite)
    assert torch.equal(back_LHKV.isnan(), state_LHKV.isnan())
    exact, found = (torch.where(is_finite, x.double(), 0) for x in (state_LHKV, back_LHKV))
    within = exact.clamp(-MAX_BFLOAT16, MAX_BFLOAT16)
    assert bool(((within - found).abs() <= exact.abs() * 2.0**-8 + TINY).all())


@pytest.mark.parametrize("dtype", SNAPSHOT_DTYPES)
def test_all_but_recurrent_states_in_float32_returns_as_it_was(dtype: str) -> None:
    generator = torch.Generator().manual_seed(7)
    arena = arena_of(torch.randn(NUM_DELTA, 2, 5, 9, generator=generator))
    back = returned(arena, slot_encoding(SPEC, dtype))
    for mine, theirs in zip(arena.layers, back.layers, strict=True):
        for name in mine.states:
            is_same = torch.equal(*(x.states[name][1].contiguous().view(torch.uint8) for x in (mine, theirs)))
            assert is_same == (dtype == "float32" or name == "window" or mine.states[name].dtype != torch.float32)
    assert torch.equal(arena.hidden_SE[1].view(torch.uint8), back.hidden_SE[1].view(torch.uint8))
    vector, found = arena.layers[3].states["state"][1], back.layers[3].states["state"][1]
    assert bool(((vector - found).abs() <= vector.abs() * 2.0**-8).all()), "a state of one dimension is in bfloat16"


@pytest.mark.parametrize("dtype", SNAPSHOT_DTYPES)
def test_leaving_and_returning_again_changes_little_more(dtype: str) -> None:
    generator = torch.Generator().manual_seed(8)
    state_LHKV = torch.randn(NUM_DELTA, 2, 5, 9, generator=generator) * 10 ** torch.arange(-20.0, 25.0, 5.0)
    encoding = slot_encoding(SPEC, dtype)
    first = returned(arena_of(state_LHKV), encoding)
    again = first
    for _ in range(10):
        again = returned(again, encoding)
    once, many = states_of(first), states_of(again)
    assert bool(((once - many).abs() <= once.abs() * 1e-5).all())


def test_extremes_do_not_affect_other_rows() -> None:
    state_LHKV = torch.ones(NUM_DELTA, 2, 5, 9)
    row = [0.0, -0.0, LARGEST, -LARGEST, float("inf"), -float("inf"), float("nan"), 1e-45, 1.0]
    state_LHKV[1, 1, 3] = torch.tensor(row)
    back_LHKV = states_of(returned(arena_of(state_LHKV), slot_encoding(SPEC, "int8")))
    others = torch.ones(NUM_DELTA, 2, 5, dtype=torch.bool)
    others[1, 1, 3] = False
    assert bool(((back_LHKV[others] - 1).abs() < 1e-5).all())
    found = back_LHKV[1, 1, 3]
    assert found[2:4].tolist() == pytest.approx([LARGEST, -LARGEST], rel=1e-5)
    assert (found[4:7].isnan().all(), found[[0, 1, 7, 8]].tolist()) == (True, [0.0] * 4)


@pytest.mark.parametrize("dtype", SNAPSHOT_DTYPES)
def test_host_memory_takes_the_room_that_the_cache_counts(dtype: str) -> None:
    """Fill a store of exactly that size with snapshots; a byte more would not fit."""
    arena = arena_of(torch.ones(NUM_DELTA, 2, 5, 9))
    transfers = Transfers(arena)
    num_pages = 2 * SPEC.stored_snapshots(dtype).max_blocks + 1
    store = HostStore(arena, num_pages, transfers.completions, slot_encoding(SPEC, dtype))
    store.store(
        StoreOut(TransferId(1), "host", ((BlockId(1), 1),), (SnapshotCopy(SlotId(1), 2), SnapshotCopy(SlotId(1), 3))),
        arena,
    )
    slot, block = arena.slot(SlotId(1)).clone(), arena.block(BlockId(1)).clone()
    arena.slot(SlotId(1)).fill_(255)
    arena.block(BlockId(1)).fill_(255)
    store.load(LoadIn(TransferId(2), "host", ((BlockId(1), 1),), (SnapshotCopy(SlotId(1), 3),)), arena)
    assert [x.is_done for x in transfers.take()] == [True, True]
    assert torch.equal(arena.block(BlockId(1)), block)
    assert torch.equal(arena.slot(SlotId(1)), slot) == (dtype == "float32")
    assert float((states_of(arena) - 1).abs().max()) < 1e-5
    assert store._pages._free == []


def test_nothing_is_encoded_where_no_state_is_recurrent_in_float32() -> None:
    for layers in ((ATTENTION,), (HALF, ATTENTION), (LayerSpec(states=(WINDOW,)),)):
        for dtype in SNAPSHOT_DTYPES:
            assert isinstance(slot_encoding(ModelSpec(layers, 6, "bfloat16"), dtype), AsIs)
    assert not isinstance(slot_encoding(SPEC, "int8"), AsIs)
