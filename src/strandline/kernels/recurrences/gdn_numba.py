"""What prefill and decode of Gated DeltaNet share on a CPU: a layer's arguments, and a token's gates.

No kernel is compiled here, so that a process that compiles prefill's need not compile decode's.

Shape suffixes as in ``gdn.py``.
"""

# mypy: ignore-errors

import math

import numpy as np
from torch import Tensor

from strandline.kernels.recurrences.chunk_numba import state_arguments
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.gdn import GatedDeltaInputs
from strandline.kernels.runtime_numba import addresses, helper, kind, packed_rows, row_arguments

STATE_FIELDS = "num_heads heads_per_key key_dim value_dim states state_stride "

LAYER_FIELDS = (
    STATE_FIELDS
    + "dtype gate_dtype q q_stride k k_stride v v_stride a a_stride b b_stride rates biases max_beta dst out "
)


def layer_arguments(inputs: GatedDeltaInputs, state_SHKV: Tensor, dst_N: Tensor, out: Tensor) -> dict[str, int]:
    """Return the arguments that ``LAYER_FIELDS`` names; the channels of each token are contiguous."""
    q, k, v, a, b, A_log_H, dt_bias_H, max_beta = inputs
    return {
        **head_arguments(state_SHKV, k.shape[1]),
        "dtype": kind(q),
        "gate_dtype": kind(a),
        **row_arguments(q=q, k=k, v=v, a=a, b=b),
        **addresses(rates=A_log_H, biases=dt_bias_H, dst=dst_N, out=out),
        "max_beta": max_beta,
    }


def head_arguments(state_SHKV: Tensor, num_key_heads: int) -> dict[str, int]:
    """Return the arguments that ``STATE_FIELDS`` names."""
    _, num_heads, key_dim, value_dim = state_SHKV.shape
    return {
        "num_heads": num_heads,
        "heads_per_key": num_heads // num_key_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        **state_arguments(state_SHKV),
    }


def packed(inputs: GatedDeltaInputs) -> GatedDeltaInputs:
    """Return inputs in which the channels of each token are contiguous."""
    return GatedDeltaInputs(*map(packed_rows, inputs[:5]), *inputs[5:])


@helper
def gates(a, b, log_rate, bias, max_beta):
    """Return the log decay and the write strength, computed in float64 as in the torch version."""
    x = a + bias
    softplus = x if x > 20.0 else math.log1p(math.exp(x))
    log_decay = -min(softplus * math.exp(log_rate), -MIN_LOG_DECAY)
    return np.float32(log_decay), np.float32(max_beta / (1.0 + math.exp(-b)))
