"""The rows of a step that have adapters, in tiles with one adapter each, as kernels take them.

Shape suffixes as in ``kernels/gemm/low_rank.py``.
"""

import numpy as np

from strandline.kernels.gemm.low_rank import NO_ROW, NO_SLOT, TILE_ROWS


def tile_rows(slots_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ``TiledRows`` of a step as arrays, given the slot of each row; ``NO_SLOT``: it has no adapter."""
    rows, slots = [np.empty(0, np.int64)], list[int]()
    for slot in np.unique(slots_T[slots_T != NO_SLOT]).tolist():
        own = (slots_T == slot).nonzero()[0]
        num_tiles = -(-len(own) // TILE_ROWS)
        rows += own, np.full(num_tiles * TILE_ROWS - len(own), NO_ROW)
        slots += [slot] * num_tiles
    return np.concatenate(rows), np.array(slots, dtype=np.int64), slots_T


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return how many tiles some rows may need: each adapter's last one may hold a single row."""
    return (num_rows + (TILE_ROWS - 1) * min(num_rows, num_slots)) // TILE_ROWS
