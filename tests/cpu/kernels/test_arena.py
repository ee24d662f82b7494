"""The arena's views lie where specs.py says, and its copies touch nothing else."""

from collections.abc import Iterable

import pytest
import torch

from strandline.errors import CacheInvariantError
from strandline.ids import BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.specs import ALIGN_BYTES, LayerSpec, LogSpec, ModelSpec, TensorSpec, kv_spec, state_bytes, stream_bytes
from tests.cpu.pages import needs_pagemap, resident_share

ATTENTION = kv_spec(2, 8, "bfloat16")
ODD_ATTENTION = kv_spec(3, 5, "float32")
RECURRENT = LayerSpec(states=(TensorSpec("state", (3, 4, 5), "float32"), TensorSpec("window", (3, 17), "bfloat16")))
LATENT = LayerSpec(
    streams=(TensorSpec("latent", (37,), "bfloat16"), TensorSpec("index", (2, 5), "float16")),
)
BOTH = LayerSpec(
    streams=(TensorSpec("a", (3,), "float16"), TensorSpec("b", (3,), "float16"), TensorSpec("c", (1, 7), "float32")),
    states=(
        TensorSpec("near", (2, 9), "float16"),
        TensorSpec("far", (5, 9), "bfloat16"),
        TensorSpec("sum", (3, 3), "float32"),
    ),
)
NOTHING = LayerSpec()
SPECS = [
    ModelSpec((RECURRENT, ATTENTION, RECURRENT, ATTENTION), 12, "bfloat16"),
    ModelSpec((ATTENTION, ODD_ATTENTION, RECURRENT, ODD_ATTENTION), 7, "float32"),
    ModelSpec((LATENT, NOTHING, LATENT, BOTH, RECURRENT, BOTH), 12, "bfloat16"),
    ModelSpec((RECURRENT,), 5, "float16"),
    ModelSpec((ATTENTION,), 5, "bfloat16"),
    ModelSpec((NOTHING,), 5, "bfloat16"),
]


def streams(arena: ArenaTensors) -> Iterable[tuple[torch.Tensor, int]]:
    """Yield each stream with its offset in a block, in bytes, in order of the layers."""
    offset = 0
    for layer, memory in zip(arena.spec.layers, arena.layers, strict=True):
        assert list(memory.streams) == [stream.name for stream in layer.streams]
        for stream in layer.streams:
            yield memory.streams[stream.name], offset
            offset += stream_bytes(stream)


def states(arena: ArenaTensors) -> Iterable[tuple[torch.Tensor, int]]:
    """Yield each state, and the hidden state, with its offset in a slot, in bytes, in order of the layers."""
    offset = 0
    for layer, memory in zip(arena.spec.layers, arena.layers, strict=True):
        assert list(memory.states) == [state.name for state in layer.states]
        for state in layer.states:
            yield memory.states[state.name], offset
            offset += state_bytes(state)
    yield arena.hidden_SE, offset


@pytest.mark.parametrize("spec", SPECS)
def test_every_view_starts_where_the_layout_says(spec: ModelSpec) -> None:
    arena = ArenaTensors(spec, num_slabs=3)
    assert arena.bytes.numel() == 3 * spec.slab_bytes
    views = [(view, offset, spec.block_bytes) for view, offset in streams(arena)]
    views += [(view, offset, spec.slab_bytes) for view, offset in states(arena)]
    for view, offset_bytes, stride_bytes in views:
        assert view.data_ptr() - arena.bytes.data_ptr() == offset_bytes
        assert view.stride(0) * view.element_size() == stride_bytes
        assert view[0].is_contiguous()


@pytest.mark.parametrize("spec", SPECS)
def test_views_of_one_block_or_slot_do_not_overlap(spec: ModelSpec) -> None:
    arena = ArenaTensors(spec, num_slabs=3)
    for tenant in (streams(arena), states(arena)):
        views = [view[2] for view, _ in tenant]
        for value, view in enumerate(views, start=1):
            view.fill_(value)
        assert all(bool((view == value).all()) for value, view in enumerate(views, start=1))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if any(layer.streams for layer in spec.layers)])
