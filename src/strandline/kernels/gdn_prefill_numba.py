"""Gated DeltaNet prefill on a CPU: the chunkwise form of ``gdn.py``, with each head's state in cache from end to end.

A task is one head of one sequence, or some panels of its value channels where there are fewer heads than threads. It
copies the state into scratch memory, walks the chunks, and writes the state wherever one is wanted. Nothing is padded:
a chunk costs in proportion to its tokens. All large products are tiles of registers (``tile_numba.py``).

The triangular system is solved for the values that are written, row by row, and never inverted.

Shape suffixes as in ``gdn.py``; P value channels of a panel.
"""

# mypy: ignore-errors

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels import gdn
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.gdn import L2_NORM_EPS, MIN_EXPONENT
from strandline.kernels.gdn_decode_numba import gates
from strandline.kernels.runtime_numba import (
    TASKS,
    claim,
    compiled,
    exp,
    floats,
    helper,
    ints,
    kind,
    load,
    packed_rows,
    store,
)
from strandline.kernels.sizes import cdiv
from strandline.kernels.tile_numba import PANEL, TALL, multiply, multiply_lower, substitute

TOKEN_PANELS = cdiv(CHUNK_TOKENS, PANEL)
MATRIX_ROW = TOKEN_PANELS * PANEL
"""Numbers of a row of a chunk's own matrices."""


