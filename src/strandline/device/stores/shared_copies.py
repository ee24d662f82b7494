"""Copies between a rank's memory and memory that it shares with the engine's process, for a while.

There, blocks and slots lie one after the other as the whole model has them; each rank copies its own part. The memory
is a file without a name, which a path under ``/proc`` leads to as long as the engine's process keeps it open.

Shape suffixes: N blocks or slots, X the bytes of one that a rank holds, Y those that the whole model has, Z bytes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from strandline.device.stores.arena_copies import ArenaCopies, Fence
from strandline.kernels.ranks import Ranks
from strandline.specs import ModelSpec
from strandline.transfer.rank_parts import RankParts

Copy = Callable[[], None]
"""A copy that is to be made, in any thread."""


class SharedCopies:
    """Copies a rank's part of blocks and slots. ``begin_`` methods belong to the thread that launches steps."""

    def __init__(self, copies: ArenaCopies, spec: ModelSpec, ranks: Ranks) -> None:
        self._copies, self._spec = copies, spec
        self._parts = RankParts(spec, ranks.rank, ranks.size)

    def begin_read(self, path: str, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Return what copies blocks and slots to shared memory, as everything launched so far leaves them.

        Nothing may write them meanwhile.
        """
        return partial(self._read, path, blocks, slots, self._copies.fence())

    def begin_write(self, path: str, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Return what copies blocks and slots from shared memory, after everything launched so far.

        Nothing may read or write them meanwhile. They are written when the copy returns.
        """
        return partial(self._write, path, blocks, slots, self._copies.fence())

    def _read(self, path: str, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> None:
        part_Z = np.frombuffer(self._copies.read(blocks, slots, fence), np.uint8)
        blocks_NX, slots_NX = _entries(part_Z, len(blocks), self._spec)
        blocks_NY, slots_NY = _entries(np.memmap(path, np.uint8, "r+"), len(blocks), self._spec.whole)
        self._parts.join_blocks(blocks_NX, blocks_NY)
        self._parts.join_slots(slots_NX, slots_NY)

    def _write(self, path: str, blocks: Sequence[int], slots: Sequence[int], fence: Fence) -> None:
        spec = self._spec
        part_Z = np.zeros(len(blocks) * spec.raw_block_bytes + len(slots) * spec.raw_slot_bytes, np.uint8)
        blocks_NX, slots_NX = _entries(part_Z, len(blocks), spec)
        blocks_NY, slots_NY = _entries(np.memmap(path, np.uint8, "r"), len(blocks), spec.whole)
        self._parts.split_blocks(blocks_NY, blocks_NX)
        self._parts.split_slots(slots_NY, slots_NX)
        self._copies.write(blocks, slots, part_Z.data, fence)


def _entries(data_Z: np.ndarray, num_blocks: int, spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks and the slots behind them, as views with a row for each."""
    cut = num_blocks * spec.raw_block_bytes
    return data_Z[:cut].reshape(-1, spec.raw_block_bytes), data_Z[cut:].reshape(-1, spec.raw_slot_bytes)
