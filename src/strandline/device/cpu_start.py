"""Prepares a CPU before the first request: loads the Numba kernels and prefaults the first pages of the arena."""

from importlib import import_module
from threading import Thread
from typing import Final

from tqdm import tqdm

from strandline.kernels.arena import ArenaTensors
from strandline.kernels.platform import numba_modules, runs_numba

PROGRESS_DELAY_S: Final = 1.0
"""Delay before the progress bar appears."""

PREFAULTED_BYTES: Final = 512 * 2**20
"""How much of the arena to prefault, from its beginning, where slots and blocks are allocated first. On first use the
system zeroes a page, and a virtual machine asks its host for it: 2 to 12 ms per slot of 3 MiB."""


def prepare_cpu(arena: ArenaTensors, *, progress: bool) -> None:
    """Prefault the memory that is used first, and meanwhile load the Numba kernels."""
    prefaulting = Thread(target=arena.prefault, args=(PREFAULTED_BYTES,), name="prefault")
    prefaulting.start()
    if runs_numba():
        load_numba_kernels(progress=progress)
    prefaulting.join()


def load_numba_kernels(*, progress: bool) -> None:
    """Load the Numba kernels; compile them first where that was not done yet, once per machine and version: 30 s."""
    for module in tqdm(numba_modules(), "Compiling kernels", disable=not progress, delay=PROGRESS_DELAY_S):
        import_module(module)