def gdn_prefill(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """Numba twin of :func:`strandline.kernels.gdn.gdn_prefill`."""
    inputs = (q_TGK, k_TGK, v_THV, a_TH, b_TH)
    if state_SHKV.dtype != torch.float32:
        return gdn.gdn_prefill.__wrapped__(*inputs, A_log_H, dt_bias_H, state_SHKV, src_N, dst_N, chunks)
    num_sequences, (num_heads, key_dim, value_dim) = len(src_N), state_SHKV.shape[1:]
    inputs = [packed_rows(x) for x in inputs]
    out_THV = torch.empty(v_THV.shape, dtype=q_TGK.dtype)
    copies, source_N = _sources(state_SHKV, src_N.tolist(), dst_N.tolist(), chunks.cut_slots)
    num_parts = min(cdiv(value_dim, PANEL), cdiv(torch.get_num_threads(), num_sequences * num_heads))
    tables = (chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C)
    _kernel(
        num_sequences * num_heads * num_parts,
        *(num_heads, num_heads // k_TGK.shape[1], key_dim, value_dim, kind(q_TGK), kind(a_TH), num_parts),
        *[number for x in inputs for number in (x.data_ptr(), x.stride(0))],
        *(A_log_H.data_ptr(), dt_bias_H.data_ptr(), state_SHKV.data_ptr(), state_SHKV.stride(0)),
        *(source_N.data_ptr(), dst_N.data_ptr(), out_THV.data_ptr(), num_sequences, len(chunks.starts)),
        *(table.data_ptr() for table in tables),
    )
    del copies  # which the kernel has read
    return out_THV


def _sources(
    state_SHKV: Tensor, src: list[int], dst: list[int], cut_slots: tuple[int, ...]
) -> tuple[list[Tensor], Tensor]:
    """Return addresses of initial states, 0 for zeros; and copies of those that somebody else will overwrite."""
    writers = Counter(dst)
    writers.update(cut_slots)
    copies, addresses = [], []
    first, slot_bytes = state_SHKV.data_ptr(), 4 * state_SHKV.stride(0)
    for source, target in zip(src, dst, strict=True):
        if source == NULL_SLOT:
            addresses.append(0)
        elif writers[source] > (source == target):
            copies.append(state_SHKV[source].clone())
            addresses.append(copies[-1].data_ptr())
        else:
            addresses.append(first + source * slot_bytes)
    return copies, torch.tensor(addresses)


@helper
def _load_normalised(address, dtype, first, stride, scale, rows, num_tokens, key_dim):
    """Fill rows with keys or queries of length ``scale``."""
    for token in range(num_tokens):
        row = rows[token * key_dim : (token + 1) * key_dim]
        load(address, dtype, first + token * stride, row)
        square = np.float32(0.0)
        for i in range(key_dim):
            square += row[i] * row[i]
        factor = np.float32(scale / np.sqrt(np.float64(square) + L2_NORM_EPS))
        for i in range(key_dim):
            row[i] *= factor


@helper
def _transpose(keys, num_tokens, key_dim, panels):
    """Fill panels of tokens with rows of one key channel."""
    for token in range(num_tokens):
        panel, column = token // PANEL, token % PANEL
        row = keys[token * key_dim : (token + 1) * key_dim]
        target = panels[panel * key_dim * PANEL + column :]
        for i in range(key_dim):
            target[i * PANEL] = row[i]


@helper
def _decay(exponent):
    """Return ``e ** exponent`` of at most 0; what no sum shows is 0."""
    x = np.float32(exponent)
    return np.float32(0.0) if x < MIN_EXPONENT else exp(min(x, np.float32(0.0)) if x == x else x)


@helper
def _weigh(system, attend, total, beta, num_tokens):
    """Weigh products of keys, and of queries and keys, by what is left of each token's write at a later one."""
    for token in range(num_tokens):
        first = token * MATRIX_ROW
        system_row, attend_row = system[first : first + MATRIX_ROW], attend[first : first + MATRIX_ROW]
        strength, here = -beta[token], total[token]
        for i in range(token + 1):
            decay = _decay(here - total[i])
            system_row[i] *= strength * decay
            attend_row[i] *= decay
        # Its own write is none of what a token's key reads; the last are read by tiles of the rows before.
        system_row[token] = np.float32(0.0)
        for i in range(token + 1, min(token + TALL, num_tokens)):
            attend_row[i] = np.float32(0.0)


@helper
def _read_state(state, panel, key_dim, value_dim, scratch):
    """Copy a panel of a state in memory; what lies past its last channel is 0."""
    size = min(PANEL, value_dim - panel * PANEL)
    for channel in range(key_dim):
        row, target = state[channel * value_dim + panel * PANEL :], scratch[channel * PANEL : (channel + 1) * PANEL]
        for i in range(size):
            target[i] = row[i]
        for i in range(size, PANEL):
            target[i] = np.float32(0.0)


@helper
def _write_state(scratch, panel, key_dim, value_dim, state):
    size = min(PANEL, value_dim - panel * PANEL)
    for channel in range(key_dim):
        row, target = scratch[channel * PANEL : (channel + 1) * PANEL], state[channel * value_dim + panel * PANEL :]
        for i in range(size):
            target[i] = row[i]


@helper
def _errors(value, strength, left, read):
    """Put what is written, but for other tokens of the chunk, in place of what was read."""
    for i in range(read.size):
        read[i] = strength * (value[i] - left * read[i])


@helper
def _scale(factor, row):
    for i in range(row.size):
        row[i] *= factor


@compiled
def _kernel(args):
    num_heads, heads_per_key, key_dim, value_dim = args[2], args[3], args[4], args[5]
    dtype, gate_dtype, num_parts = args[6], args[7], args[8]
    q, q_stride, k, k_stride, v, v_stride = args[9], args[10], args[11], args[12], args[13], args[14]
    a, a_stride, b, b_stride = args[15], args[16], args[17], args[18]
    rates, biases = floats(args[19], num_heads), floats(args[20], num_heads)
    slots, slot_stride, out, num_sequences, num_chunks = args[21], args[22], args[25], args[26], args[27]
    sources, dst = ints(args[23], num_sequences), ints(args[24], num_sequences)
    first_chunks, starts = ints(args[28], num_sequences + 1), ints(args[29], num_chunks)
    lengths, cut_slots = ints(args[30], num_chunks), ints(args[31], num_chunks)

    num_panels, panel_size, state_size = (value_dim + PANEL - 1) // PANEL, key_dim * PANEL, key_dim * value_dim
    keys, queries = np.empty(CHUNK_TOKENS * key_dim, np.float32), np.empty(CHUNK_TOKENS * key_dim, np.float32)
    key_panels = np.zeros(TOKEN_PANELS * panel_size, np.float32)
    system, attend = (
        np.zeros(CHUNK_TOKENS * MATRIX_ROW, np.float32),
        np.zeros(CHUNK_TOKENS * MATRIX_ROW, np.float32),
    )
    written, result = np.empty(CHUNK_TOKENS * PANEL, np.float32), np.empty(CHUNK_TOKENS * PANEL, np.float32)
    states, value = np.empty(num_panels * panel_size, np.float32), np.zeros(PANEL, np.float32)
    total, beta = np.empty(CHUNK_TOKENS, np.float64), np.empty(CHUNK_TOKENS, np.float32)
    since_start, until_end = np.empty(CHUNK_TOKENS, np.float32), np.empty(CHUNK_TOKENS, np.float32)
    gate = np.empty(2, np.float32)
    task = claim(args)
    while task < args[TASKS]:
        sequence, head, part = task // (num_heads * num_parts), task // num_parts % num_heads, task % num_parts
        first_panel, end_panel = part * num_panels // num_parts, (part + 1) * num_panels // num_parts
        key_head = head // heads_per_key
        is_zero = sources[sequence] == 0
        if not is_zero:
            source = floats(sources[sequence] + 4 * head * state_size, state_size)
            for panel in range(first_panel, end_panel):
                _read_state(source, panel, key_dim, value_dim, states[panel * panel_size :])

        for chunk in range(first_chunks[sequence], first_chunks[sequence + 1]):
            start, length = starts[chunk], lengths[chunk]
            place = key_head * key_dim
            _load_normalised(k, dtype, start * k_stride + place, k_stride, 1.0, keys, length, key_dim)
            scale = 1.0 / np.sqrt(np.float64(key_dim))
            _load_normalised(q, dtype, start * q_stride + place, q_stride, scale, queries, length, key_dim)
            _transpose(keys, length, key_dim, key_panels)
            so_far = 0.0
            for i in range(length):
                load(a, gate_dtype, (start + i) * a_stride + head, gate[:1])
                load(b, gate_dtype, (start + i) * b_stride + head, gate[1:])
                log_decay, strength = gates(
                    np.float64(gate[0]), np.float64(gate[1]), np.float64(rates[head]), np.float64(biases[head])
                )
                so_far += np.float64(log_decay)
                total[i], beta[i] = so_far, strength
            for i in range(length):
                since_start[i] = _decay(total[i])
                until_end[i] = _decay(so_far - total[i])

            key_rows, query_rows = keys.ctypes.data, queries.ctypes.data
            for panel in range((length + PANEL - 1) // PANEL):
                row = panel * PANEL
                right, corner = key_panels.ctypes.data + 4 * panel * panel_size, 4 * (row * MATRIX_ROW + row)
                for rows, matrix in ((key_rows, system.ctypes.data), (query_rows, attend.ctypes.data)):
                    left, product = rows + 4 * row * key_dim, matrix + corner
                    multiply(left, key_dim, 1, right, product, MATRIX_ROW, length - row, key_dim, np.float32(0.0))
            _weigh(system, attend, total, beta, length)

            for panel in range(first_panel, end_panel):
                state, new, read = states[panel * panel_size :].ctypes.data, written.ctypes.data, result.ctypes.data
                first, size = head * value_dim + panel * PANEL, min(PANEL, value_dim - panel * PANEL)
                if is_zero:
                    written[: length * PANEL] = np.float32(0.0)
                else:
                    multiply(key_rows, key_dim, 1, state, new, PANEL, length, key_dim, np.float32(0.0))
                    multiply(query_rows, key_dim, 1, state, read, PANEL, length, key_dim, np.float32(0.0))
                value[:] = np.float32(0.0)
                for i in range(length):
                    row = slice(i * PANEL, (i + 1) * PANEL)
                    load(v, dtype, (start + i) * v_stride + first, value[:size])
                    _errors(value, beta[i], since_start[i], written[row])
                    _scale(since_start[i], result[row])
                substitute(system.ctypes.data, MATRIX_ROW, new, length)
                kept = np.float32(0.0) if is_zero else np.float32(1.0)
                multiply_lower(attend.ctypes.data, MATRIX_ROW, new, read, PANEL, length, kept)
                for i in range(length):
                    row = slice(i * PANEL, (i + 1) * PANEL)
                    store(out, dtype, (start + i) * num_heads * value_dim + first, result[row][:size])
                    _scale(until_end[i], written[row])
                kept = np.float32(0.0) if is_zero else since_start[length - 1]
                multiply(key_rows, 1, key_dim, new, state, PANEL, key_dim, length, kept)
            is_zero = False

            is_last = chunk + 1 == first_chunks[sequence + 1]
            for slot in (cut_slots[chunk], dst[sequence] if is_last else NULL_SLOT):
                if slot != NULL_SLOT:
                    target = floats(slots + 4 * (slot * slot_stride + head * state_size), state_size)
                    for panel in range(first_panel, end_panel):
                        _write_state(states[panel * panel_size :], panel, key_dim, value_dim, target)
        task = claim(args)
