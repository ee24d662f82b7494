"""Gated DeltaNet prefill on a CPU: the chunkwise form of ``gdn.py``, with each head's state in cache from end to end.

A task is the value heads of one key head of one sequence, or some panels of their channels where there are more threads
than key heads. It copies the states into scratch memory, walks the chunks, and writes the states to their slots.
There is no padding: a chunk costs in proportion to its tokens. All large matrix products are tiles of registers
(``tile_numba.py``).

The triangular system is solved for the written values, row by row, and never inverted.

Shape suffixes as in ``gdn.py``.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.recurrences.chunk_numba import (
    CHUNK_FIELDS,
    MATRIX_ROW,
    TOKEN_PANELS,
    chunk_arguments,
    decay_of,
    load_values,
    multiply_tokens,
    read_state,
    scale_rows,
    source_addresses,
    store_results,
    transpose,
    write_state,
)
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_numba import LAYER_FIELDS, gates, layer_arguments, packed
from strandline.kernels.recurrences.rerun import of_step
from strandline.kernels.runtime_numba import (
    arguments,
    claim,
    floats,
    helper,
    ints,
    kernel,
    load,
)
from strandline.kernels.sizes import cdiv
from strandline.kernels.tile_numba import LANES, PANEL, multiply, multiply_lower, substitute


def gdn_prefill(
    inputs: GatedDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    rerun: RerunBatch | None = None,
    out_THV: Tensor | None = None,
) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.gdn.gdn_prefill`."""
    inputs, v_THV = packed(inputs), inputs.v_THV
    if out_THV is None:
        out_THV = torch.empty(v_THV.shape, dtype=inputs.q_TGK.dtype)
    copies, source_N = source_addresses(state_SHKV, slots, chunks.cut_slots)
    num_sequences, num_key_heads, (num_heads, value_dim) = len(source_N), inputs.k_TGK.shape[1], v_THV.shape[1:]
    most_parts = num_heads // num_key_heads * cdiv(value_dim, PANEL)
    num_parts = min(most_parts, cdiv(torch.get_num_threads(), num_sequences * num_key_heads))
    _kernel(
        num_sequences * num_key_heads * num_parts,
        **layer_arguments(inputs, state_SHKV, slots.dst_N, out_THV),
        num_parts=num_parts,
        **chunk_arguments(source_N, chunks),
    )
    del copies  # which the kernel has read
    return of_step(rerun, out_THV)


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
def _weigh(key_products, query_products, total, beta, num_tokens, system, attend):
    """Scale products of keys, and of queries and keys, by the remaining weight of each token's write at a later token.

    A token's key does not read its own write. Tiles read past the diagonal, where the entries are zeros.
    """
    for token in range(num_tokens):
        strength, here = -beta[token], total[token]
        for block in range(0, token + 1, LANES):
            first = token * MATRIX_ROW + block
            by_key, by_query = key_products[first : first + LANES], query_products[first : first + LANES]
            system_row, attend_row = system[first : first + LANES], attend[first : first + LANES]
            totals = total[block : block + LANES]
            for i in range(LANES):
                decay = decay_of(here - totals[i])
                system_row[i] = by_key[i] * (strength * decay) if block + i < token else np.float32(0.0)
                attend_row[i] = by_query[i] * decay if block + i <= token else np.float32(0.0)


@helper
def _to_errors(values, left, strength, num_tokens, read):
    """Replace ``read`` by ``strength * (values - left * read)``."""
    for token in range(num_tokens):
        value, row = floats(values + 4 * token * PANEL, PANEL), floats(read + 4 * token * PANEL, PANEL)
        for i in range(PANEL):
            row[i] = strength[token] * (value[i] - left[token] * row[i])


@helper
def _load_gates(a, b, strides, dtype, rate, bias, max_beta, total, beta, since_start, until_end):
    """Compute each token's write strength, the decay of earlier writes at it, and the decay of its write at the end.

    Args:
        a, b: address and first number.
    """
    gate, so_far = np.empty(2, np.float32), 0.0
    for token in range(beta.size):
        load(a[0], dtype, a[1] + token * strides[0], gate[:1])
        load(b[0], dtype, b[1] + token * strides[1], gate[1:])
        inputs = (np.float64(gate[0]), np.float64(gate[1]), np.float64(rate), np.float64(bias))
        log_decay, beta[token] = gates(*inputs, max_beta)
        so_far += np.float64(log_decay)
        total[token] = so_far
    for token in range(beta.size):
        since_start[token] = decay_of(total[token])
        until_end[token] = decay_of(so_far - total[token])


@helper
def _advance(
    is_zero, keys, queries, key_dim, num_tokens, system, attend, beta, since_start, until_end, value, new, read, state
):
    """Run one chunk over one panel: move the state over it and fill ``read`` with the results."""
    if is_zero:
        scale_rows(value, beta, num_tokens, new)
    else:
        multiply(keys, key_dim, 1, state, new, PANEL, num_tokens, key_dim, np.float32(0.0))
        multiply(queries, key_dim, 1, state, read, PANEL, num_tokens, key_dim, np.float32(0.0))
        _to_errors(value, since_start, beta, num_tokens, new)
        scale_rows(read, since_start, num_tokens, read)
    substitute(system, MATRIX_ROW, new, num_tokens)
    kept = np.float32(0.0) if is_zero else np.float32(1.0)
    multiply_lower(attend, MATRIX_ROW, new, read, PANEL, num_tokens, kept)
    scale_rows(new, until_end, num_tokens, new)
    kept = np.float32(0.0) if is_zero else since_start[num_tokens - 1]
    multiply(keys, 1, key_dim, new, state, PANEL, key_dim, num_tokens, kept)


