"""The C library's heap on a CPU: scratch memory is kept instead of being returned after every operation.

By default glibc maps every large tensor afresh and unmaps it when it dies, so that the kernel zeroes the same pages
again and again. Keeping them made the prefill of a small model 1.3 times as fast (benchmarks/results). An idle engine
returns them.
"""

import ctypes
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Names and numbers of glibc's malloc.h."""

KEPT_BYTES: Final = 256 * 2**20
"""Free memory at the heap's top that is kept."""
LARGEST_KEPT_BYTES: Final = 32 * 2**20
"""Larger tensors are mapped separately; glibc allows no higher threshold."""


def keep_scratch_memory() -> bool:
    """Set the heap's thresholds for this process; return False if the C library has no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def release_free_memory() -> bool:
    """Return the heap's unused memory to the system; return False if there was none, or the C library cannot."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and bool(malloc_trim(0))
