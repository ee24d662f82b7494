"""The arena's views lie where specs.py says, and its copies touch nothing else."""

from collections.abc import Iterable

import pytest
import torch

from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import KVMemory, RecurrentMemory
from strandline.specs import AttentionSpec, LogSpec, ModelSpec, RecurrentSpec
from tests.cpu.pages import needs_pagemap, resident_share

ATTENTION = AttentionSpec(num_kv_heads=2, head_dim=8, dtype="bfloat16")
ODD_ATTENTION = AttentionSpec(num_kv_heads=3, head_dim=5, dtype="float32")
RECURRENT = RecurrentSpec((3, 4, 5), "float32", (3, 17), "bfloat16")
SPECS = [
    ModelSpec((RECURRENT, ATTENTION, RECURRENT, ATTENTION), 12, "bfloat16"),
    ModelSpec((ATTENTION, ODD_ATTENTION, RECURRENT, ODD_ATTENTION), 7, "float32"),
    ModelSpec((RECURRENT,), 5, "float16"),
    ModelSpec((ATTENTION,), 5, "bfloat16"),
]


def tensors(arena: ArenaTensors) -> Iterable[tuple[torch.Tensor, int, int]]:
    """Yield each view with the stride and the offset that specs.py gives it, in bytes, in order of the layers."""
    spec = arena.spec
    in_block = in_slot = 0
    for layer, memory in zip(spec.layers, arena.layers, strict=True):
        if isinstance(layer, AttentionSpec):
            assert isinstance(memory, KVMemory)
            yield memory.k_BPGD, spec.block_bytes, in_block
            yield memory.v_BPGD, spec.block_bytes, in_block + layer.kv_bytes
            in_block += 2 * layer.kv_bytes
        else:
            assert isinstance(memory, RecurrentMemory)
            yield memory.state_SHKV, spec.slab_bytes, in_slot
            yield memory.window_SRC, spec.slab_bytes, in_slot + layer.state_bytes
            in_slot += layer.state_bytes + layer.window_bytes
    yield arena.hidden_SE, spec.slab_bytes, in_slot


@pytest.mark.parametrize("spec", SPECS)
def test_every_view_starts_where_the_layout_says(spec: ModelSpec) -> None:
    arena = ArenaTensors(spec, num_slabs=3)
    assert arena.bytes.numel() == 3 * spec.slab_bytes
    for view, stride_bytes, offset_bytes in tensors(arena):
        assert view.data_ptr() - arena.bytes.data_ptr() == offset_bytes
        assert view.stride(0) * view.element_size() == stride_bytes
        assert view[0].is_contiguous()


@pytest.mark.parametrize("spec", SPECS)
def test_views_of_one_block_or_slot_do_not_overlap(spec: ModelSpec) -> None:
    arena = ArenaTensors(spec, num_slabs=3)
    views = [view[2] for view, _, _ in tensors(arena)]
    of_block = [view for view in views if view.dim() == 3 and view.shape[0] == BLOCK_TOKENS]
    of_slot = [view for view in views if not any(view is other for other in of_block)]
    for tenant in (of_block, of_slot):
        for value, view in enumerate(tenant, start=1):
            view.fill_(value)
        assert all(bool((view == value).all()) for value, view in enumerate(tenant, start=1))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if any(spec.attention_layers())])
@pytest.mark.parametrize("num_tokens", [1, 63, 64])
def test_copy_block_copies_the_first_tokens_of_all_layers_and_no_more(spec: ModelSpec, num_tokens: int) -> None:
    arena = ArenaTensors(spec, num_slabs=4)
    arena.poison([BlockId(b) for b in range(1, arena.num_blocks)], [])
    before = arena.bytes.clone()
    for memory in arena.layers:
        if isinstance(memory, KVMemory):
            memory.k_BPGD[1].normal_()
            memory.v_BPGD[1].normal_()
    arena.copy_block(BlockId(1), BlockId(3), num_tokens)
    for memory in arena.layers:
        if isinstance(memory, KVMemory):
            for view in (memory.k_BPGD, memory.v_BPGD):
                assert torch.equal(view[3, :num_tokens], view[1, :num_tokens])
                assert bool(view[3, num_tokens:].isnan().all())
    start, end = 3 * spec.block_bytes, 4 * spec.block_bytes
    assert torch.equal(arena.bytes[: spec.block_bytes], before[: spec.block_bytes])
    assert torch.equal(arena.bytes[2 * spec.block_bytes : start], before[2 * spec.block_bytes : start])
    assert torch.equal(arena.bytes[end:], before[end:])


