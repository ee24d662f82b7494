"""Allocation of slots and blocks from one arena of slabs: a slab holds one slot or ``blocks_per_slab`` blocks.

Slab ``s`` is slot ``s``, or the blocks ``[s * blocks_per_slab, (s + 1) * blocks_per_slab)``. There is no static
share: any slab can hold either. Slab 0 contains the null slot and the null block, so it never becomes a slot; its
other blocks are ordinary.

When a slot is wanted and free blocks are scattered over several slabs, ``compact`` returns the blocks to move. Blocks
that a transfer writes are *held*: their slabs are not emptied.

Blocks of another size come from an allocator of their own, which shares the free slabs. It has no blocks in slab 0.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import cast

from strandline.errors import CacheInvariantError, ConfigError
from strandline.ids import BlockId, SlotId


class SlabAllocator:
    """Allocates slots and blocks, whatever they hold.

    Args:
        num_null_blocks: blocks at the start of slab 0 that are not allocated.
        shares: has the free slabs; None: they are its own.
    """

    def __init__(
        self,
        num_slabs: int,
        blocks_per_slab: int,
        max_slots: int | None = None,
        *,
        num_null_blocks: int = 1,
        shares: "SlabAllocator | None" = None,
    ) -> None:
        if num_slabs < 2 or blocks_per_slab < 1:
            raise ConfigError(
                f"the cache got room for {num_slabs} slabs of {blocks_per_slab} blocks; at least 2 are needed; "
                "raise --memory"
            )
        self.num_slabs = num_slabs
        self.blocks_per_slab = blocks_per_slab
        self.max_slots = max_slots
        """Slabs reserved for slots, the others being for blocks; None: no static share."""
        self._free_slabs: list[int] = list(range(num_slabs - 1, 0, -1)) if shares is None else shares._free_slabs
        self._slots = set[int]()
        self._free_in: dict[int, array[int]] = {}
        """Free blocks of every slab that holds blocks and is not full; the last is allocated first."""
        self._taken_in = {0: bytearray(blocks_per_slab)} if shares is None else dict[int, bytearray]()
        """By slab that holds blocks: whether each of its blocks is taken."""
        self.num_null_blocks = num_null_blocks if shares is None else 0
        first = array("i", range(blocks_per_slab - 1, num_null_blocks - 1, -1) if shares is None else ())
        if first:
            self._free_in[0] = first
        self.num_free_blocks = len(first)
        """Free blocks in slabs that hold blocks; a free slab counts in ``num_free_slabs``."""
        self._held = Counter[int]()
        """By slab: its held blocks."""

    @property
    def num_free_slabs(self) -> int:
        return len(self._free_slabs)

    @property
    def max_block_slabs(self) -> int:
        """Slabs that may hold blocks, slab 0 included."""
        return self.num_slabs - (self.max_slots or 0)

    @property
    def num_slots(self) -> int:
        """Allocated slots."""
        return len(self._slots)

    @property
    def num_blocks(self) -> int:
        """Allocated blocks."""
        return len(self._taken_in) * self.blocks_per_slab - self.num_free_blocks - self.num_null_blocks

    def take_slot(self) -> SlotId | None:
        """Allocate a slot; None when no slab is free."""
        if not self._free_slabs or len(self._slots) == self.max_slots:
            return None
        slab = self._free_slabs.pop()
        self._slots.add(slab)
        return SlotId(slab)

    def free_slot(self, slot: SlotId) -> None:
        if slot not in self._slots:
            raise CacheInvariantError(f"slot {slot} freed but not in use")
        self._slots.remove(slot)
        self._free_slabs.append(slot)

    def take_blocks(self, num_blocks: int) -> "array[int]":
        """Allocate blocks, first in slabs that hold blocks already; fewer than asked for when the arena is full."""
        taken = array("i")
        while len(taken) < num_blocks and (self._free_in or self._open_slab()):
            slab, free = next(iter(self._free_in.items()))
            missing = num_blocks - len(taken)
            part, is_taken, first = free[: -missing - 1 : -1], self._taken_in[slab], slab * self.blocks_per_slab
            for block in part:
                is_taken[block - first] = True
            taken += part
            del free[-missing:]
            if not free:
                del self._free_in[slab]
        self.num_free_blocks -= len(taken)
        return taken

    def take_in_free_slabs(self, num_blocks: int) -> "array[int]":
        """Allocate blocks in free slabs alone, so that holding them keeps no others from being moved."""
        others, self._free_in = self._free_in, {}
        taken = self.take_blocks(num_blocks)
        self._free_in = others | self._free_in
        return taken

    def _open_slab(self) -> bool:
        """Use a free slab for blocks; return False if no slab is free."""
        if not self._free_slabs or len(self._taken_in) == self.max_block_slabs:
            return False
        slab = self._free_slabs.pop()
        first = slab * self.blocks_per_slab
        self._taken_in[slab] = bytearray(self.blocks_per_slab)
        self._free_in[slab] = array("i", range(first + self.blocks_per_slab - 1, first - 1, -1))
        self.num_free_blocks += self.blocks_per_slab
        return True

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Free blocks, in this order."""
        size, slab = self.blocks_per_slab, -1
        is_taken: bytearray | None = None
        free: array[int] | None = None
        for block in blocks:
            if block // size != slab:  # blocks of a slab often follow each other
                slab = block // size
                is_taken, free = self._taken_in.get(slab), self._free_in.get(slab)
            if is_taken is None or not is_taken[block % size]:
                raise CacheInvariantError(f"block {block} freed but not in use")
            is_taken[block % size] = False
            self.num_free_blocks += 1
            if free is None:
                free = self._free_in[slab] = array("i")
            free.append(block)
            if len(free) == size and slab:
                self._close_slab(slab)
                is_taken = None

    def _close_slab(self, slab: int) -> None:
        del self._free_in[slab], self._taken_in[slab]
        self.num_free_blocks -= self.blocks_per_slab
        self._free_slabs.append(slab)

    def hold(self, blocks: Iterable[int]) -> None:
        """Keep blocks where they are until ``let_go``."""
        self._held.update(block // self.blocks_per_slab for block in blocks)

    def let_go(self, blocks: Iterable[int]) -> None:
        """Let ``compact`` move blocks again that were held."""
        self._held.subtract(block // self.blocks_per_slab for block in blocks)
        self._held = +self._held

    @property
    def num_held_slabs(self) -> int:
        """Slabs that cannot be emptied because of held blocks, without slab 0, which never is."""
        return len(self._held) - (0 in self._held)

    def num_slabs_for(self, num_blocks: int) -> int:
        """Return how many slabs this many blocks take at least, without slab 0 and its blocks."""
        size = self.blocks_per_slab
        in_null_slab = size - self.num_null_blocks if self.num_null_blocks else 0
        return max(-(-max(num_blocks - in_null_slab, 0) // size), self.num_held_slabs)

    def can_compact(self) -> bool:
        """Return whether moving blocks can free a slab."""
        if self.num_free_blocks < self.blocks_per_slab:
            return False
        slab = self._emptiest_slab()
        return slab is not None and self.num_free_blocks - self._num_free(slab) >= self._num_used(slab)

    def compact(self) -> list[tuple[BlockId, BlockId]]:
        """Free the slab with the fewest blocks in use; return the moves ``(from, to)`` of its blocks.

        ``can_compact`` must hold.
        """
        slab = self._emptiest_slab()
        if slab is None:
            raise CacheInvariantError("no slab to compact")
        free = set(self._free_in.pop(slab, ()))
        self.num_free_blocks -= len(free)
        first = slab * self.blocks_per_slab
        used = [b for b in range(first, first + self.blocks_per_slab) if b not in free]
        targets = self.take_blocks(len(used))
        if len(targets) < len(used):
            raise CacheInvariantError(f"slab {slab} cannot be emptied: no room for its {len(used)} blocks")
        del self._taken_in[slab]
        self._free_slabs.append(slab)
        return [(BlockId(src), BlockId(dst)) for src, dst in zip(used, targets, strict=True)]

    def _emptiest_slab(self) -> int | None:
        held = self._held
        candidates = [slab for slab in self._free_in if slab and slab not in held]
        if not candidates and held:
            # The free blocks share slabs with held ones: a full slab is emptied into them.
            candidates = sorted(self._taken_in.keys() - held.keys() - {0})[:1]
        return max(candidates, key=self._num_free, default=None)

    def _num_free(self, slab: int) -> int:
        return len(self._free_in.get(slab, ()))

    def _num_used(self, slab: int) -> int:
        return self.blocks_per_slab - self._num_free(slab)

    def used(self) -> tuple[set[SlotId], set[BlockId]]:
        """Return all allocated slots and blocks, for checks: linear in the size of the arena."""
        size = self.blocks_per_slab
        blocks = set(chain.from_iterable(range(slab * size, (slab + 1) * size) for slab in self._taken_in))
        blocks.difference_update(range(self.num_null_blocks), *self._free_in.values())
        return cast(set[SlotId], set(self._slots)), cast(set[BlockId], blocks)