@kernel(LAYER_FIELDS + "num_parts " + CHUNK_FIELDS)
def _kernel(tasks):
    args = arguments(tasks)
    num_heads, heads_per_key, key_dim, value_dim = args.num_heads, args.heads_per_key, args.key_dim, args.value_dim
    dtype, num_parts, num_sequences, num_chunks = args.dtype, args.num_parts, args.num_sequences, args.num_chunks
    rates, biases = floats(args.rates, num_heads), floats(args.biases, num_heads)
    sources, dst = ints(args.sources, num_sequences), ints(args.dst, num_sequences)
    first_chunks, starts = ints(args.first_chunks, num_sequences + 1), ints(args.starts, num_chunks)
    lengths, cut_slots = ints(args.lengths, num_chunks), ints(args.cut_slots, num_chunks)

    num_key_heads, num_panels = num_heads // heads_per_key, (value_dim + PANEL - 1) // PANEL
    panel_size, state_size, out_stride = key_dim * PANEL, key_dim * value_dim, num_heads * value_dim
    matrix_size, rows_size = CHUNK_TOKENS * MATRIX_ROW, CHUNK_TOKENS * PANEL
    keys, queries = np.empty(CHUNK_TOKENS * key_dim, np.float32), np.empty(CHUNK_TOKENS * key_dim, np.float32)
    key_panels = np.zeros(TOKEN_PANELS * panel_size, np.float32)
    key_products, query_products = np.empty(matrix_size, np.float32), np.empty(matrix_size, np.float32)
    system, attend = np.empty(matrix_size, np.float32), np.empty(matrix_size, np.float32)
    values, results = np.zeros(num_panels * rows_size, np.float32), np.empty(num_panels * rows_size, np.float32)
    written = np.empty(rows_size, np.float32)
    states = np.empty(heads_per_key * num_panels * panel_size, np.float32)
    total, beta = np.zeros(MATRIX_ROW, np.float64), np.empty(CHUNK_TOKENS, np.float32)
    since_start, until_end = np.empty(CHUNK_TOKENS, np.float32), np.empty(CHUNK_TOKENS, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, key_head = task // (num_key_heads * num_parts), task // num_parts % num_key_heads
        part, most_parts = task % num_parts, heads_per_key * num_panels
        # Panels are numbered over all value heads of the key head.
        first_of_all, end_of_all = part * most_parts // num_parts, (part + 1) * most_parts // num_parts
        first_head, end_head = first_of_all // num_panels, (end_of_all + num_panels - 1) // num_panels

        is_zero = sources[sequence] == 0
        for chunk in range(first_chunks[sequence], first_chunks[sequence + 1]):
            start, length = starts[chunk], lengths[chunk]
            is_first, is_last = chunk == first_chunks[sequence], chunk + 1 == first_chunks[sequence + 1]
            offset, scale = key_head * key_dim, 1.0 / np.sqrt(np.float64(key_dim))
            _load_normalised(args.k, dtype, start * args.k_stride + offset, args.k_stride, 1.0, keys, length, key_dim)
            _load_normalised(
                args.q, dtype, start * args.q_stride + offset, args.q_stride, scale, queries, length, key_dim
            )
            transpose(keys, length, key_dim, key_panels)
            key_rows, query_rows = keys.ctypes.data, queries.ctypes.data
            multiply_tokens(key_rows, key_panels.ctypes.data, length, key_dim, key_products.ctypes.data)
            multiply_tokens(query_rows, key_panels.ctypes.data, length, key_dim, query_products.ctypes.data)

            for head_of_key in range(first_head, end_head):
                head = key_head * heads_per_key + head_of_key
                first_panel = max(first_of_all - head_of_key * num_panels, 0)
                end_panel = min(end_of_all - head_of_key * num_panels, num_panels)
                head_states = states[(head_of_key * num_panels + first_panel) * panel_size :]
                if is_first and not is_zero:
                    source = floats(sources[sequence] + 4 * head * state_size, state_size)
                    read_state(source, first_panel, end_panel, key_dim, value_dim, head_states)

                a, b = (args.a, start * args.a_stride + head), (args.b, start * args.b_stride + head)
                strides, gate = (args.a_stride, args.b_stride), (rates[head], biases[head], args.max_beta)
                _load_gates(a, b, strides, args.gate_dtype, *gate, total, beta[:length], since_start, until_end)
                _weigh(key_products, query_products, total, beta, length, system, attend)
                tokens = (is_zero, key_rows, query_rows, key_dim, length, system.ctypes.data, attend.ctypes.data)
                factors = (beta, since_start, until_end)

                first, panels = head * value_dim, (first_panel, end_panel, value_dim, length)
                load_values(args.v, dtype, start * args.v_stride + first, args.v_stride, *panels, values.ctypes.data)
                for panel in range(end_panel - first_panel):
                    value = values.ctypes.data + 4 * panel * rows_size
                    read = results.ctypes.data + 4 * panel * rows_size
                    state = head_states.ctypes.data + 4 * panel * panel_size
                    _advance(*tokens, *factors, value, written.ctypes.data, read, state)
                store_results(args.out, dtype, start * out_stride + first, out_stride, *panels, results.ctypes.data)

                for slot in (cut_slots[chunk], dst[sequence] if is_last else NULL_SLOT):
                    if slot != NULL_SLOT:
                        target = floats(args.states + 4 * (slot * args.state_stride + head * state_size), state_size)
                        write_state(head_states, first_panel, end_panel, key_dim, value_dim, target)
            is_zero = False
        task = claim(tasks)
