"""Prepares a CPU before the first request: loads the compiled kernels and prefaults the first pages of the arena."""

from importlib import import_module
from threading import Thread
from typing import Final

from tqdm import tqdm

from strandline.kernels.arena import ArenaTensors
from strandline.kernels.platform import numba_modules, runs_numba

PATIENCE_S: Final = 1.0
"""So long nobody needs to be told what is going on."""


TOUCHED_BYTES: Final = 512 * 2**20
"""Of a CPU's memory for the cache, from its beginning, whence slots and blocks are taken first. The system zeroes a
page before it hands it out, a virtual machine asks its host for it besides: 2 to 12 ms per slot of 3 MiB."""


def prepare_cpu(arena: ArenaTensors, *, progress: bool) -> None:
    """Touch the memory that is used first, and meanwhile load the compiled kernels."""
    touching = Thread(target=arena.prefault, args=(TOUCHED_BYTES,), name="touch memory")
    touching.start()
    if runs_numba():
        compile_loops(progress=progress)
    touching.join()


def compile_loops(*, progress: bool) -> None:
    """Load the CPU's compiled kernels, or compile them: once per machine and version, for half a minute."""
    for module in tqdm(numba_modules(), "Compiling kernels", disable=not progress, delay=PATIENCE_S):
        import_module(module)