@pytest.mark.parametrize("num_tokens", [1, 63, 64])
def test_copy_block_copies_first_tokens_of_all_streams_only(spec: ModelSpec, num_tokens: int) -> None:
    arena = ArenaTensors(spec, num_slabs=4)
    arena.poison([BlockId(b) for b in range(1, arena.num_blocks)], [])
    before = arena.bytes.clone()
    for view, _ in streams(arena):
        view[1].normal_()
    arena.copy_block(BlockId(1), BlockId(3), num_tokens)
    for view, _ in streams(arena):
        assert torch.equal(view[3, :num_tokens], view[1, :num_tokens])
        assert bool(view[3, num_tokens:].isnan().all())
    start, end = 3 * spec.block_bytes, 4 * spec.block_bytes
    assert torch.equal(arena.bytes[: spec.block_bytes], before[: spec.block_bytes])
    assert torch.equal(arena.bytes[2 * spec.block_bytes : start], before[2 * spec.block_bytes : start])
    assert torch.equal(arena.bytes[end:], before[end:])


@pytest.mark.parametrize(("spec", "num_copies"), list(zip(SPECS, [1, 2, 4, 0, 1, 0], strict=True)))
def test_copy_block_copies_equal_streams_at_once(
    spec: ModelSpec, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = ArenaTensors(spec, num_slabs=4)
    copies = []
    usual = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copies.append(usual(self, other)))
    arena.copy_block(BlockId(1), BlockId(2), 5)
    assert len(copies) == num_copies


def test_move_block_copies_the_whole_block() -> None:
    arena = ArenaTensors(SPECS[0], num_slabs=4)
    arena.block(BlockId(2)).random_(0, 256)
    arena.move_block(BlockId(2), BlockId(3))
    assert torch.equal(arena.block(BlockId(3)), arena.block(BlockId(2)))


@pytest.mark.parametrize("spec", SPECS)
def test_poison_makes_all_of_a_block_or_slot_nan(spec: ModelSpec) -> None:
    arena = ArenaTensors(spec, num_slabs=3)
    arena.poison([BlockId(2)], [SlotId(2)])
    for view, _ in (*streams(arena), *states(arena)):
        assert bool(view[2].isnan().all())
        assert not bool(view[1].isnan().any())


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


def logged(heads: int) -> LayerSpec:
    """Return the spec of a layer that keeps a log of tensors of different shapes and dtypes."""
    state = TensorSpec("state", (heads, 4, 8), "float32", is_recurrent=True)
    kept = (TensorSpec("key", (1, 5, 4), "float32"), TensorSpec("value", (heads, 5, 8), "bfloat16"))
    return LayerSpec(states=(state, TensorSpec("window", (3, 32), "bfloat16")), log=LogSpec(5, kept))


def test_stacks_hold_what_each_of_their_layers_sees() -> None:
    spec = ModelSpec((logged(2), ATTENTION, logged(2), RECURRENT, logged(4)), hidden_size=16, hidden_dtype="float32")
    arena = ArenaTensors(spec, num_slabs=3, num_logs=7)
    assert [stack.layers for stack in arena.stacks] == [(0, 2), (4,)]
    for stack in arena.stacks:
        for row, index in enumerate(stack.layers):
            layer = arena.layers[index]
            assert layer.log is not None
            for name, view in layer.states.items():
                stack.states[name][row].fill_(index)
                assert torch.equal(view, stack.states[name][row])
                assert view.data_ptr() == stack.states[name][row].data_ptr()
            for name, log in layer.log.items():
                assert log.data_ptr() == stack.log[name][row].data_ptr()
                assert log.shape == stack.log[name][row].shape
    assert [float(arena.layers[index].states["window"].mean()) for index in (0, 2, 4)] == [0, 2, 4]
    assert [memory.log for memory in (arena.layers[1], arena.layers[3])] == [None, None]
    assert sum(x.nbytes for stack in arena.stacks for x in stack.log.values()) == 7 * spec.log_bytes


def test_arenas_are_aligned_alike() -> None:
    assert {ArenaTensors(SPECS[0], num_slabs).bytes.data_ptr() % ALIGN_BYTES for num_slabs in range(1, 9)} == {0}


@needs_pagemap
def test_prefaulted_memory_is_resident_and_zero() -> None:
    # More than the heap may have kept of what was freed: a mapping of its own.
    arena = ArenaTensors(SPECS[0], num_slabs=2**30 // SPECS[0].slab_bytes)
    num_bytes = 48 * 2**20
    assert resident_share(arena.bytes) < 0.01
    arena.prefault(num_bytes)
    assert resident_share(arena.bytes[:num_bytes]) == 1
    assert resident_share(arena.bytes[num_bytes:]) < 0.01
    assert not arena.bytes[:num_bytes].any()
