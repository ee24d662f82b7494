"""Mamba-2 prefill on a CPU: the chunkwise form of ``mamba2.py``, with each head's state in cache from end to end.

A task is the heads of one group of one sequence, or some panels of their channels where there are more threads than
groups. It copies the states into scratch memory, walks the chunks, and writes the states to their slots. Products of
input and output projections are computed once for the heads of a task. There is no padding: a chunk costs in
proportion to its tokens.

Shape suffixes as in ``mamba2.py``.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import Slots
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
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs
from strandline.kernels.recurrences.mamba2_numba import LAYER_FIELDS, layer_arguments, packed, time_step
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
from strandline.kernels.tile_numba import LANES, PANEL, multiply, multiply_lower


def mamba2_prefill(inputs: Mamba2Inputs, state_SHKV: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
    """Numba version of :func:`strandline.kernels.recurrences.mamba2.mamba2_prefill`."""
    inputs, x_THV = packed(inputs), inputs.x_THV
    out_THV = x_THV.new_empty(x_THV.shape)
    copies, source_N = source_addresses(state_SHKV, slots, chunks.cut_slots)
    num_sequences, num_groups, (num_heads, head_dim) = len(source_N), inputs.B_TGK.shape[1], x_THV.shape[1:]
    heads_per_group = num_heads // num_groups
    num_parts = min(heads_per_group * cdiv(head_dim, PANEL), cdiv(torch.get_num_threads(), num_sequences * num_groups))
    _prefill_kernel(
        num_sequences * num_groups * num_parts,
        **layer_arguments(inputs, state_SHKV, slots.dst_N, out_THV),
        num_parts=num_parts,
        **chunk_arguments(source_N, chunks),
    )
    del copies  # which the kernel has read
    return out_THV


@helper
def _load_rows(address, dtype, first, stride, num_tokens, state_dim, rows):
    """Fill rows with tokens' input or output projections."""
    for token in range(num_tokens):
        load(address, dtype, first + token * stride, rows[token * state_dim : (token + 1) * state_dim])


@helper
def _load_steps(dt, dtype, first, stride, factor, bias, log_rate, limits, steps, total, since_start, until_end):
    """Compute each token's time step, the decay of earlier writes at it, and the decay of its write at the end."""
    raw, so_far = np.empty(1, np.float32), 0.0
    for token in range(steps.size):
        load(dt, dtype, first + token * stride, raw)
        steps[token], log_decay = time_step(
            factor * np.float64(raw[0]), np.float64(bias), np.float64(log_rate), limits[0], limits[1]
        )
        so_far += np.float64(log_decay)
        total[token] = so_far
    for token in range(steps.size):
        since_start[token] = decay_of(total[token])
        until_end[token] = decay_of(so_far - total[token])


@helper
def _weigh(products, total, num_tokens, attend):
    """Scale products by the remaining weight of each token's write at a later token.

    Tiles read past the diagonal, where the entries are zeros.
    """
    for token in range(num_tokens):
        here = total[token]
        for block in range(0, token + 1, LANES):
            first = token * MATRIX_ROW + block
            product, row = products[first : first + LANES], attend[first : first + LANES]
            totals = total[block : block + LANES]
            for i in range(LANES):
                row[i] = product[i] * decay_of(here - totals[i]) if block + i <= token else np.float32(0.0)


@helper
def _add_scaled(values, factor, num_tokens, rows):
    """Add values times a factor to rows."""
    for token in range(num_tokens):
        value, row = floats(values + 4 * token * PANEL, PANEL), floats(rows + 4 * token * PANEL, PANEL)
        for i in range(PANEL):
            row[i] += factor * value[i]


@helper
def _advance(
    is_zero, B, C, state_dim, num_tokens, attend, steps, since_start, until_end, skip, value, written, read, state
):
    """Run one chunk over one panel: move the state over it and fill ``read`` with the results."""
    kept = np.float32(0.0)
    if not is_zero:
        multiply(C, state_dim, 1, state, read, PANEL, num_tokens, state_dim, np.float32(0.0))
        scale_rows(read, since_start, num_tokens, read)
        kept = np.float32(1.0)
    scale_rows(value, steps, num_tokens, written)
    multiply_lower(attend, MATRIX_ROW, written, read, PANEL, num_tokens, kept)
    _add_scaled(value, skip, num_tokens, read)
    scale_rows(written, until_end, num_tokens, written)
    kept = np.float32(0.0) if is_zero else since_start[num_tokens - 1]
    multiply(B, 1, state_dim, written, state, PANEL, state_dim, num_tokens, kept)


