"""Decode logs on a CPU: a head's logged tokens, their weights, and the state that they are folded into.

Shape suffixes as in ``gdn_log.py``.
"""

# mypy: ignore-errors

import math

import numpy as np

from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.runtime_numba import floats, helper, row_arguments

LOG_FIELDS = "log_keys log_keys_stride log_values log_values_stride log_decays log_decays_stride log_capacity "


def log_arguments(memory: LogMemory) -> dict[str, int]:
    """Return the arguments that ``LOG_FIELDS`` names."""
    rows = row_arguments(log_keys=memory.key_JGLK, log_values=memory.value_JHLV, log_decays=memory.decay_JHL)
    return {**rows, "log_capacity": memory.decay_JHL.shape[2]}


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
