"""Snapshots with window blocks in host memory: all of their bytes return."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from strandline.device.stores.host_store import HostStore, PinnedStore
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.errors import CacheInvariantError
from strandline.ids import BlockId, Lifetime, SlotId, TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import LoadIn, SnapshotCopy, StoreOut
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec
from strandline.tier_sizes import BUFFER_SLABS, BUFFER_SNAPSHOTS, buffer_blocks

ATTENTION = kv_spec(2, 16, "float32")
RECURRENT = LayerSpec(states=(TensorSpec("state", (4, 8, 24), "float32", is_recurrent=True),))
WINDOWS = tuple(replace(kv_spec(heads, 16, "float32"), window_tokens=size) for heads, size in ((2, 100), (1, 30)))
SPEC = ModelSpec((ATTENTION, *WINDOWS, RECURRENT), 32, "float32", has_window_blocks=True)
NUM_SLABS = 16


def window_blocks(first_slab: int, counts: Sequence[int]) -> tuple[tuple[BlockId, ...], ...]:
    """Return this many window blocks of each size, from two slabs each on."""
    slabs = enumerate(zip(SPEC.window_blocks_per_slab, counts, strict=True))
    firsts = [((first_slab + 2 * number) * per_slab, count) for number, (per_slab, count) in slabs]
    return tuple(tuple(map(BlockId, range(first, first + count))) for first, count in firsts)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_windows_return_with_their_slots(dtype: str) -> None:
    check_windows_return(HostStore, "cpu", dtype)


def check_windows_return(kind: type[HostStore] | type[PinnedStore], device: str, dtype: str) -> None:
    """Store snapshots, overwrite them, and load them into other slots and window blocks."""
    arena = ArenaTensors(SPEC, NUM_SLABS, device)
    transfers = Transfers(arena)
    num_pages = 6 * SPEC.stored_snapshots(dtype).max_blocks
    store = kind(arena, num_pages, transfers.completions, slot_encoding(SPEC, dtype))
    for case, counts in enumerate(product(range(SPEC.window_sizes[0].max_blocks + 1), range(2))):
        windows, landing = window_blocks(6, counts), window_blocks(10, counts)
        for number, (window, target) in enumerate(zip(windows, landing, strict=True), 1):
            for index, block in enumerate(window):
                arena.block(block, Lifetime(number)).fill_(30 * case + 10 * number + index)
            arena.poison(target, [], Lifetime(number))
        arena.layers[3].states["state"][2] = 1.0
        first = 2 * case + 1
        store.store(StoreOut(TransferId(first), "host", (), (SnapshotCopy(SlotId(2), first, windows),)), arena)
        for number, window in enumerate(windows, 1):
            arena.poison(window, [SlotId(2)], Lifetime(number))
        store.load(LoadIn(TransferId(first + 1), "host", (), (SnapshotCopy(SlotId(3), first, landing),)), arena)
        num_ended = 0
        while num_ended < 2:
            num_ended += len(transfers.wait(60))
        for number, target in enumerate(landing, 1):
            for index, block in enumerate(target):
                assert bool((arena.block(block, Lifetime(number)) == 30 * case + 10 * number + index).all())
        torch.testing.assert_close(arena.layers[3].states["state"][3].cpu(), torch.ones(4, 8, 24))
    store.close()


@pytest.mark.parametrize("position", [1, 64, 65, 101, 163, 200])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_stored_snapshots_take_the_pages_that_tiers_count(dtype: str, position: int) -> None:
    arena = ArenaTensors(SPEC, NUM_SLABS, "cpu")
    num_pages = SPEC.stored_snapshots(dtype).blocks_at(position)
    windows = window_blocks(6, [size.num_blocks_before(position) for size in SPEC.window_sizes])
    action = StoreOut(TransferId(1), "host", (), (SnapshotCopy(SlotId(2), 1, windows),))
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