@kernel(LAYER_FIELDS + "num_parts " + CHUNK_FIELDS)
def _prefill_kernel(tasks):
    args = arguments(tasks)
    num_heads, heads_per_group, state_dim, head_dim = (
        args.num_heads,
        args.heads_per_group,
        args.state_dim,
        args.head_dim,
    )
    dtype, num_parts, num_sequences, num_chunks = args.dtype, args.num_parts, args.num_sequences, args.num_chunks
    log_rates, biases = floats(args.log_rates, num_heads), floats(args.biases, num_heads)
    skips, limits = floats(args.skips, num_heads), (args.min_step, args.max_step)
    sources, dst = ints(args.sources, num_sequences), ints(args.dst, num_sequences)
    first_chunks, starts = ints(args.first_chunks, num_sequences + 1), ints(args.starts, num_chunks)
    lengths, cut_slots = ints(args.lengths, num_chunks), ints(args.cut_slots, num_chunks)

    num_groups, num_panels = num_heads // heads_per_group, (head_dim + PANEL - 1) // PANEL
    panel_size, state_size, out_stride = state_dim * PANEL, state_dim * head_dim, num_heads * head_dim
    matrix_size, rows_size = CHUNK_TOKENS * MATRIX_ROW, CHUNK_TOKENS * PANEL
    B, C = np.empty(CHUNK_TOKENS * state_dim, np.float32), np.empty(CHUNK_TOKENS * state_dim, np.float32)
    B_panels = np.zeros(TOKEN_PANELS * panel_size, np.float32)
    products, attend = np.empty(matrix_size, np.float32), np.empty(matrix_size, np.float32)
    values, results = np.zeros(num_panels * rows_size, np.float32), np.empty(num_panels * rows_size, np.float32)
    written = np.empty(rows_size, np.float32)
    states = np.empty(heads_per_group * num_panels * panel_size, np.float32)
    total, steps = np.zeros(MATRIX_ROW, np.float64), np.empty(CHUNK_TOKENS, np.float32)
    since_start, until_end = np.empty(CHUNK_TOKENS, np.float32), np.empty(CHUNK_TOKENS, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        sequence, group = task // (num_groups * num_parts), task // num_parts % num_groups
        part, most_parts = task % num_parts, heads_per_group * num_panels
        # Panels are numbered over all heads of the group.
        first_of_all, end_of_all = part * most_parts // num_parts, (part + 1) * most_parts // num_parts
        first_head, end_head = first_of_all // num_panels, (end_of_all + num_panels - 1) // num_panels

        is_zero = sources[sequence] == 0
        for chunk in range(first_chunks[sequence], first_chunks[sequence + 1]):
            start, length = starts[chunk], lengths[chunk]
            is_first, is_last = chunk == first_chunks[sequence], chunk + 1 == first_chunks[sequence + 1]
            offset = group * state_dim
            _load_rows(args.B, dtype, start * args.B_stride + offset, args.B_stride, length, state_dim, B)
            _load_rows(args.C, dtype, start * args.C_stride + offset, args.C_stride, length, state_dim, C)
            transpose(B, length, state_dim, B_panels)
            multiply_tokens(C.ctypes.data, B_panels.ctypes.data, length, state_dim, products.ctypes.data)

            for head_of_group in range(first_head, end_head):
                head = group * heads_per_group + head_of_group
                first_panel = max(first_of_all - head_of_group * num_panels, 0)
                end_panel = min(end_of_all - head_of_group * num_panels, num_panels)
                head_states = states[(head_of_group * num_panels + first_panel) * panel_size :]
                if is_first and not is_zero:
                    source = floats(sources[sequence] + 4 * head * state_size, state_size)
                    read_state(source, first_panel, end_panel, state_dim, head_dim, head_states)

                dt = (args.dt, args.dt_dtype, start * args.dt_stride + head, args.dt_stride, args.dt_factor)
                _load_steps(*dt, biases[head], log_rates[head], limits, steps[:length], total, since_start, until_end)
                _weigh(products, total, length, attend)
                tokens = (is_zero, B.ctypes.data, C.ctypes.data, state_dim, length, attend.ctypes.data)
                factors = (steps, since_start, until_end, skips[head])

                first, panels = head * head_dim, (first_panel, end_panel, head_dim, length)
                load_values(args.x, dtype, start * args.x_stride + first, args.x_stride, *panels, values.ctypes.data)
                for panel in range(end_panel - first_panel):
                    value = values.ctypes.data + 4 * panel * rows_size
                    read = results.ctypes.data + 4 * panel * rows_size
                    state = head_states.ctypes.data + 4 * panel * panel_size
                    _advance(*tokens, *factors, value, written.ctypes.data, read, state)
                store_results(args.out, dtype, start * out_stride + first, out_stride, *panels, results.ctypes.data)

                for slot in (cut_slots[chunk], dst[sequence] if is_last else NULL_SLOT):
                    if slot != NULL_SLOT:
                        target = floats(args.states + 4 * (slot * args.state_stride + head * state_size), state_size)
                        write_state(head_states, first_panel, end_panel, state_dim, head_dim, target)
            is_zero = False
        task = claim(tasks)
