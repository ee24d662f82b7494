"""The short causal convolution on a CPU: one pass from inputs and windows to activated outputs and new windows.

First, all windows are copied, because any of them may be overwritten. Then a task is a chunk, or a step's one token: it
takes a block of channels at a time, whose rows it holds in float32 behind the W - 1 rows before them. The last W - 1 of
these are the window wherever one is wanted.

Shape suffixes as in ``conv1d.py``.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels import conv1d
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.conv1d import Activation
from strandline.kernels.runtime_numba import (
    KINDS,
    arguments,
    claim,
    copy,
    floats,
    helper,
    ints,
    kernel,
    kind,
    load,
    packed_rows,
    round_to,
    sigmoid,
    store,
)
from strandline.kernels.sizes import cdiv

BLOCK_CHANNELS = 512
STRETCH_TOKENS = 8
"""Of a block, which fit the first cache in float32."""

TASK_UPDATES = 8
"""Sequences of one task, where each has one token: enough to share what it takes to load the taps."""

NO_CHUNKS = dict.fromkeys(("first_chunks", "starts", "lengths", "cut_slots"), 0)


def causal_conv1d_prefill(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SRC: Tensor,
    src_N: Tensor,
    offset_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
    activation: Activation,
) -> Tensor:
    """Numba twin of :func:`strandline.kernels.conv1d.causal_conv1d_prefill`."""
    inputs = (x_TC, weight_CW, bias_C, window_SRC, src_N, offset_N, dst_N)
    if not _can_run(weight_CW, bias_C, window_SRC):
        return conv1d.causal_conv1d_prefill.__wrapped__(*inputs, chunks, activation)
    tables = (chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C)
    addresses = {name: table.data_ptr() for name, table in zip(NO_CHUNKS, tables, strict=True)}
    return _run(*inputs, len(chunks.starts), addresses, activation)


def causal_conv1d_update(
    x_NC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SRC: Tensor,
    src_N: Tensor,
    offset_N: Tensor,
    dst_N: Tensor,
    activation: Activation,
) -> Tensor:
    """Numba twin of :func:`strandline.kernels.conv1d.causal_conv1d_update`."""
    inputs = (x_NC, weight_CW, bias_C, window_SRC, src_N, offset_N, dst_N)
    if not _can_run(weight_CW, bias_C, window_SRC):
        return conv1d.causal_conv1d_update.__wrapped__(*inputs, activation)
    return _run(*inputs, len(src_N), NO_CHUNKS, activation)


def _can_run(weight_CW: Tensor, bias_C: Tensor | None, window_SRC: Tensor) -> bool:
    tensors = (weight_CW, window_SRC) if bias_C is None else (weight_CW, window_SRC, bias_C)
    return window_SRC.stride(2) == 1 and all(x.dtype in KINDS for x in tensors)


def _run(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SRC: Tensor,
    src_N: Tensor,
    offset_N: Tensor,
    dst_N: Tensor,
    num_chunks: int,
    chunks: dict[str, int],
    activation: Activation,
) -> Tensor:
    num_sequences, (num_channels, width) = len(src_N), weight_CW.shape
    x_TC, weight_CW = packed_rows(x_TC), weight_CW.contiguous()
    bias_C = bias_C if bias_C is None else bias_C.contiguous()
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    # Taps, bias and, sequence after sequence, windows.
    rows_XC = torch.empty((width + 1 + num_sequences * (width - 1), num_channels))
    shared = {
        "num_channels": num_channels,
        "width": width,
        "dtype": kind(x_TC),
        "rows": rows_XC.data_ptr(),
        "windows": window_SRC.data_ptr(),
        "window_dtype": kind(window_SRC),
        "slot_stride": window_SRC.stride(0),
        "row_stride": window_SRC.stride(1),
    }
    _read_kernel(
        num_sequences + 1,
        **shared,
        weight=weight_CW.data_ptr(),
        weight_dtype=kind(weight_CW),
        bias=0 if bias_C is None else bias_C.data_ptr(),
        bias_dtype=0 if bias_C is None else kind(bias_C),
        src=src_N.data_ptr(),
        offset=offset_N.data_ptr(),
    )
    chunks_per_task = TASK_UPDATES if chunks is NO_CHUNKS else 1
    _convolve_kernel(
        cdiv(num_chunks, chunks_per_task),
        **shared,
        is_silu=activation == "silu",
        x=x_TC.data_ptr(),
        x_stride=x_TC.stride(0),
        y=y_TC.data_ptr(),
        dst=dst_N.data_ptr(),
        num_sequences=num_sequences,
        **chunks,
        num_chunks=num_chunks,
        chunks_per_task=chunks_per_task,
    )
    return y_TC


@helper
def _row(rows, index, size):
    """Return one of a block's rows: a slice of a flat array, because loops over rows of a matrix do not vectorise."""
    return rows[index * BLOCK_CHANNELS : index * BLOCK_CHANNELS + size]


SHARED = "num_channels width dtype rows windows window_dtype slot_stride row_stride "


