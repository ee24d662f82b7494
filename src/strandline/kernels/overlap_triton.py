"""Launches that begin before the launch before them has ended (programmatic dependent launch, from Hopper on).

A kernel launched with ``overlap_options`` may start as soon as every program of the one before it has either ended or
called ``release_next``. It calls ``wait_for_previous`` before it writes anything, and before it reads what the kernel
just before it wrote; after that call all earlier kernels have ended, since each of them waited, too. What is older it
may read at once: weights, tables, states.

Invariant: a kernel that calls ``release_next`` has called ``wait_for_previous`` before it, so that a kernel which
starts early finds everything done but for the work of the one kernel before it.
"""
# mypy: ignore-errors

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)
"""Compute capability of the first devices that can."""


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


@triton.jit
def prefetch_rows(weight_ptr, first_row, num_rows, row_bytes, start, size, ROWS: tl.constexpr):
    """Request bytes ``[start, start + size)`` of some rows into the second-level cache, as far as they exist.

    Rows lie at multiples of 16 bytes and have as many; others are not requested. Only devices whose launches overlap
    have the instruction: one per row, by one thread each.
    """
    row_N = first_row + tl.arange(0, ROWS)
    num_bytes = tl.where(row_bytes % 16 == 0, tl.minimum(size, row_bytes - start), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 q, t, $3; setp.gt.and.s32 p, $2, 0, q; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [
            (weight_ptr + row_N * row_bytes + start).to(tl.int64),
            tl.where(row_N < num_rows, num_bytes, 0),
            # Further threads hold the same rows.
            tl.full([ROWS], ROWS, tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def overlap_options(x: Tensor) -> dict[str, bool]:
    """Return the launch arguments, ``OVERLAPS`` among them, for the device of ``x``."""
    if x.is_cuda and _can_overlap(x.get_device()):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@cache
def _can_overlap(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
