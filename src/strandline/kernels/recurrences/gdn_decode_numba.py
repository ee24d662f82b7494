"""Gated DeltaNet decode, with and without a log, on a CPU: one pass over each head's state (``gdn_log.py``).

A task is one head of one sequence. It reads the state row by row, once for key and query together, and what the log
adds; where the plan folds, it then writes the state, once. Without logs every step folds.

Shape suffixes as in ``gdn_log.py``.
"""

# mypy: ignore-errors

import math

import numpy as np
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.recurrences.chunk_numba import refuse_overwritten
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.recurrences.gdn_log_numba import LOG_FIELDS, add, carry, log_arguments, log_of_head, weigh
from strandline.kernels.recurrences.gdn_numba import (
    LAYER_FIELDS,
    STATE_FIELDS,
    gates,
    head_arguments,
    layer_arguments,
    packed,
)
from strandline.kernels.runtime_numba import (
    addresses,
    arguments,
    claim,
    copy,
    floats,
    helper,
    ints,
    kernel,
    load,
    prefetch,
    store,
)

PREFETCH_BYTES = 4096
"""Prefetch distance in a state: a page, since the hardware prefetcher stops at its end."""

CACHE_LINE_BYTES = 64

NO_LOGS = dict.fromkeys(f"{LOG_FIELDS} logs log_lens num_folded".split(), 0)