@kernel(SHARED + "weight weight_dtype bias bias_dtype src offset")
def _read_kernel(tasks):
    """Copy the window of every sequence; the last task turns the weights into rows of one tap."""
    args = arguments(tasks)
    num_channels, width = args.num_channels, args.width
    num_rows, num_sequences = width - 1, args.num_tasks - 1
    src, offset = ints(args.src, num_sequences), ints(args.offset, num_sequences)
    task = claim(tasks)
    while task < args.num_tasks:
        if task < num_sequences:
            first = (width + 1 + task * num_rows) * num_channels
            for row in range(num_rows):
                copied = floats(args.rows + 4 * (first + row * num_channels), num_channels)
                if src[task] == NULL_SLOT:
                    copied[:] = 0.0
                else:
                    place = src[task] * args.slot_stride + (offset[task] + row) * args.row_stride
                    load(args.windows, args.window_dtype, place, copied)
                    round_to(args.dtype, copied)
        else:
            taps = floats(args.rows, (width + 1) * num_channels)
            row = np.empty(width * num_channels, np.float32)
            load(args.weight, args.weight_dtype, 0, row)
            for tap in range(width):
                for channel in range(num_channels):
                    taps[tap * num_channels + channel] = row[channel * width + tap]
            if args.bias:
                load(args.bias, args.bias_dtype, 0, taps[width * num_channels :])
            else:
                taps[width * num_channels :] = 0.0
        task = claim(tasks)


@helper
def _filter(x, taps, width, y):
    """Fill an output row, given its inputs from the oldest on, and the taps with the bias behind them."""
    if width == 4:
        for i in range(y.size):
            older = x[i] * taps[i] + x[i + BLOCK_CHANNELS] * taps[i + BLOCK_CHANNELS]
            newer = x[i + 2 * BLOCK_CHANNELS] * taps[i + 2 * BLOCK_CHANNELS]
            newer += x[i + 3 * BLOCK_CHANNELS] * taps[i + 3 * BLOCK_CHANNELS]
            y[i] = older + newer + taps[i + 4 * BLOCK_CHANNELS]
    else:
        copy(_row(taps, width, y.size), y)
        for tap in range(width):
            x_row, tap_row = _row(x, tap, y.size), _row(taps, tap, y.size)
            for i in range(y.size):
                y[i] += x_row[i] * tap_row[i]


@helper
def _silu(y):
    for i in range(y.size):
        y[i] *= sigmoid(y[i])


@kernel(
    SHARED + "is_silu x x_stride y dst num_sequences first_chunks starts lengths cut_slots num_chunks chunks_per_task"
)
def _convolve_kernel(tasks):
    args = arguments(tasks)
    num_channels, width, dtype, num_chunks = args.num_channels, args.width, args.dtype, args.num_chunks
    num_sequences, has_chunks, num_rows = args.num_sequences, args.first_chunks != 0, width - 1
    read = floats(args.rows, (width + 1 + num_sequences * num_rows) * num_channels)
    dst = ints(args.dst, num_sequences)
    first_chunks, starts = ints(args.first_chunks, num_sequences + 1), ints(args.starts, num_chunks)
    lengths, cut_slots = ints(args.lengths, num_chunks), ints(args.cut_slots, num_chunks)

    taps = np.empty((width + 1) * BLOCK_CHANNELS, np.float32)
    rows = np.empty((num_rows + STRETCH_TOKENS) * BLOCK_CHANNELS, np.float32)
    sums = np.empty(BLOCK_CHANNELS, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        for first in range(0, num_channels, BLOCK_CHANNELS):
            size = min(BLOCK_CHANNELS, num_channels - first)
            y_row = sums[:size]
            for tap in range(width + 1):
                copy(read[tap * num_channels + first :], _row(taps, tap, size))
            for chunk in range(task * args.chunks_per_task, min((task + 1) * args.chunks_per_task, num_chunks)):
                sequence = start = sequence_start = chunk
                end, cut_slot, end_slot = chunk + 1, NULL_SLOT, NULL_SLOT
                if has_chunks:
                    sequence = 0
                    while first_chunks[sequence + 1] <= chunk:
                        sequence += 1
                    sequence_start, start = starts[first_chunks[sequence]], starts[chunk]
                    end, cut_slot = start + lengths[chunk], cut_slots[chunk]
                if not has_chunks or chunk + 1 == first_chunks[sequence + 1]:
                    end_slot = dst[sequence]

                for row in range(num_rows):
                    token = start - num_rows + row
                    if token >= sequence_start:
                        load(args.x, dtype, token * args.x_stride + first, _row(rows, row, size))
                    else:
                        old = (width + 1 + (sequence + 1) * num_rows + token - sequence_start) * num_channels + first
                        copy(read[old:], _row(rows, row, size))
                for token in range(start, end, STRETCH_TOKENS):
                    num_tokens = min(STRETCH_TOKENS, end - token)
                    for i in range(num_tokens):
                        load(args.x, dtype, (token + i) * args.x_stride + first, _row(rows, num_rows + i, size))
                        _filter(rows[i * BLOCK_CHANNELS :], taps, width, y_row)
                        round_to(dtype, y_row)
                        if args.is_silu:
                            _silu(y_row)
                        store(args.y, dtype, (token + i) * num_channels + first, y_row)
                    for row in range(num_rows):
                        copy(_row(rows, num_tokens + row, size), _row(rows, row, size))
                for slot in (cut_slot, end_slot):
                    for row in range(num_rows if slot != NULL_SLOT else 0):
                        place = slot * args.slot_stride + row * args.row_stride + first
                        store(args.windows, args.window_dtype, place, _row(rows, row, size))
        task = claim(tasks)
