"""How attention on a CPU reads rows of keys and values (``attention_numba.py``).

A row of keys or values is read as two halves: bfloat16 numbers as pairs in 32-bit words, whose upper and lower halves
each become float32 in one operation; float32 numbers as the first and the second half of the row. Queries and sums
are laid out accordingly. The rows of a block in e4m3 are converted first, to float32 in the second-level cache.
"""

# mypy: ignore-errors

import numpy as np
from numba import types
from numba.extending import overload

from strandline.kernels.runtime_numba import BFLOAT16, E4M3, helper, load_e4m3


def halves(row, half, i):
    """Return the numbers of a row of keys or values that stand at ``i`` of its two halves."""


@overload(halves, inline="always")
def _halves(row, half, i):
    if row.dtype == types.float32:
        return lambda row, half, i: (row[i], row[half + i])
    return lambda row, half, i: (
        np.uint32(row[i] << 16).view(np.float32),
        np.uint32(row[i] & np.uint32(0xFFFF0000)).view(np.float32),
    )


@helper
def split(kind, whole, halved, factor):
    """Lay a row out in the halves that keys and values are read in."""
    half = whole.size // 2
    for i in range(half):
        if kind == BFLOAT16:
            halved[i], halved[half + i] = factor * whole[2 * i], factor * whole[2 * i + 1]
        else:
            halved[i], halved[half + i] = factor * whole[i], factor * whole[half + i]


@helper
def join(kind, halved, whole, factor):
    """Undo ``split``."""
    half = whole.size // 2
    for i in range(half):
        if kind == BFLOAT16:
            whole[2 * i], whole[2 * i + 1] = factor * halved[i], factor * halved[half + i]
        else:
            whole[i], whole[half + i] = factor * halved[i], factor * halved[half + i]


@helper
def float32_rows(address, at, stride, kind, count, converted):
    """Return where float32 rows lie and how far apart: in memory, or in ``converted``, which they fill from e4m3."""
    if kind != E4M3:
        return address + 4 * at, stride
    for token in range(count):
        load_e4m3(address + at + token * stride, converted[token])
    return np.int64(converted.ctypes.data), converted.shape[1]
