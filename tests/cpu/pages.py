"""Which pages of a tensor the system has handed out."""

import resource
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

PAGEMAP = Path("/proc/self/pagemap")
"""A 64-bit number for each page of the process; its highest bit says that the page is there."""

needs_pagemap = pytest.mark.skipif(not PAGEMAP.exists(), reason="only Linux tells which pages a process has")


def resident_share(x: Tensor) -> float:
    """Return the share of the pages of a dense tensor that are in memory."""
    page_bytes = resource.getpagesize()
    first = x.data_ptr() // page_bytes
    end = -(-(x.data_ptr() + x.nbytes) // page_bytes)
    with PAGEMAP.open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (end - first)), np.uint64)
    return float((entries >> np.uint64(63)).mean())