def test_move_block_copies_the_whole_block() -> None:
    arena = ArenaTensors(SPECS[0], num_slabs=4)
    arena.block(BlockId(2)).random_(0, 256)
    arena.move_block(BlockId(2), BlockId(3))
    assert torch.equal(arena.block(BlockId(3)), arena.block(BlockId(2)))


def test_poison_makes_every_view_of_a_block_or_slot_nan() -> None:
    arena = ArenaTensors(SPECS[0], num_slabs=3)
    arena.poison([BlockId(2)], [SlotId(2)])
    for memory in arena.layers:
        if isinstance(memory, KVMemory):
            assert bool(memory.k_BPGD[2].isnan().all())
            assert bool(memory.v_BPGD[2].isnan().all())
        else:
            assert bool(memory.state_SHKV[2].isnan().all())
            assert bool(memory.window_SRC[2].isnan().all())
            assert not bool(memory.state_SHKV[1].isnan().all())
    assert bool(arena.hidden_SE[2].isnan().all())


def test_the_null_block_and_the_null_slot_are_never_written() -> None:
    arena = ArenaTensors(SPECS[0], num_slabs=3)
    with pytest.raises(CacheInvariantError):
        arena.copy_block(BlockId(1), BlockId(0), 5)
    with pytest.raises(CacheInvariantError):
        arena.copy_block(BlockId(1), BlockId(2), 65)
    with pytest.raises(CacheInvariantError):
        arena.move_block(BlockId(1), BlockId(0))
    with pytest.raises(CacheInvariantError):
        arena.poison([BlockId(0)], [])
    with pytest.raises(CacheInvariantError):
        arena.poison([], [SlotId(0)])


def test_logged_layers_are_what_each_layer_sees_and_logs_are_as_large_as_the_spec_says() -> None:
    attention = AttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
    one = RecurrentSpec((2, 4, 8), "float32", (3, 32), "bfloat16", LogSpec(num_tokens=5, num_keys=1))
    other = RecurrentSpec((4, 4, 8), "float32", (3, 16), "bfloat16", LogSpec(num_tokens=5, num_keys=2))
    spec = ModelSpec((one, attention, one, other), hidden_size=16, hidden_dtype="float32")
    arena = ArenaTensors(spec, num_slabs=3, num_logs=7)
    seen = [layer for layer in arena.layers if isinstance(layer, RecurrentMemory)]
    stacked = [
        (run.state_RSHKV[i], run.logs.of_layer(i)) for run in arena.logged_layers for i in range(len(run.state_RSHKV))
    ]
    assert [len(run.state_RSHKV) for run in arena.logged_layers] == [2, 1]
    for number, ((state_SHKV, logs), layer) in enumerate(zip(stacked, seen, strict=True)):
        state_SHKV.fill_(number)
        assert torch.equal(layer.state_SHKV, state_SHKV)
        assert state_SHKV.data_ptr() == layer.state_SHKV.data_ptr()
        assert layer.log is not None
        assert layer.log.key_JGLK.data_ptr() == logs.key_JGLK.data_ptr()
    assert [float(layer.state_SHKV.mean()) for layer in seen] == [0, 1, 2]
    tensors = [x for run in arena.logged_layers for x in (run.logs.key_JGLK, run.logs.value_JHLV, run.logs.decay_JHL)]
    assert sum(x.nbytes for x in tensors) == 7 * spec.log_bytes


@needs_pagemap
def test_touched_memory_is_there_and_zero() -> None:
    # More than the heap may have kept of what was freed: a mapping of its own.
    arena = ArenaTensors(SPECS[0], num_slabs=2**30 // SPECS[0].slab_bytes)
    num_bytes = 48 * 2**20
    assert resident_share(arena.bytes) < 0.01
    arena.touch(num_bytes)
    assert resident_share(arena.bytes[:num_bytes]) == 1
    assert resident_share(arena.bytes[num_bytes:]) < 0.01
    assert not arena.bytes[:num_bytes].any()
