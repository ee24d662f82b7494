"""Mamba-2 decode, with and without a log, on a CPU: one pass over each head's state, row by row.

A task is one head of one sequence. Without a log, each row is read and written. With one, the state is read; where the
plan folds, it is read again and written.

Shape suffixes as in ``mamba2.py``.
"""

# mypy: ignore-errors

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.recurrences.chunk_numba import refuse_overwritten
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.recurrences.gdn_log_numba import LOG_FIELDS, add, carry, log_arguments, log_of_head, weigh
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs
from strandline.kernels.recurrences.mamba2_numba import LAYER_FIELDS, layer_arguments, packed, time_step
from strandline.kernels.runtime_numba import (
    addresses,
    arguments,
    claim,
    copy,
    fill,
    floats,
    helper,
    ints,
    kernel,
    load,
    prefetch,
    store,
)

PREFETCH_BYTES = 4096
"""How far ahead of where a state is read lines are asked for: a page, at whose end the hardware stops doing so."""

CACHE_LINE_BYTES = 64


def mamba2_decode(inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.mamba2.mamba2_decode`."""
    refuse_overwritten(slots)
    return _decode(_decode_kernel, inputs, state_SHKV, slots)


def mamba2_decode_logged(
    inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.mamba2_log.mamba2_decode_logged`."""
    where = addresses(logs=logs.log_N, log_lens=logs.len_N, num_folded=logs.num_folded_N)
    return _decode(_decode_logged_kernel, inputs, state_SHKV, slots, **where, **log_arguments(memory))


def _decode(run: Callable[..., None], inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, **logs: int) -> Tensor:
    inputs, x_NHV = packed(inputs), inputs.x_THV
    out_NHV = x_NHV.new_empty(x_NHV.shape)
    layer = layer_arguments(inputs, state_SHKV, slots.dst_N, out_NHV)
    run(x_NHV.shape[0] * x_NHV.shape[1], **layer, src=slots.src_N.data_ptr(), **logs)
    return out_NHV


@helper
def _advance(source, is_zero, target, target_step, decay, B, C, x, out):
    """Write the state after a token, and add what the token reads of it to ``out``.

    Args:
        target_step: distance from row to row of the target; 0 where it is one row, and what is written is dropped.
    """
    num_columns = x.size
    for row in range(B.size):
        b, c = B[row], C[row]
        written = target[row * target_step : row * target_step + num_columns]
        if is_zero:
            for i in range(num_columns):
                new = b * x[i]
                written[i] = new
                out[i] += c * new
        else:
            ahead = source.ctypes.data + 4 * row * num_columns + PREFETCH_BYTES
            for line in range(0, 4 * num_columns, CACHE_LINE_BYTES):
                prefetch(ahead + line)
            read = source[row * num_columns : (row + 1) * num_columns]
            for i in range(num_columns):
                new = decay * read[i] + b * x[i]
                written[i] = new
                out[i] += c * new


@helper
def _load(args, sequence, head, x, B, C, dt):
    """Read a token's part of a head; return its time step and log decay."""
    group = head // args.heads_per_group
    load(args.x, args.dtype, sequence * args.x_stride + head * args.head_dim, x)
    load(args.B, args.dtype, sequence * args.B_stride + group * args.state_dim, B)
    load(args.C, args.dtype, sequence * args.C_stride + group * args.state_dim, C)
    load(args.dt, args.dt_dtype, sequence * args.dt_stride + head, dt)
    bias, log_rate = floats(args.biases, args.num_heads)[head], floats(args.log_rates, args.num_heads)[head]
    return time_step(
        args.dt_factor * np.float64(dt[0]), np.float64(bias), np.float64(log_rate), args.min_step, args.max_step
    )


@helper
def _finish(args, sequence, head, x, out):
    """Add the token's own values to what it has read, and write the output."""
    skip = floats(args.skips, args.num_heads)[head]
    for channel in range(x.size):
        out[channel] += skip * x[channel]
    store(args.out, args.dtype, (sequence * args.num_heads + head) * args.head_dim, out)


@kernel(LAYER_FIELDS + "src")
def _decode_kernel(tasks):
    args = arguments(tasks)
    num_heads, state_dim, head_dim = args.num_heads, args.state_dim, args.head_dim
    state_size = state_dim * head_dim
    B, C = np.empty(state_dim, np.float32), np.empty(state_dim, np.float32)
    x, scaled_x, out = (np.empty(head_dim, np.float32), np.empty(head_dim, np.float32), np.empty(head_dim, np.float32))
    dropped, dt = np.empty(head_dim, np.float32), np.empty(1, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, head = task // num_heads, task % num_heads
        step, log_decay = _load(args, sequence, head, x, B, C, dt)
        decay = np.float32(math.exp(np.float64(log_decay)))
        for channel in range(head_dim):
            scaled_x[channel] = step * x[channel]
        source, target = ints(args.src, sequence + 1)[sequence], ints(args.dst, sequence + 1)[sequence]
        state = floats(args.states + 4 * (source * args.state_stride + head * state_size), state_size)
        fill(out, np.float32(0.0))
        if target != NULL_SLOT:
            after = floats(args.states + 4 * (target * args.state_stride + head * state_size), state_size)
            _advance(state, source == NULL_SLOT, after, head_dim, decay, B, C, scaled_x, out)
        else:
            _advance(state, source == NULL_SLOT, dropped, 0, decay, B, C, scaled_x, out)
        _finish(args, sequence, head, x, out)
        task = claim(tasks)


@helper
def _read(state, C, out):
    """Add what a token reads of a state, in memory order."""
    num_columns = out.size
    for row in range(C.size):
        ahead = state.ctypes.data + 4 * row * num_columns + PREFETCH_BYTES
        for line in range(0, 4 * num_columns, CACHE_LINE_BYTES):
            prefetch(ahead + line)
        read = state[row * num_columns : (row + 1) * num_columns]
        c = C[row]
        for i in range(num_columns):
            out[i] += c * read[i]


@helper
def _add_scored(C, key, value, weight, out):
    """Add what a token reads of a write."""
    score = np.float32(0.0)
    for i in range(C.size):
        score += C[i] * key[i]
    score *= weight
    for i in range(out.size):
        out[i] += score * value[i]


# Logs come first: were the fields of one kernel the first ones of another's, Numba would take one's helpers for both.
@kernel(LOG_FIELDS + "logs log_lens num_folded src " + LAYER_FIELDS)
def _decode_logged_kernel(tasks):
    args = arguments(tasks)
    num_heads, state_dim, head_dim = args.num_heads, args.state_dim, args.head_dim
    state_size = state_dim * head_dim
    B, C = np.empty(state_dim, np.float32), np.empty(state_dim, np.float32)
    x, written, out = (np.empty(head_dim, np.float32), np.empty(head_dim, np.float32), np.empty(head_dim, np.float32))
    weights, dt = np.empty(args.log_capacity, np.float32), np.empty(1, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, head = task // num_heads, task % num_heads
        step, log_decay = _load(args, sequence, head, x, B, C, dt)
        for channel in range(head_dim):
            written[channel] = step * x[channel]
        source, target = ints(args.src, sequence + 1)[sequence], ints(args.dst, sequence + 1)[sequence]
        log, num_logged = ints(args.logs, sequence + 1)[sequence], ints(args.log_lens, sequence + 1)[sequence]
        keys, values, log_decays = log_of_head(args, log, head // args.heads_per_group, head, state_dim, head_dim)
        carried = weigh(log_decays[:num_logged], log_decay, weights)
        state = floats(args.states + 4 * (source * args.state_stride + head * state_size), state_size)
        fill(out, np.float32(0.0))
        if source != NULL_SLOT:
            _read(state, C, out)
        for channel in range(head_dim):
            out[channel] *= carried
        for index in range(num_logged):
            logged = values[index * head_dim : (index + 1) * head_dim]
            _add_scored(C, keys[index * state_dim : (index + 1) * state_dim], logged, weights[index], out)
        _add_scored(C, B, written, np.float32(1.0), out)
        _finish(args, sequence, head, x, out)
        if target != NULL_SLOT and ints(args.num_folded, sequence + 1)[sequence] != 0:
            folded = floats(args.states + 4 * (target * args.state_stride + head * state_size), state_size)
            is_zero, left = source == NULL_SLOT, weights[:num_logged]
            carry(state, folded, carried, is_zero, keys, values, left, state_dim)
            add(folded, B, written)
        elif target != NULL_SLOT:
            if head % args.heads_per_group == 0:
                copy(B, keys[num_logged * state_dim :])
            copy(written, values[num_logged * head_dim :])
            log_decays[num_logged] = log_decay
        task = claim(tasks)
