"""Launches that begin before the launch before them has ended (programmatic dependent launch, from Hopper on).

A kernel launched with ``overlap_options`` may start as soon as every program of the one before it has either ended or
called ``release_next``. It calls ``wait_for_previous`` before it writes anything, and before it reads what a kernel
just before it wrote; after that call all earlier kernels have ended, since each of them waited, too.

Most kernels call ``release_next`` after ``wait_for_previous``. Short ones that come before loads of weights or states
(norms, convolutions of a token, first factors of adapters) call it first: the next kernel then loads them during two
launches instead of one.

A product of more than a few rows that adds what adapters do releases first, and waits only before it adds that: the
launch just before, of the first factors, waits for the rows before it releases.

Invariant: when a kernel starts, everything has been done except the work of the kernel before it, and, if that one
releases first, of the one before that, and so on. Before its wait a kernel may read weights, states of earlier steps,
and tables made before the first layer: between these and their readers there are kernels that wait first. What else it
reads, the kernel before it must have waited for before it released (the experts of few tokens read logits so).
``tests/cpu/kernels/test_overlapping_launches.py`` watches models and adapters for reads that break it.
"""
# mypy: ignore-errors

from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strandline.kernels.gpu import Gpu, gpu_of


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
    return _options(gpu_of(x.device))


@cache
def _options(gpu: Gpu) -> dict[str, bool]:
    return {"OVERLAPS": True, "launch_pdl": True} if gpu.can_overlap else {"OVERLAPS": False}
