"""What recurrences of Numba share: where states and chunks are, states and values in panels, and products of tokens.

A chunk's tokens and a state's value channels lie in panels of ``PANEL`` columns, as ``tile_numba.py`` multiplies them.

Shape suffixes: N sequences, S slots, H heads, K key channels, V value channels.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.recurrences.chunkwise import MIN_EXPONENT, are_overwritten
from strandline.kernels.runtime_numba import addresses, exp, floats, helper, load, store
from strandline.kernels.sizes import cdiv
from strandline.kernels.tile_numba import PANEL, multiply

TOKEN_PANELS = cdiv(CHUNK_TOKENS, PANEL)
MATRIX_ROW = TOKEN_PANELS * PANEL
"""Elements in a row of a chunk's matrices."""


CHUNK_FIELDS = "sources num_sequences num_chunks first_chunks starts lengths cut_slots "


def chunk_arguments(source_N: Tensor, chunks: ChunkTable) -> dict[str, int]:
    """Return the arguments that ``CHUNK_FIELDS`` names."""
    tables = {"first_chunks": chunks.first_chunks_N1, "starts": chunks.starts_C, "lengths": chunks.lengths_C}
    return {
        **addresses(sources=source_N, cut_slots=chunks.cut_slots_C, **tables),
        "num_sequences": len(source_N),
        "num_chunks": len(chunks.starts),
    }


def state_arguments(state_SHKV: Tensor) -> dict[str, int]:
    """Return where the states of all slots lie.

    Raises:
        ValueError: they are not float32.
    """
    if state_SHKV.dtype != torch.float32:
        raise ValueError(f"states are {state_SHKV.dtype}; these kernels read and write float32")
    return {"states": state_SHKV.data_ptr(), "state_stride": state_SHKV.stride(0)}


def refuse_overwritten(slots: Slots) -> None:
    """Raise an error where a kernel of a token per sequence would write what it reads."""
    if any(are_overwritten(slots)):
        raise ValueError(f"a sequence writes where another one reads: from slots {slots.src_N} to {slots.dst_N}")


def source_addresses(state_SHKV: Tensor, slots: Slots, cut_slots: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Return copies of initial states that another sequence will overwrite; and addresses of all, 0 for zeros."""
    copies, addresses = [], []
    first, slot_bytes = state_SHKV.data_ptr(), 4 * state_SHKV.stride(0)
    for source, is_overwritten in zip(slots.src_N.tolist(), are_overwritten(slots, cut_slots), strict=True):
        if source == NULL_SLOT:
            addresses.append(0)
        elif is_overwritten:
            copies.append(state_SHKV[source].clone())
            addresses.append(copies[-1].data_ptr())
        else:
            addresses.append(first + source * slot_bytes)
    return copies, torch.tensor(addresses)


@helper
def transpose(keys, num_tokens, key_dim, panels):
    """Fill panels of tokens with rows of one key channel."""
    for token in range(num_tokens):
        panel, column = token // PANEL, token % PANEL
        row = keys[token * key_dim : (token + 1) * key_dim]
        target = panels[panel * key_dim * PANEL + column :]
        for i in range(key_dim):
            target[i * PANEL] = row[i]


@helper
def decay_of(exponent):
    """Return ``e ** exponent`` of at most 0; what no sum shows is 0."""
    x = np.float32(exponent)
    return np.float32(0.0) if x < MIN_EXPONENT else exp(min(x, np.float32(0.0)) if x == x else x)


@helper
def read_state(state, first_panel, end_panel, key_dim, value_dim, scratch):
    """Copy panels of a state; channels past the last one are 0."""
    for channel in range(key_dim):
        for panel in range(first_panel, end_panel):
            row = state[channel * value_dim + panel * PANEL :]
            target = scratch[((panel - first_panel) * key_dim + channel) * PANEL :]
            if (panel + 1) * PANEL <= value_dim:
                for i in range(PANEL):
                    target[i] = row[i]
            else:
                size = value_dim - panel * PANEL
                for i in range(PANEL):
                    target[i] = row[i] if i < size else np.float32(0.0)


@helper
def write_state(scratch, first_panel, end_panel, key_dim, value_dim, state):
    for channel in range(key_dim):
        for panel in range(first_panel, end_panel):
            row = scratch[((panel - first_panel) * key_dim + channel) * PANEL :]
            target = state[channel * value_dim + panel * PANEL :]
            if (panel + 1) * PANEL <= value_dim:
                for i in range(PANEL):
                    target[i] = row[i]
            else:
                for i in range(value_dim - panel * PANEL):
                    target[i] = row[i]


@helper
def load_values(address, dtype, first, stride, first_panel, end_panel, value_dim, num_tokens, values):
    """Fill panels of tokens' values; channels past the last one are unchanged."""
    for token in range(num_tokens):
        for panel in range(first_panel, end_panel):
            offset = first + token * stride + panel * PANEL
            row = values + 4 * ((panel - first_panel) * CHUNK_TOKENS + token) * PANEL
            if (panel + 1) * PANEL <= value_dim:
                load(address, dtype, offset, floats(row, PANEL))
            else:
                load(address, dtype, offset, floats(row, value_dim - panel * PANEL))


@helper
def store_results(address, dtype, first, stride, first_panel, end_panel, value_dim, num_tokens, results):
    for token in range(num_tokens):
        for panel in range(first_panel, end_panel):
            offset = first + token * stride + panel * PANEL
            row = results + 4 * ((panel - first_panel) * CHUNK_TOKENS + token) * PANEL
            if (panel + 1) * PANEL <= value_dim:
                store(address, dtype, offset, floats(row, PANEL))
            else:
                store(address, dtype, offset, floats(row, value_dim - panel * PANEL))


@helper
def scale_rows(values, factors, num_tokens, rows):
    """Fill rows with values times factors."""
    for token in range(num_tokens):
        value, row = floats(values + 4 * token * PANEL, PANEL), floats(rows + 4 * token * PANEL, PANEL)
        for i in range(PANEL):
            row[i] = factors[token] * value[i]


@helper
def multiply_tokens(rows, key_panels, num_tokens, key_dim, products):
    """Compute the products of keys or queries with all keys up to their own token's, and some more."""
    for first in range(0, num_tokens, PANEL):
        left, product = rows + 4 * first * key_dim, products + 4 * (first * MATRIX_ROW + first)
        right = key_panels + 4 * first * key_dim
        multiply(left, key_dim, 1, right, product, MATRIX_ROW, num_tokens - first, key_dim, np.float32(0.0))
