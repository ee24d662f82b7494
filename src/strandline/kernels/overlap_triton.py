"""Launches that begin before the launch before them has ended (programmatic dependent launch, from Hopper on).

A kernel launched with ``overlap_options`` may start as soon as every program of the one before it has either ended or
called ``release_next``. It calls ``wait_for_previous`` before it writes anything, and before it reads what the kernel
just before it wrote; after that call all earlier kernels have ended, since each of them waited, too. What is older it
may read at once: weights, tables, states.

Invariant: a kernel that calls ``release_next`` has called ``wait_for_previous`` before it, so that a kernel which
starts early finds everything done but for the work of the one kernel before it.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strandline.kernels.gpu import gpu_of


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels have ended and what they wrote can be read."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def release_next(OVERLAPS: tl.constexpr):
    """Let the next kernel start, once every program of this one has come here or ended."""
    if OVERLAPS:
        gdc_launch_dependents()


def overlap_options(x: Tensor) -> dict[str, bool]:
    """Return the launch arguments, ``OVERLAPS`` among them, for the device of ``x``."""
    return {"OVERLAPS": True, "launch_pdl": True} if gpu_of(x.device).can_overlap else {"OVERLAPS": False}
