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
    TASKS,
    claim,
    compiled,
    floats,
    helper,
    ints,
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

NO_CHUNKS = (0,) * 4


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
    return _run(*inputs, len(chunks.starts), tuple(table.data_ptr() for table in tables), activation)


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
    chunks: tuple[int, ...],
    activation: Activation,
) -> Tensor:
    num_sequences, (num_channels, width) = len(src_N), weight_CW.shape
    x_TC, weight_CW = packed_rows(x_TC), weight_CW.contiguous()
    bias = (0, 0) if bias_C is None else (bias_C.contiguous().data_ptr(), kind(bias_C))
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    # Taps, bias and, sequence after sequence, windows.
    rows_XC = torch.empty((width + 1 + num_sequences * (width - 1), num_channels))
    windows = (window_SRC.data_ptr(), kind(window_SRC), window_SRC.stride(0), window_SRC.stride(1))
    _read_kernel(
        num_sequences + 1,
        *(num_channels, width, kind(x_TC), rows_XC.data_ptr()),
        *(weight_CW.data_ptr(), kind(weight_CW), *bias, *windows, src_N.data_ptr(), offset_N.data_ptr()),
    )
    chunks_per_task = TASK_UPDATES if chunks is NO_CHUNKS else 1
    _convolve_kernel(
        cdiv(num_chunks, chunks_per_task),
        *(num_channels, width, kind(x_TC), rows_XC.data_ptr(), activation == "silu"),
        *(x_TC.data_ptr(), x_TC.stride(0), y_TC.data_ptr(), *windows, dst_N.data_ptr(), num_sequences, *chunks),
        *(num_chunks, chunks_per_task),
    )
    return y_TC


@helper
def _row(rows, index, size):
    """Return one of a block's rows: a slice of a flat array, because loops over rows of a matrix do not vectorise."""
    return rows[index * BLOCK_CHANNELS : index * BLOCK_CHANNELS + size]


@helper
def _copy(source, target):
    """Fill a row; Numba's own assignment of slices takes one number at a time."""
    for i in range(target.size):
        target[i] = source[i]


@compiled
def _read_kernel(args):
    """Copy the window of every sequence; the last task turns the weights into rows of one tap."""
    num_channels, width, dtype, rows = args[2], args[3], args[4], args[5]
    weight, weight_dtype, bias, bias_dtype = args[6], args[7], args[8], args[9]
    windows, window_dtype, slot_stride, row_stride = args[10], args[11], args[12], args[13]
    num_rows, num_sequences = width - 1, args[TASKS] - 1
    src, offset = ints(args[14], num_sequences), ints(args[15], num_sequences)
    task = claim(args)
    while task < args[TASKS]:
        if task < num_sequences:
            first = (width + 1 + task * num_rows) * num_channels
            for row in range(num_rows):
                copied = floats(rows + 4 * (first + row * num_channels), num_channels)
                if src[task] == NULL_SLOT:
                    copied[:] = 0.0
                else:
                    load(windows, window_dtype, src[task] * slot_stride + (offset[task] + row) * row_stride, copied)
                    round_to(dtype, copied)
        else:
            taps = floats(rows, (width + 1) * num_channels)
            row = np.empty(width * num_channels, np.float32)
            load(weight, weight_dtype, 0, row)
            for tap in range(width):
                for channel in range(num_channels):
                    taps[tap * num_channels + channel] = row[channel * width + tap]
            if bias:
                load(bias, bias_dtype, 0, taps[width * num_channels :])
            else:
                taps[width * num_channels :] = 0.0
        task = claim(args)


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
        _copy(_row(taps, width, y.size), y)
        for tap in range(width):
            x_row, tap_row = _row(x, tap, y.size), _row(taps, tap, y.size)
            for i in range(y.size):
                y[i] += x_row[i] * tap_row[i]


@helper
def _silu(y):
    for i in range(y.size):
        y[i] *= sigmoid(y[i])


@compiled
def _convolve_kernel(args):
    num_channels, width, dtype, is_silu = args[2], args[3], args[4], args[6]
    x, x_stride, y = args[7], args[8], args[9]
    windows, window_dtype, slot_stride, row_stride = args[10], args[11], args[12], args[13]
    num_sequences, has_chunks, num_chunks, chunks_per_task = args[15], args[16] != 0, args[20], args[21]
    num_rows = width - 1
    read = floats(args[5], (width + 1 + num_sequences * num_rows) * num_channels)
    dst = ints(args[14], num_sequences)
    first_chunks, starts = ints(args[16], num_sequences + 1), ints(args[17], num_chunks)
    lengths, cut_slots = ints(args[18], num_chunks), ints(args[19], num_chunks)

    taps = np.empty((width + 1) * BLOCK_CHANNELS, np.float32)
    rows = np.empty((num_rows + STRETCH_TOKENS) * BLOCK_CHANNELS, np.float32)
    sums = np.empty(BLOCK_CHANNELS, np.float32)
    task = claim(args)
    while task < args[TASKS]:
        for first in range(0, num_channels, BLOCK_CHANNELS):
            size = min(BLOCK_CHANNELS, num_channels - first)
            y_row = sums[:size]
            for tap in range(width + 1):
                _copy(read[tap * num_channels + first :], _row(taps, tap, size))
            for chunk in range(task * chunks_per_task, min((task + 1) * chunks_per_task, num_chunks)):
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
                        load(x, dtype, token * x_stride + first, _row(rows, row, size))
                    else:
                        old = (width + 1 + (sequence + 1) * num_rows + token - sequence_start) * num_channels + first
                        _copy(read[old:], _row(rows, row, size))
                for token in range(start, end, STRETCH_TOKENS):
                    num_tokens = min(STRETCH_TOKENS, end - token)
                    for i in range(num_tokens):
                        load(x, dtype, (token + i) * x_stride + first, _row(rows, num_rows + i, size))
                        _filter(rows[i * BLOCK_CHANNELS :], taps, width, y_row)
                        round_to(dtype, y_row)
                        if is_silu:
                            _silu(y_row)
                        store(y, dtype, (token + i) * num_channels + first, y_row)
                    for row in range(num_rows):
                        _copy(_row(rows, num_tokens + row, size), _row(rows, row, size))
                for slot in (cut_slot, end_slot):
                    for row in range(num_rows if slot != NULL_SLOT else 0):
                        place = slot * slot_stride + row * row_stride + first
                        store(windows, window_dtype, place, _row(rows, row, size))
        task = claim(args)
