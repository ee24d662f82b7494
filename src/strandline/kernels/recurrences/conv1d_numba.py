"""The short causal convolution on a CPU: one pass from inputs and windows to activated outputs and new windows.

A task takes a block of channels at a time, whose rows it holds in float32 after the W - 1 rows before them. The last
W - 1 of these are the window wherever one is wanted. In a prefill a task is a chunk; all windows are copied before the
first, because any of them may be overwritten. Where every sequence has one token, a task is a block of channels of all
sequences, and begins with all windows.

Shape suffixes as in ``conv1d.py``.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.recurrences.conv1d import Convolution
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.runtime_numba import (
    arguments,
    claim,
    copy,
    fill,
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
"""Channels and tokens of a block, which fits the first-level cache in float32."""


def causal_conv1d_prefill(
    x_TC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots, chunks: ChunkTable
) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.conv1d.causal_conv1d_prefill`."""
    weight_CW, bias_C, activation = convolution
    num_sequences, (num_channels, width) = len(slots.src_N), weight_CW.shape
    x_TC = packed_rows(x_TC)
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    # Taps, bias and, sequence after sequence, windows.
    rows_XC = torch.empty((width + 1 + num_sequences * (width - 1), num_channels))
    layer = {**_layer_arguments(weight_CW, window_SRC), "dtype": kind(x_TC), "rows": rows_XC.data_ptr()}
    weights, _held = _weight_arguments(weight_CW, bias_C)
    _read_kernel(num_sequences + 1, **layer, **weights, src=slots.src_N.data_ptr())
    _convolve_kernel(
        len(chunks.starts),
        **layer,
        is_silu=activation == "silu",
        x=x_TC.data_ptr(),
        x_stride=x_TC.stride(0),
        y=y_TC.data_ptr(),
        dst=slots.dst_N.data_ptr(),
        num_sequences=num_sequences,
        first_chunks=chunks.first_chunks_N1.data_ptr(),
        starts=chunks.starts_C.data_ptr(),
        lengths=chunks.lengths_C.data_ptr(),
        cut_slots=chunks.cut_slots_C.data_ptr(),
    )
    return y_TC


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
    x_TC, *others = insert_logged.reference(rerun, log, inputs)
    return causal_conv1d_prefill(x_TC, convolution, window_SRC, slots, chunks), *others


