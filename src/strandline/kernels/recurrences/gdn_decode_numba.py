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
from strandline.kernels.recurrences.chunk_numba import refuse_overwritten, state_arguments
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.runtime_numba import (
    addresses,
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
    prefetch,
    row_arguments,
    store,
)

PREFETCH_BYTES = 4096
"""Prefetch distance in a state: a page, since the hardware prefetcher stops at its end."""

CACHE_LINE_BYTES = 64

STATE_FIELDS = "num_heads heads_per_key key_dim value_dim states state_stride "

LAYER_FIELDS = (
    STATE_FIELDS
    + "dtype gate_dtype q q_stride k k_stride v v_stride a a_stride b b_stride rates biases max_beta dst out "
)

LOG_FIELDS = "log_keys log_keys_stride log_values log_values_stride log_decays log_decays_stride log_capacity "
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
            **_state_arguments(state_SHKV, num_key_heads),
            **addresses(slots=slot_N, logs=log_N, log_lens=len_N),
            **log_arguments(memory.of_layer(layer)),
        )


def layer_arguments(inputs: GatedDeltaInputs, state_SHKV: Tensor, dst_N: Tensor, out: Tensor) -> dict[str, int]:
    """Return the arguments that ``LAYER_FIELDS`` names; the channels of each token are contiguous."""
    q, k, v, a, b, A_log_H, dt_bias_H, max_beta = inputs
    return {
        **_state_arguments(state_SHKV, k.shape[1]),
        "dtype": kind(q),
        "gate_dtype": kind(a),
        **row_arguments(q=q, k=k, v=v, a=a, b=b),
        **addresses(rates=A_log_H, biases=dt_bias_H, dst=dst_N, out=out),
        "max_beta": max_beta,
    }


def _state_arguments(state_SHKV: Tensor, num_key_heads: int) -> dict[str, int]:
    _, num_heads, key_dim, value_dim = state_SHKV.shape
    return {
        "num_heads": num_heads,
        "heads_per_key": num_heads // num_key_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        **state_arguments(state_SHKV),
    }


def log_arguments(memory: LogMemory) -> dict[str, int]:
    rows = row_arguments(log_keys=memory.key_JGLK, log_values=memory.value_JHLV, log_decays=memory.decay_JHL)
    return {**rows, "log_capacity": memory.decay_JHL.shape[2]}


def packed(inputs: GatedDeltaInputs) -> GatedDeltaInputs:
    """Return inputs in which the channels of each token are contiguous."""
    return GatedDeltaInputs(*map(packed_rows, inputs[:5]), *inputs[5:])


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
def gates(a, b, log_rate, bias, max_beta):
    """Return the log decay and the write strength, computed in float64 as in the torch version."""
    x = a + bias
    softplus = x if x > 20.0 else math.log1p(math.exp(x))
    log_decay = -min(softplus * math.exp(log_rate), -MIN_LOG_DECAY)
    return np.float32(log_decay), np.float32(max_beta / (1.0 + math.exp(-b)))


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
def weigh(log_decays, log_decay, weights):
    """Compute the remaining weight of each logged token's write; return that of the state.

    Decays are added, never subtracted: a weak one beside a strong one would be lost.
    """
    total = np.float64(log_decay)
    for entry in range(log_decays.size - 1, -1, -1):
        weights[entry] = np.float32(math.exp(total))
        total += log_decays[entry]
    return np.float32(math.exp(total))


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


@helper
def carry(source, target, carried, is_zero, keys, values, weights, key_dim):
    """Write the decayed source and the decayed logged writes to the target."""
    num_columns = target.size // key_dim
    for row in range(key_dim):
        written = target[row * num_columns : (row + 1) * num_columns]
        if is_zero:
            written[:] = 0.0
        else:
            read = source[row * num_columns : (row + 1) * num_columns]
            for i in range(num_columns):
                written[i] = carried * read[i]
        for entry in range(weights.size):
            logged = values[entry * num_columns : (entry + 1) * num_columns]
            factor = weights[entry] * keys[entry * key_dim + row]
            for i in range(num_columns):
                written[i] += factor * logged[i]


@helper
def add(state, key, value):
    """Add a token's write."""
    num_columns = value.size
    for row in range(key.size):
        written = state[row * num_columns : (row + 1) * num_columns]
        for i in range(num_columns):
            written[i] += key[row] * value[i]


@helper
def log_of_head(args, log, key_head, head, key_dim, value_dim):
    """Return keys, values and log decays of a log, of one head."""
    capacity = args.log_capacity
    return (
        floats(args.log_keys + 4 * (log * args.log_keys_stride + key_head * capacity * key_dim), capacity * key_dim),
        floats(
            args.log_values + 4 * (log * args.log_values_stride + head * capacity * value_dim), capacity * value_dim
        ),
        floats(args.log_decays + 4 * (log * args.log_decays_stride + head * capacity), capacity),
    )


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
