"""The heap's settings are accepted where they exist, and the memory that they keep can be released."""

import ctypes
import subprocess
import sys

import pytest

from strandline.device.hardware.heap import keep_scratch_memory

SAY_WHAT_IS_KEPT = """
import os
import torch
from strandline.device.hardware.heap import release_free_memory, keep_scratch_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

assert keep_scratch_memory()
before = resident_mib()
tensors = [torch.ones(4 * 2**20) for _ in range(8)]
del tensors
kept = resident_mib() - before
given_back = release_free_memory()
print(kept, given_back, resident_mib() - before)
"""


def test_c_library_accepts_the_heap_settings() -> None:
    assert keep_scratch_memory() == hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="a C library without malloc_trim")
def test_kept_memory_can_be_released() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY_WHAT_IS_KEPT], capture_output=True, text=True, check=True, timeout=120
    )
    kept, given_back, left = done.stdout.split()
    assert float(kept) > 100
    assert given_back == "True"
    assert float(left) < 30
