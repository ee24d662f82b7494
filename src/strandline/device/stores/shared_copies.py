"""Copies between a rank's memory and memory that it shares with the engine's process, for a while.

There, blocks and slots lie one after the other as the whole model has them; each rank copies its own part. The memory
is a file without a name, which a path under ``/proc`` leads to as long as the engine's process keeps it open.

Shape suffixes: N blocks or slots, X the bytes of one that a rank holds, Y those that the whole model has, Z bytes.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from strandline.device.stores.arena_copies import ArenaCopies, Entries, Fence
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

    def begin_read(self, path: str, entries: Entries) -> Copy:
        """Return what copies entries to shared memory, as everything launched so far leaves them.

        Nothing may write them meanwhile.
        """
        return partial(self._read, path, entries, self._copies.fence())

    def begin_write(self, path: str, entries: Entries) -> Copy:
        """Return what copies entries from shared memory, after everything launched so far.

        Nothing may read or write them meanwhile. They are written when the copy returns.
        """
        return partial(self._write, path, entries, self._copies.fence())

    def _read(self, path: str, entries: Entries, fence: Fence) -> None:
        part_Z = np.frombuffer(self._copies.read(entries, fence), np.uint8)
        whole_Z = np.memmap(path, np.uint8, "r+")
        self._parts.join(list(_rows(part_Z, entries, self._spec)), list(_rows(whole_Z, entries, self._spec.whole)))

    def _write(self, path: str, entries: Entries, fence: Fence) -> None:
        part_Z = np.zeros(sum(entries.sizes(self._spec)), np.uint8)
        whole_Z = np.memmap(path, np.uint8, "r")
        self._parts.split(list(_rows(whole_Z, entries, self._spec.whole)), list(_rows(part_Z, entries, self._spec)))
        self._copies.write(entries, part_Z.data, fence)


def _rows(data_Z: np.ndarray, entries: Entries, spec: ModelSpec) -> Iterator[np.ndarray]:
    """Yield the blocks, the slots and the window blocks that follow one another, as views with a row for each."""
    start = 0
    for ids, num_bytes in zip(entries.kinds, entries.sizes(spec), strict=True):
        yield data_Z[start : start + num_bytes].reshape(len(ids), num_bytes // max(len(ids), 1))
        start += num_bytes
