"""The allocator alone: every block and slot is accounted for, and compaction frees a slab without losing a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.slab_allocator import SlabAllocator
from strandline.errors import CacheInvariantError, ConfigError
from strandline.ids import BlockId, SlotId

SHAPES = st.tuples(st.integers(2, 7), st.integers(1, 6))
EVENTS = st.lists(
    st.sampled_from(["block", "blocks", "blocks", "slot", "free block", "free blocks", "free slot", "compact"]),
    max_size=80,
)


class Tenants:
    """Allocates and frees blocks and slots, and follows moves."""

    def __init__(self, num_slabs: int, blocks_per_slab: int) -> None:
        self.allocator = SlabAllocator(num_slabs, blocks_per_slab)
        self.contents: dict[BlockId, int] = {}
        """What each block holds: a serial number, which must survive moves."""
        self.slots: list[SlotId] = []
        self.num_taken = 0

    def handle(self, event: str, index: int) -> None:
        match event:
            case "block":
                self.take_blocks(1)
            case "blocks":
                self.take_blocks(1 + index % 9)
            case "slot":
                self.take_slot()
            case "free block" if self.contents:
                block = list(self.contents)[index % len(self.contents)]
                del self.contents[block]
                self.allocator.free_blocks([block])
            case "free blocks":
                gone = list(self.contents)[index % 5 :: 2]
                self.contents = {block: number for block, number in self.contents.items() if block not in gone}
                self.allocator.free_blocks(gone)
            case "free slot" if self.slots:
                self.allocator.free_slot(self.slots.pop(index % len(self.slots)))
            case "compact" if self.allocator.can_compact():
                self.compact()

    def take_blocks(self, num_blocks: int) -> None:
        room = self.allocator.num_free_blocks + self.allocator.num_free_slabs * self.allocator.blocks_per_slab
        blocks = self.allocator.take_blocks(num_blocks)
        assert len(blocks) == min(num_blocks, room)
        for block in map(BlockId, blocks):
            assert block not in self.contents
            self.num_taken += 1
            self.contents[block] = self.num_taken

    def take_slot(self) -> None:
        had_slab = self.allocator.num_free_slabs > 0
        slot = self.allocator.take_slot()
        assert (slot is not None) == had_slab
        if slot is not None:
            assert slot not in self.slots
            self.slots.append(slot)

    def compact(self) -> None:
        num_slabs, held = self.allocator.num_free_slabs, sorted(self.contents.values())
        for src, dst in self.allocator.compact():
            assert dst not in self.contents
            self.contents[dst] = self.contents.pop(src)
        assert self.allocator.num_free_slabs == num_slabs + 1
        assert sorted(self.contents.values()) == held

    def check(self) -> None:
        allocator = self.allocator
        assert allocator.used() == (set(self.slots), set(self.contents))
        assert (allocator.num_slots, allocator.num_blocks) == (len(self.slots), len(self.contents))
        slabs_of_blocks = {0} | {block // allocator.blocks_per_slab for block in self.contents}
        assert not slabs_of_blocks & set(self.slots), "a slab holds a slot and blocks"
        assert allocator.num_free_slabs == allocator.num_slabs - len(slabs_of_blocks) - len(self.slots)
        assert allocator.num_free_blocks == len(slabs_of_blocks) * allocator.blocks_per_slab - 1 - len(self.contents)
        assert BlockId(0) not in self.contents
        assert SlotId(0) not in self.slots


@given(SHAPES, EVENTS, st.randoms(use_true_random=False))
def test_accounting_is_exact(shape: tuple[int, int], events: list[str], choose: "st.random.Random") -> None:  # type: ignore[name-defined]
    tenants = Tenants(*shape)
    for event in events:
        tenants.handle(event, choose.randrange(1000))
        tenants.check()


@given(SHAPES, EVENTS, st.integers(0, 1000))
def test_compaction_frees_every_slab_that_free_blocks_amount_to(
    shape: tuple[int, int], events: list[str], index: int
) -> None:
    tenants = Tenants(*shape)
    for event in [*["block"] * 20, *events]:
        tenants.handle(event, index)
    while tenants.allocator.can_compact():
        tenants.compact()
        tenants.check()
    assert tenants.allocator.num_free_blocks < tenants.allocator.blocks_per_slab


def test_slab_0_never_becomes_a_slot() -> None:
    allocator = SlabAllocator(3, 4)
    assert sorted(slot for slot in iter(allocator.take_slot, None)) == [1, 2]
    assert sorted(allocator.take_blocks(12)) == [1, 2, 3]


def test_blocks_fill_open_slabs_before_another_is_opened() -> None:
    allocator = SlabAllocator(3, 4)
    blocks = allocator.take_blocks(3)
    assert allocator.num_free_slabs == 2
    assert list(blocks) == [1, 2, 3]
    allocator.take_blocks(1)
    assert allocator.num_free_slabs == 1


@pytest.mark.parametrize("block", [0, 1, 5, 99])
def test_freeing_an_unused_block_is_an_error_and_changes_nothing(block: int) -> None:
    allocator = SlabAllocator(3, 4)
    with pytest.raises(CacheInvariantError, match=f"block {block} freed"):
        allocator.free_blocks([block])
    assert list(allocator.take_blocks(11)) == [1, 2, 3, *range(4, 12)]


@pytest.mark.parametrize("slot", [0, 1, 99])
def test_freeing_an_unused_slot_is_an_error(slot: int) -> None:
    with pytest.raises(CacheInvariantError, match=f"slot {slot} freed"):
        SlabAllocator(3, 4).free_slot(SlotId(slot))


@pytest.mark.parametrize(("num_slabs", "blocks_per_slab"), [(1, 5), (0, 1), (5, 0)])
def test_arena_without_room_is_a_configuration_error(num_slabs: int, blocks_per_slab: int) -> None:
    with pytest.raises(ConfigError, match="raise --memory"):
        SlabAllocator(num_slabs, blocks_per_slab)
