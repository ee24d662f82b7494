"""Snapshots with window blocks in host memory: all of their bytes return."""

from dataclasses import replace

import pytest
import torch

from strandline.config import BUFFER_SLABS, BUFFER_SNAPSHOTS, buffer_blocks
from strandline.device.stores.host_store import HostStore, PinnedStore
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.errors import CacheInvariantError
from strandline.ids import BlockId, Lifetime, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import LoadIn, SnapshotCopy, StoreOut
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec

ATTENTION = kv_spec(2, 16, "float32")
RECURRENT = LayerSpec(states=(TensorSpec("state", (4, 8, 24), "float32", is_recurrent=True),))
SPEC = ModelSpec((ATTENTION, replace(ATTENTION, window_tokens=100), RECURRENT), 32, "float32", has_window_blocks=True)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_windows_return_with_their_slots(dtype: str) -> None:
    check_windows_return(HostStore, "cpu", dtype)


def check_windows_return(kind: type[HostStore] | type[PinnedStore], device: str, dtype: str) -> None:
    """Store snapshots, overwrite them, and load them into other slots and window blocks."""
    arena = ArenaTensors(SPEC, 12, device)
    transfers = Transfers(arena)
    num_pages = 4 * SPEC.stored_snapshots(dtype).max_blocks
    store = kind(arena, num_pages, transfers.completions, slot_encoding(SPEC, dtype))
    first = 6 * SPEC.window_blocks_per_slab
    for count in range(SPEC.snapshot_window_blocks + 1):
        window = tuple(BlockId(first + index) for index in range(count))
        landing = tuple(BlockId(first + 3 * SPEC.window_blocks_per_slab + index) for index in range(count))
        for index, block in enumerate(window):
            arena.block(block, Lifetime.WINDOW).fill_(10 * count + index + 1)
        arena.layers[2].states["state"][2] = 1.0
        number = 2 * count + 1
        store.store(StoreOut(TransferId(number), "host", (), (SnapshotCopy(SlotId(2), number, window),)), arena)
        arena.poison(window, [SlotId(2)], Lifetime.WINDOW)
        store.load(LoadIn(TransferId(number + 1), "host", (), (SnapshotCopy(SlotId(3), number, landing),)), arena)
        num_ended = 0
        while num_ended < 2:
            num_ended += len(transfers.wait(60))
        for index, block in enumerate(landing):
            assert bool((arena.block(block, Lifetime.WINDOW) == 10 * count + index + 1).all())
        torch.testing.assert_close(arena.layers[2].states["state"][3].cpu(), torch.ones(4, 8, 24))
    store.close()


@pytest.mark.parametrize("position", [1, 64, 65, 101, 163, 200])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_stored_snapshots_take_the_pages_that_tiers_count(dtype: str, position: int) -> None:
    arena = ArenaTensors(SPEC, 12, "cpu")
    num_pages = SPEC.stored_snapshots(dtype).blocks_at(position)
    first = 6 * SPEC.window_blocks_per_slab
    window = tuple(BlockId(first + index) for index in range(SPEC.num_window_blocks_before(position)))
    action = StoreOut(TransferId(1), "host", (), (SnapshotCopy(SlotId(2), 1, window),))
    completions = Transfers(arena).completions
    HostStore(arena, num_pages, completions, slot_encoding(SPEC, dtype)).store(action, arena)
    with pytest.raises(CacheInvariantError, match=f"needs {num_pages} pages of host memory"):
        HostStore(arena, num_pages - 1, completions, slot_encoding(SPEC, dtype)).store(action, arena)


def test_buffer_before_a_disk_holds_several_snapshots() -> None:
    """A slab may be much smaller than a snapshot with a long window."""
    spec = replace(SPEC, layers=(ATTENTION, replace(ATTENTION, window_tokens=1024)))
    assert spec.stored_snapshots("float32").max_blocks > BUFFER_SLABS // BUFFER_SNAPSHOTS * spec.blocks_per_slab
    assert buffer_blocks(spec, "float32") == BUFFER_SNAPSHOTS * spec.stored_snapshots("float32").max_blocks
    assert buffer_blocks(replace(spec, has_window_blocks=False), "float32") == BUFFER_SLABS