def causal_conv1d_update(x_NC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.conv1d.causal_conv1d_update`."""
    weight_CW, bias_C, activation = convolution
    num_sequences, num_channels = x_NC.shape
    x_NC = packed_rows(x_NC)
    y_NC = torch.empty(x_NC.shape, dtype=x_NC.dtype)
    weights, _held = _weight_arguments(weight_CW, bias_C)
    _update_kernel(
        cdiv(num_channels, BLOCK_CHANNELS),
        **_layer_arguments(weight_CW, window_SRC),
        **weights,
        dtype=kind(x_NC),
        is_silu=activation == "silu",
        x=x_NC.data_ptr(),
        x_stride=x_NC.stride(0),
        y=y_NC.data_ptr(),
        src=slots.src_N.data_ptr(),
        dst=slots.dst_N.data_ptr(),
        num_sequences=num_sequences,
    )
    return y_NC


LAYER = "num_channels width dtype windows window_dtype slot_stride row_stride "


def _layer_arguments(weight_CW: Tensor, window_SRC: Tensor) -> dict[str, int]:
    if window_SRC.stride(2) != 1:
        raise ValueError(f"the channels of a window's row must lie together; strides are {window_SRC.stride()}")
    return {
        "num_channels": weight_CW.shape[0],
        "width": weight_CW.shape[1],
        "windows": window_SRC.data_ptr(),
        "window_dtype": kind(window_SRC),
        "slot_stride": window_SRC.stride(0),
        "row_stride": window_SRC.stride(1),
    }


WEIGHTS = "weight weight_dtype bias bias_dtype "


def _weight_arguments(weight_CW: Tensor, bias_C: Tensor | None) -> tuple[dict[str, int], tuple[Tensor, Tensor]]:
    """Return weights and bias as arguments, and the tensors that must live as long."""
    weight_CW = weight_CW.contiguous()
    bias_C = weight_CW if bias_C is None else bias_C.contiguous()
    has_bias = bias_C is not weight_CW
    names = {
        "weight": weight_CW.data_ptr(),
        "weight_dtype": kind(weight_CW),
        "bias": bias_C.data_ptr() if has_bias else 0,
        "bias_dtype": kind(bias_C),
    }
    return names, (weight_CW, bias_C)


@helper
def _row(rows, index, size):
    """Return one of a block's rows: a slice of a flat array, because loops over rows of a matrix do not vectorise."""
    return rows[index * BLOCK_CHANNELS : index * BLOCK_CHANNELS + size]


@helper
def _read_taps(args, first, size, taps, row_size):
    """Turn the weights of ``size`` channels into rows of one tap, ``row_size`` apart, and the bias after them."""
    width = args.width
    weights = np.empty(width * size, np.float32)
    load(args.weight, args.weight_dtype, first * width, weights)
    for tap in range(width):
        for i in range(size):
            taps[tap * row_size + i] = weights[i * width + tap]
    bias = taps[width * row_size : width * row_size + size]
    if args.bias:
        load(args.bias, args.bias_dtype, first, bias)
    else:
        fill(bias, 0.0)


@helper
def _read_window(args, src, row, first, x):
    """Fill a row with the inputs of one step of a window, from channel ``first`` on."""
    if src == NULL_SLOT:
        fill(x, 0.0)
    else:
        load(args.windows, args.window_dtype, src * args.slot_stride + row * args.row_stride + first, x)
        if args.window_dtype != args.dtype:
            round_to(args.dtype, x)


@kernel(LAYER + WEIGHTS + "rows src")
def _read_kernel(tasks):
    """Copy the window of every sequence; the last task turns the weights into rows of one tap."""
    args = arguments(tasks)
    num_channels, width = args.num_channels, args.width
    num_rows, num_sequences = width - 1, args.num_tasks - 1
    src = ints(args.src, num_sequences)
    task = claim(tasks)
    while task < args.num_tasks:
        if task < num_sequences:
            for row in range(num_rows):
                offset = (width + 1 + task * num_rows + row) * num_channels
                copied = floats(args.rows + 4 * offset, num_channels)
                _read_window(args, src[task], row, 0, copied)
        else:
            _read_taps(args, 0, num_channels, floats(args.rows, (width + 1) * num_channels), num_channels)
        task = claim(tasks)


@helper
def _filter(x, taps, width, y):
    """Fill an output row, given its inputs from the oldest on, and the taps with the bias after them."""
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
def _convolve(args, rows, taps, sums, y_row):
    """Filter the rows of one token; write it to a row of y, which begins at a number, at its channels."""
    _filter(rows, taps, args.width, sums)
    round_to(args.dtype, sums)
    if args.is_silu:
        for i in range(sums.size):
            sums[i] *= sigmoid(sums[i])
    store(args.y, args.dtype, y_row, sums)


@helper
def _write_window(args, slot, rows, first, size):
    """Write the window that lies at the beginning of ``rows``, unless its slot is none."""
    for row in range(args.width - 1 if slot != NULL_SLOT else 0):
        offset = slot * args.slot_stride + row * args.row_stride + first
        store(args.windows, args.window_dtype, offset, _row(rows, row, size))


@kernel(LAYER + WEIGHTS + "is_silu x x_stride y src dst num_sequences")
def _update_kernel(tasks):
    """Take one token of every sequence; a task is a block of channels."""
    args = arguments(tasks)
    num_channels, width, num_sequences = args.num_channels, args.width, args.num_sequences
    src, dst = ints(args.src, num_sequences), ints(args.dst, num_sequences)
    taps = np.empty((width + 1) * BLOCK_CHANNELS, np.float32)
    rows = np.empty(num_sequences * width * BLOCK_CHANNELS, np.float32)
    sums = np.empty(BLOCK_CHANNELS, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        first = task * BLOCK_CHANNELS
        size = min(BLOCK_CHANNELS, num_channels - first)
        _read_taps(args, first, size, taps, BLOCK_CHANNELS)
        for sequence in range(num_sequences):
            for row in range(width - 1):
                x = _row(rows, sequence * width + row, size)
                _read_window(args, src[sequence], row, first, x)
            x = _row(rows, sequence * width + width - 1, size)
            load(args.x, args.dtype, sequence * args.x_stride + first, x)
        for sequence in range(num_sequences):
            inputs = rows[sequence * width * BLOCK_CHANNELS :]
            _convolve(args, inputs, taps, sums[:size], sequence * num_channels + first)
            _write_window(args, dst[sequence], inputs[BLOCK_CHANNELS:], first, size)
        task = claim(tasks)


@kernel(LAYER + "rows is_silu x x_stride y dst num_sequences first_chunks starts lengths cut_slots")
def _convolve_kernel(tasks):
    args = arguments(tasks)
    num_channels, width, num_chunks = args.num_channels, args.width, args.num_tasks
    num_sequences, num_rows = args.num_sequences, width - 1
    read = floats(args.rows, (width + 1 + num_sequences * num_rows) * num_channels)
    dst = ints(args.dst, num_sequences)
    first_chunks, starts = ints(args.first_chunks, num_sequences + 1), ints(args.starts, num_chunks)
    lengths, cut_slots = ints(args.lengths, num_chunks), ints(args.cut_slots, num_chunks)

    taps = np.empty((width + 1) * BLOCK_CHANNELS, np.float32)
    rows = np.empty((num_rows + STRETCH_TOKENS) * BLOCK_CHANNELS, np.float32)
    sums = np.empty(BLOCK_CHANNELS, np.float32)
    chunk = claim(tasks)
    while chunk < num_chunks:
        sequence = 0
        while first_chunks[sequence + 1] <= chunk:
            sequence += 1
        sequence_start, start = starts[first_chunks[sequence]], starts[chunk]
        end = start + lengths[chunk]
        end_slot = dst[sequence] if chunk + 1 == first_chunks[sequence + 1] else NULL_SLOT
        for first in range(0, num_channels, BLOCK_CHANNELS):
            size = min(BLOCK_CHANNELS, num_channels - first)
            for tap in range(width + 1):
                copy(read[tap * num_channels + first :], _row(taps, tap, size))
            for row in range(num_rows):
                token = start - num_rows + row
                if token >= sequence_start:
                    load(args.x, args.dtype, token * args.x_stride + first, _row(rows, row, size))
                else:
                    old = (width + 1 + (sequence + 1) * num_rows + token - sequence_start) * num_channels + first
                    copy(read[old:], _row(rows, row, size))
            for token in range(start, end, STRETCH_TOKENS):
                num_tokens = min(STRETCH_TOKENS, end - token)
                for i in range(num_tokens):
                    load(args.x, args.dtype, (token + i) * args.x_stride + first, _row(rows, num_rows + i, size))
                    _convolve(args, rows[i * BLOCK_CHANNELS :], taps, sums[:size], (token + i) * num_channels + first)
                for row in range(num_rows):
                    copy(_row(rows, num_tokens + row, size), _row(rows, row, size))
            _write_window(args, cut_slots[chunk], rows, first, size)
            _write_window(args, end_slot, rows, first, size)
        chunk = claim(tasks)
