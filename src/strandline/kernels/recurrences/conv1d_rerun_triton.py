"""The convolution of a step that verifies drafts, in one Triton launch: four otherwise, and most of a few rows' time.

A program owns some channels of one sequence. It reads its logged inputs, then the step's own, ``ROWS`` at a time, and
convolves them after the window: a thread has all of these rows of its channels, so that each is loaded once. Windows
are stored from the same registers, and drafts logged, unless a sequence has more rows: these are logged when all of the
log has been read. Where layers log further inputs, the last programs put these in order.

Shape suffixes as in ``conv1d.py``; R rows, of logged tokens and the step's own, D columns of a further input.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences import conv1d_triton
from strandline.kernels.recurrences.conv1d import Convolution
from strandline.kernels.recurrences.conv1d_triton import activate
from strandline.kernels.recurrences.rerun_triton import insert_logged
from strandline.kernels.sizes import cdiv, next_power_of_2, strides

FEW_ROWS, ROWS = 5, 8
"""Convolved at once, by the mean of all sequences: all of one that verifies two drafts, or three."""

ORDERED = tl.constexpr(8)
"""Rows of a further input that are put in order at once."""

LAUNCHES = {4: (32, 1), 1 << 62: (128, 1)}
"""Channels and warps of a program, by the largest number of sequences."""

MAX_OTHERS = 2
"""Inputs of a launch after the first."""

MAX_COLUMNS = 256
"""Most columns of such an input: one program handles all of them."""

NO_ENTRY = tl.constexpr(-1)

TABLES = "conv1d_rerun_triton"


def causal_conv1d_rerun(
    inputs: tuple[Tensor, ...],
    log: tuple[Tensor, ...],
    rerun: RerunBatch,
    convolution: Convolution,
    window_SRC: Tensor,
    slots: Slots,
    chunks: ChunkTable,
) -> tuple[Tensor, ...]:
    """Put logged inputs before the step's own; return all, the first convolved. As in ``conv1d.py``."""
    others = inputs[1:]
    where = (convolution, window_SRC, slots, chunks)
    if not chunks.is_short or len(others) > MAX_OTHERS or any(x.shape[1] > MAX_COLUMNS for x in others):
        x_RC, *others_RD = insert_logged(rerun, log, inputs)
        return conv1d_triton.causal_conv1d_prefill(x_RC, *where), *others_RD
    outs = tuple(x.new_empty(rerun.num_rows, x.shape[1]) for x in inputs)
    _launch(inputs, log, outs, rerun, *where)
    return outs


def _rows_at_once(rerun: RerunBatch, num_sequences: int) -> int:
    """Return how many rows are convolved at once."""
    # A padded step has one row, and one sequence, more than its decodes.
    num_rows, num_decodes = rerun.num_rows - rerun.is_padded, max(1, num_sequences - rerun.is_padded)
    return FEW_ROWS if num_rows <= FEW_ROWS * num_decodes else ROWS


def row_tables(rerun: RerunBatch) -> tuple[Tensor, Tensor]:
    """Return where each row comes from, and where of the logs it goes; every layer takes the same.

    Returns:
        int64 rows of the step, or ``-1 - entry`` of the log; and entries, or ``NO_ENTRY``.
    """
    if rerun.source_R is not None and rerun.entry_R is not None:
        return rerun.source_R, rerun.entry_R
    found = rerun.derived.get(TABLES)
    if found is None:
        rows_T = rerun.step_rows_T
        source_R = rows_T.new_empty(rerun.num_rows)
        source_R.index_copy_(0, rows_T, torch.arange(len(rows_T), device=rows_T.device))
        source_R.index_copy_(0, rerun.logged_rows_Q, -1 - rerun.logged_entries_Q)
        entry_R = rows_T.new_full((rerun.num_rows,), NO_ENTRY.value)
        entry_R.index_copy_(0, rows_T.index_select(0, rerun.draft_rows_K), rerun.draft_entries_K)
        found = rerun.derived[TABLES] = source_R, entry_R
    return found


