"""Copies between arena and host on a GPU's own stream: right bytes, in the order of what was launched."""

import pytest
import torch

from strandline.device.stores.arena_copies import ArenaCopies, Entries
from strandline.ids import BlockId, SlotId
from strandline.kernels.arena import ArenaTensors
from strandline.specs import LayerSpec, ModelSpec, TensorSpec, kv_spec

DEVICE = "cuda"
SPEC = ModelSpec(
    (kv_spec(2, 16, "bfloat16"), LayerSpec(states=(TensorSpec("state", (64, 65), "float32"),))), 32, "bfloat16"
)


@pytest.fixture
def arena() -> ArenaTensors:
    arena = ArenaTensors(SPEC, 12, DEVICE)
    arena.bytes.copy_(torch.randint(0, 256, arena.bytes.shape, dtype=torch.uint8))
    return arena


def test_another_arena_gets_the_bytes_that_were_read(arena: ArenaTensors) -> None:
    other = ArenaTensors(SPEC, 12, DEVICE)
    blocks, slots = [BlockId(3), BlockId(1), BlockId(2)], [SlotId(11), SlotId(7)]
    source, target = ArenaCopies(arena), ArenaCopies(other)
    data = bytearray(source.read(Entries(blocks, slots), source.fence()))
    assert len(data) == 3 * SPEC.raw_block_bytes + 2 * SPEC.raw_slot_bytes
    target.write(Entries(blocks, slots), data, target.fence())
    assert all(torch.equal(arena.block(block), other.block(block)) for block in blocks)
    assert all(torch.equal(arena.slot(slot), other.slot(slot)) for slot in slots)
    assert not other.block(BlockId(5)).any()


def test_reads_and_writes_follow_what_was_launched_before(arena: ArenaTensors) -> None:
    copies = ArenaCopies(arena)
    weights = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(50):
        weights = torch.tanh(weights @ weights)
    arena.block(BlockId(3)).fill_(7)
    assert set(copies.read(Entries([3]), copies.fence())) == {7}
    for _ in range(50):
        weights = torch.tanh(weights @ weights)
    arena.slot(SlotId(9)).fill_(5)
    copies.write(Entries(slots=[9]), bytearray([6]) * SPEC.raw_slot_bytes, copies.fence())
    assert set(arena.slot(9).tolist()) == {6}  # type: ignore[arg-type]


def test_pinned_memory_for_pieces_is_written_from(arena: ArenaTensors) -> None:
    other = ArenaTensors(SPEC, 12, DEVICE)
    source, target = ArenaCopies(arena), ArenaCopies(other)
    blocks, slots = [BlockId(3), BlockId(1), BlockId(2)], [SlotId(11), SlotId(7)]
    data = source.read(Entries(blocks, slots), source.fence())
    room = target.room(len(data) + 100)
    assert torch.frombuffer(room, dtype=torch.uint8).is_pinned()
    room[: len(data)] = data
    target.write(Entries(blocks, slots), room[: len(data)], target.fence())
    assert target.read(Entries(blocks, slots), target.fence()) == data