def gdn_decode(inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.gdn.gdn_decode`."""
    refuse_overwritten(slots)
    return _decode(inputs, state_SHKV, slots, NO_LOGS)


def gdn_decode_logged(
    inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.gdn_log.gdn_decode_logged`."""
    where = addresses(logs=logs.log_N, log_lens=logs.len_N, num_folded=logs.num_folded_N)
    return _decode(inputs, state_SHKV, slots, {**where, **log_arguments(memory)})


def gdn_fold(state_RSHKV: Tensor, memory: LogMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
    """Numba version of :func:`strandline.kernels.recurrences.gdn_log.gdn_fold`."""
    num_heads, num_key_heads = state_RSHKV.shape[2], memory.key_JGLK.shape[2]
    for layer, state_SHKV in enumerate(state_RSHKV):
        _fold_kernel(
            len(slot_N) * num_heads,
            **head_arguments(state_SHKV, num_key_heads),
            **addresses(slots=slot_N, logs=log_N, log_lens=len_N),
            **log_arguments(memory.of_layer(layer)),
        )


def _decode(inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots, logs: dict[str, int]) -> Tensor:
    inputs, v_NHV = packed(inputs), inputs.v_THV
    out_NHV = v_NHV.new_empty(v_NHV.shape, dtype=inputs.q_TGK.dtype)
    _decode_kernel(
        v_NHV.shape[0] * v_NHV.shape[1],
        **layer_arguments(inputs, state_SHKV, slots.dst_N, out_NHV),
        src=slots.src_N.data_ptr(),
        **logs,
    )
    return out_NHV


@helper
def _normalise(key, query):
    """Normalise key and query, and scale the query; return their product."""
    key_square = query_square = product = np.float32(0.0)
    for i in range(key.size):
        key_square += key[i] * key[i]
        query_square += query[i] * query[i]
        product += key[i] * query[i]
    key_factor = np.float32(1.0 / math.sqrt(key_square + L2_NORM_EPS))
    query_factor = np.float32(1.0 / math.sqrt((query_square + L2_NORM_EPS) * key.size))
    for i in range(key.size):
        key[i] *= key_factor
        query[i] *= query_factor
    return product * key_factor * query_factor


@helper
def _read(state, key, query, by_key, by_query):
    """Add the products of key and query with a state, two of its rows at a time, in memory order.

    Four at a time took 1.6 times as long when the state is in no cache, because lines are then read out of order.
    """
    num_columns = by_key.size
    whole = key.size // 2 * 2
    for row in range(0, whole, 2):
        ahead = state.ctypes.data + 4 * row * num_columns + PREFETCH_BYTES
        for line in range(0, 8 * num_columns, CACHE_LINE_BYTES):
            prefetch(ahead + line)
        first = state[row * num_columns : (row + 1) * num_columns]
        second = state[(row + 1) * num_columns : (row + 2) * num_columns]
        key_1, key_2, query_1, query_2 = key[row], key[row + 1], query[row], query[row + 1]
        for i in range(num_columns):
            a, b = first[i], second[i]
            by_key[i] += key_1 * a + key_2 * b
            by_query[i] += query_1 * a + query_2 * b
    for row in range(whole, key.size):
        last = state[row * num_columns : (row + 1) * num_columns]
        for i in range(num_columns):
            by_key[i] += key[row] * last[i]
            by_query[i] += query[row] * last[i]


@helper
def _read_logged(logged_key, logged_value, weight, key, query, by_key, by_query):
    """Add the products of key and query with a logged token's write."""
    key_score = query_score = np.float32(0.0)
    for i in range(key.size):
        key_score += key[i] * logged_key[i]
        query_score += query[i] * logged_key[i]
    key_score *= weight
    query_score *= weight
    for i in range(by_key.size):
        by_key[i] += key_score * logged_value[i]
        by_query[i] += query_score * logged_value[i]


@kernel(LAYER_FIELDS + "src logs log_lens num_folded " + LOG_FIELDS)
def _decode_kernel(tasks):
    args = arguments(tasks)
    num_heads, key_dim, value_dim, dtype = args.num_heads, args.key_dim, args.value_dim, args.dtype
    state_size = key_dim * value_dim
    key, query = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
    by_key, by_query = np.empty(value_dim, np.float32), np.empty(value_dim, np.float32)
    value, gate = np.empty(value_dim, np.float32), np.empty(2, np.float32)
    weights = np.empty(args.log_capacity, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, head = task // num_heads, task % num_heads
        key_head = head // args.heads_per_key
        load(args.q, dtype, sequence * args.q_stride + key_head * key_dim, query)
        load(args.k, dtype, sequence * args.k_stride + key_head * key_dim, key)
        load(args.v, dtype, sequence * args.v_stride + head * value_dim, value)
        load(args.a, args.gate_dtype, sequence * args.a_stride + head, gate[:1])
        load(args.b, args.gate_dtype, sequence * args.b_stride + head, gate[1:])
        overlap = _normalise(key, query)
        rate, bias = floats(args.rates, num_heads)[head], floats(args.biases, num_heads)[head]
        a, b = np.float64(gate[0]), np.float64(gate[1])
        log_decay, beta = gates(a, b, np.float64(rate), np.float64(bias), args.max_beta)

        source, target = ints(args.src, sequence + 1)[sequence], ints(args.dst, sequence + 1)[sequence]
        state = floats(args.states + 4 * (source * args.state_stride + head * state_size), state_size)
        log, num_logged, num_folded = 0, 0, 1
        if args.logs:
            log, num_logged = ints(args.logs, sequence + 1)[sequence], ints(args.log_lens, sequence + 1)[sequence]
            num_folded = ints(args.num_folded, sequence + 1)[sequence]
        log_keys, log_values, log_decays = log_of_head(args, log, key_head, head, key_dim, value_dim)

        by_key[:] = 0.0
        by_query[:] = 0.0
        if source != NULL_SLOT:
            _read(state, key, query, by_key, by_query)
        carried = weigh(log_decays[:num_logged], log_decay, weights)
        for channel in range(value_dim):
            by_key[channel] *= carried
            by_query[channel] *= carried
        for entry in range(num_logged):
            log_key = log_keys[entry * key_dim : (entry + 1) * key_dim]
            log_value = log_values[entry * value_dim : (entry + 1) * value_dim]
            _read_logged(log_key, log_value, weights[entry], key, query, by_key, by_query)
        for channel in range(value_dim):
            delta = (value[channel] - by_key[channel]) * beta
            value[channel] = delta
            by_query[channel] += overlap * delta
        store(args.out, dtype, (sequence * num_heads + head) * value_dim, by_query)

        if target != NULL_SLOT and num_folded != 0:
            folded = floats(args.states + 4 * (target * args.state_stride + head * state_size), state_size)
            is_zero, left = source == NULL_SLOT, weights[:num_logged]
            carry(state, folded, carried, is_zero, log_keys, log_values, left, key_dim)
            add(folded, key, value)
        elif target != NULL_SLOT:
            if head % args.heads_per_key == 0:
                copy(key, log_keys[num_logged * key_dim :])
            copy(value, log_values[num_logged * value_dim :])
            log_decays[num_logged] = log_decay
        task = claim(tasks)


@kernel(STATE_FIELDS + "slots logs log_lens " + LOG_FIELDS)
def _fold_kernel(tasks):
    args = arguments(tasks)
    num_heads, state_size = args.num_heads, args.key_dim * args.value_dim
    weights = np.empty(args.log_capacity, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, head = task // num_heads, task % num_heads
        slot, log = ints(args.slots, sequence + 1)[sequence], ints(args.logs, sequence + 1)[sequence]
        num_logged = ints(args.log_lens, sequence + 1)[sequence]
        state = floats(args.states + 4 * (slot * args.state_stride + head * state_size), state_size)
        keys, values, log_decays = log_of_head(
            args, log, head // args.heads_per_key, head, args.key_dim, args.value_dim
        )
        carried = weigh(log_decays[:num_logged], np.float32(0.0), weights)
        carry(state, state, carried, False, keys, values, weights[:num_logged], args.key_dim)
        task = claim(tasks)
