"""The rows of a step that have adapters, in tiles with one adapter each, as kernels take them.

Shape suffixes as in ``kernels/gemm/low_rank.py``.
"""

from typing import NamedTuple

import numpy as np

from strandline.kernels.gemm.low_rank import NO_ROW, NO_SLOT, TILE_ROWS


class HostTiles(NamedTuple):
    """``TiledRows`` on the host."""

    rows_M: np.ndarray
    slots_U: np.ndarray
    slots_T: np.ndarray

    @classmethod
    def of(cls, slots_T: np.ndarray) -> "HostTiles":
        """Put rows into tiles, by the slot that each has; ``NO_SLOT``: it has no adapter."""
        rows, slots = list[np.ndarray](), list[int]()
        for slot in np.unique(slots_T[slots_T != NO_SLOT]).tolist():
            own = (slots_T == slot).nonzero()[0]
            num_tiles = -(-len(own) // TILE_ROWS)
            rows += own, np.full(num_tiles * TILE_ROWS - len(own), NO_ROW)
            slots += [slot] * num_tiles
        return cls(np.concatenate([np.empty(0, np.int64), *rows]), np.array(slots, dtype=np.int64), slots_T)


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return how many tiles some rows may need: each adapter's last one may hold a single row."""
    return (num_rows + (TILE_ROWS - 1) * min(num_rows, num_slots)) // TILE_ROWS
