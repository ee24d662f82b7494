"""``insert_logged`` in Triton: two launches for up to three of a layer's tensors; the log is read, then written.

Shape suffixes as in ``kernels/recurrences/rerun.py``; Q logged tokens, K drafts.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import RerunBatch
from strandline.kernels.sizes import cdiv

BLOCK = 1024

TOGETHER = 3
"""Tensors of a launch."""


@triton.jit
def _copy_row(from_ptr, to_ptr, from_row, to_row, from_stride, to_stride, size, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(from_ptr + from_row * from_stride + column, mask=column < size)
    tl.store(to_ptr + to_row * to_stride + column, values, mask=column < size)


# Where slices of small tables start must not ask for a kernel to be compiled anew.
@triton.jit(
    do_not_specialize=["num_step_rows"],
    do_not_specialize_on_alignment=["step_rows_ptr", "logged_rows_ptr", "logged_entries_ptr"],
)
def _insert_kernel(
    inputs_0,
    inputs_1,
    inputs_2,
    log_0,
    log_1,
    log_2,
    out_0,
    out_1,
    out_2,
    size_0,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    step_rows_ptr,
    logged_rows_ptr,
    logged_entries_ptr,
    num_step_rows,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a row of the step, or a logged one, to its row among all."""
    row = tl.program_id(0).to(tl.int64)
    if row < num_step_rows:
        to_row = tl.load(step_rows_ptr + row)
        _copy_row(inputs_0, out_0, row, to_row, stride_0, size_0, size_0, BLOCK)
        if NUM > 1:
            _copy_row(inputs_1, out_1, row, to_row, stride_1, size_1, size_1, BLOCK)
        if NUM > 2:
            _copy_row(inputs_2, out_2, row, to_row, stride_2, size_2, size_2, BLOCK)
    else:
        entry = tl.load(logged_entries_ptr + row - num_step_rows)
        to_row = tl.load(logged_rows_ptr + row - num_step_rows)
        _copy_row(log_0, out_0, entry, to_row, size_0, size_0, size_0, BLOCK)
        if NUM > 1:
            _copy_row(log_1, out_1, entry, to_row, size_1, size_1, size_1, BLOCK)
        if NUM > 2:
            _copy_row(log_2, out_2, entry, to_row, size_2, size_2, size_2, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["draft_rows_ptr", "draft_entries_ptr"])
def _log_kernel(
    inputs_0,
    inputs_1,
    inputs_2,
    log_0,
    log_1,
    log_2,
    size_0,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    draft_rows_ptr,
    draft_entries_ptr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a draft's row to the log."""
    draft = tl.program_id(0)
    row = tl.load(draft_rows_ptr + draft)
    entry = tl.load(draft_entries_ptr + draft)
    _copy_row(inputs_0, log_0, row, entry, stride_0, size_0, size_0, BLOCK)
    if NUM > 1:
        _copy_row(inputs_1, log_1, row, entry, stride_1, size_1, size_1, BLOCK)
    if NUM > 2:
        _copy_row(inputs_2, log_2, row, entry, stride_2, size_2, size_2, BLOCK)


def insert_logged(rerun: RerunBatch, log: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As ``rerun.insert_logged``; logs are contiguous."""
    outs = tuple(x.new_empty(rerun.num_rows, *x.shape[1:]) for x in inputs)
    for first in range(0, len(inputs), TOGETHER):
        part = slice(first, first + TOGETHER)
        _insert(rerun, log[part], [x.flatten(1) for x in inputs[part]], outs[part])
    return outs


def _insert(rerun: RerunBatch, log: tuple[Tensor, ...], inputs: list[Tensor], outs: tuple[Tensor, ...]) -> None:
    """Copy up to three tensors."""
    count, num_step_rows, num_drafts = len(inputs), len(rerun.step_rows_T), len(rerun.draft_rows_K)
    padding = (None,) * (TOGETHER - count)
    any_size = (0,) * (TOGETHER - count)
    inputs_3 = (*inputs, *padding)
    log_3, out_3 = (*log, *padding), (*outs, *padding)
    sizes = (*(x.shape[1] for x in inputs), *any_size)
    strides = (*(x.stride(0) for x in inputs), *any_size)
    num_blocks = cdiv(max(sizes), BLOCK)
    num_rows = num_step_rows + len(rerun.logged_rows_Q)
    if num_rows:
        _insert_kernel[(num_rows, num_blocks)](
            *inputs_3, *log_3, *out_3, *sizes, *strides,
            rerun.step_rows_T, rerun.logged_rows_Q, rerun.logged_entries_Q, num_step_rows,
            NUM=count, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    if num_drafts:
        _log_kernel[(num_drafts, num_blocks)](
            *inputs_3, *log_3, *sizes, *strides, rerun.draft_rows_K, rerun.draft_entries_K,
            NUM=count, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