def _launch(
    inputs: tuple[Tensor, ...],
    log: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    rerun: RerunBatch,
    convolution: Convolution,
    window_SRC: Tensor,
    slots: Slots,
    chunks: ChunkTable,
) -> None:
    weight_CW, bias_C, activation = convolution
    num_channels, num_others = inputs[0].shape[1], len(inputs) - 1
    block_c, num_warps = next(launch for most, launch in LAUNCHES.items() if chunks.num_sequences <= most)
    num_blocks = cdiv(num_channels, block_c)
    num_rows = _rows_at_once(rerun, chunks.num_sequences)
    any_tensor, any_size = (None,) * (MAX_OTHERS - num_others), (0,) * (MAX_OTHERS - num_others)
    sizes = (*(x.shape[1] for x in inputs[1:]), *any_size)
    _rerun_kernel[(num_blocks + num_others, chunks.num_sequences)](
        *inputs, *any_tensor, *log, *any_tensor, *outs, *any_tensor, *row_tables(rerun),
        weight_CW, bias_C, window_SRC, *slots,
        chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C,
        *(x.stride(0) for x in inputs), *any_size, *weight_CW.stride(), *strides(window_SRC),
        C=num_channels, W=weight_CW.shape[1], HAS_BIAS=bias_C is not None, IS_SILU=activation == "silu",
        SIZE_1=sizes[0], SIZE_2=sizes[1], BLOCK_D=next_power_of_2(max(1, *sizes)),
        CONV_BLOCKS=num_blocks, ROWS=max(num_rows, weight_CW.shape[1] - 1),
        BLOCK_C=block_c, num_warps=num_warps, **overlap_options(outs[0]),
    )  # fmt: skip


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
    ]
)  # fmt: skip
def _rerun_kernel(
    x_ptr,
    other_1,
    other_2,
    log_ptr,
    log_1,
    log_2,
    y_ptr,
    out_1,
    out_2,
    source_ptr,
    entry_ptr,
    weight_ptr,
    bias_ptr,
    window_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    x_row_stride,
    stride_1,
    stride_2,
    weight_channel_stride,
    weight_tap_stride,
    slot_stride,
    window_row_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CONV_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    block = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    first_chunk = tl.load(first_chunks_ptr + sequence)
    end_chunk = tl.load(first_chunks_ptr + sequence + 1)
    # An empty sequence begins at an empty chunk.
    last_chunk = tl.maximum(end_chunk - 1, first_chunk)
    start = tl.load(starts_ptr + first_chunk)
    end = tl.load(starts_ptr + last_chunk) + tl.load(lengths_ptr + last_chunk)
    tables = (source_ptr, entry_ptr, start, end)
    if SIZE_1 > 0:
        is_for_first = block == CONV_BLOCKS
        if is_for_first:
            _order_rows(other_1, log_1, out_1, *tables, stride_1, SIZE_1, BLOCK_D, OVERLAPS)
    if SIZE_2 > 0:
        is_for_second = block == CONV_BLOCKS + 1
        if is_for_second:
            _order_rows(other_2, log_2, out_2, *tables, stride_2, SIZE_2, BLOCK_D, OVERLAPS)
    if block < CONV_BLOCKS:
        channel_C = block * BLOCK_C + tl.arange(0, BLOCK_C)
        is_channel_C = channel_C < C
        weights = ()
        for tap in tl.static_range(W):
            weight_ptrs = weight_ptr + channel_C * weight_channel_stride + tap * weight_tap_stride
            weights += (tl.load(weight_ptrs, mask=is_channel_C, other=0.0).to(tl.float32),)
        src = tl.load(src_ptr + sequence)
        dst = tl.load(dst_ptr + sequence)
        old = ()
        for j in tl.static_range(W - 1):
            old_ptrs = window_ptr + src * slot_stride + j * window_row_stride + channel_C
            old_C = tl.load(old_ptrs, mask=is_channel_C & (src != 0), other=0.0)
            old += (old_C.to(x_ptr.dtype.element_ty),)
        # The kernels before make inputs, and may make the tables of rows; windows and chunks are older.
        wait_for_previous(OVERLAPS)
        release_next(OVERLAPS)

        for first_row in range(start, tl.maximum(end, start + 1), ROWS):
            # Rows before the block, then its own: a thread has all rows of its channels.
            is_first = first_row == start
            rows = ()
            entries = ()
            for i in tl.static_range(W - 1 + ROWS):
                row = first_row + (i - (W - 1))
                is_row = (row >= start) & (row < end)
                source = tl.load(source_ptr + row, mask=is_row, other=0)
                row_ptr = tl.where(source >= 0, x_ptr + source * x_row_stride, log_ptr + (-1 - source) * C)
                row_C = tl.load(row_ptr + channel_C, mask=is_channel_C & is_row, other=0.0)
                if i < W - 1:
                    row_C = tl.where(is_first, old[i], row_C)
                else:
                    entries += (tl.load(entry_ptr + row, mask=is_row, other=NO_ENTRY),)
                rows += (row_C,)
            for i in tl.static_range(ROWS):
                y_C = tl.zeros([BLOCK_C], tl.float32)
                for tap in tl.static_range(W):
                    y_C += rows[i + tap].to(tl.float32) * weights[tap]
                if HAS_BIAS:
                    y_C += tl.load(bias_ptr + channel_C, mask=is_channel_C, other=0.0).to(tl.float32)
                y_C = activate(y_C, y_ptr.dtype.element_ty, IS_SILU)
                tl.store(y_ptr + (first_row + i) * C + channel_C, y_C, mask=is_channel_C & (first_row + i < end))

            # Other threads may still read the window and the log.
            tl.debug_barrier()
            for chunk in range(first_chunk, end_chunk + 1):
                is_chunk = chunk < end_chunk
                slot = tl.where(is_chunk, tl.load(cut_slots_ptr + chunk, mask=is_chunk, other=0), dst)
                stop = tl.load(starts_ptr + chunk, mask=is_chunk, other=0)
                stop = tl.where(is_chunk, stop + tl.load(lengths_ptr + chunk, mask=is_chunk, other=0), end)
                if slot != 0:
                    for i in tl.static_range(W - 1 + ROWS):
                        index = first_row + i - stop
                        is_stored = (index >= 0) & (index < W - 1) & (is_first | (i >= W - 1))
                        new_ptrs = window_ptr + slot * slot_stride + index * window_row_stride + channel_C
                        tl.store(new_ptrs, rows[i].to(window_ptr.dtype.element_ty), mask=is_channel_C & is_stored)
            if end - start <= ROWS:
                for i in tl.static_range(ROWS):
                    tl.store(
                        log_ptr + entries[i] * C + channel_C, rows[W - 1 + i], mask=is_channel_C & (entries[i] >= 0)
                    )

        if end - start > ROWS:
            # Later blocks read the log, too.
            tl.debug_barrier()
            for row in range(start, end):
                entry = tl.load(entry_ptr + row)
                draft_ptrs = x_ptr + tl.load(source_ptr + row) * x_row_stride + channel_C
                draft_C = tl.load(draft_ptrs, mask=is_channel_C & (entry >= 0), other=0.0)
                tl.store(log_ptr + entry * C + channel_C, draft_C, mask=is_channel_C & (entry >= 0))


@triton.jit
def _order_rows(
    x_ptr,
    log_ptr,
    out_ptr,
    source_ptr,
    entry_ptr,
    start,
    end,
    x_row_stride,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Copy a sequence's rows of an input, and then log its drafts'."""
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    column_D = tl.arange(0, BLOCK_D)
    is_column_D = column_D < SIZE
    for first_row in range(start, end, ORDERED):
        row_R = first_row + tl.arange(0, ORDERED)
        source_R = tl.load(source_ptr + row_R, mask=row_R < end, other=0)
        is_tile_RD = (row_R < end)[:, None] & is_column_D[None, :]
        is_step_R1 = (source_R >= 0)[:, None]
        step_ptrs = x_ptr + (source_R * x_row_stride)[:, None] + column_D[None, :]
        step_RD = tl.load(step_ptrs, mask=is_tile_RD & is_step_R1, other=0.0)
        logged_ptrs = log_ptr + ((-1 - source_R) * SIZE)[:, None] + column_D[None, :]
        logged_RD = tl.load(logged_ptrs, mask=is_tile_RD & (source_R < 0)[:, None], other=0.0)
        out_ptrs = out_ptr + (row_R * SIZE)[:, None] + column_D[None, :]
        tl.store(out_ptrs, tl.where(is_step_R1, step_RD, logged_RD), mask=is_tile_RD)
    tl.debug_barrier()
    for first_row in range(start, end, ORDERED):
        row_R = first_row + tl.arange(0, ORDERED)
        entry_R = tl.load(entry_ptr + row_R, mask=row_R < end, other=NO_ENTRY)
        source_R = tl.load(source_ptr + row_R, mask=row_R < end, other=0)
        is_tile_RD = (entry_R >= 0)[:, None] & is_column_D[None, :]
        x_RD = tl.load(x_ptr + (source_R * x_row_stride)[:, None] + column_D[None, :], mask=is_tile_RD)
        tl.store(log_ptr + (entry_R * SIZE)[:, None] + column_D[None, :], x_RD, mask=is_tile_RD)
