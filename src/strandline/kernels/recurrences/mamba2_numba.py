"""What prefill and decode of Mamba-2 share on a CPU: a layer's arguments, and a token's time step.

No kernel is compiled here, so that a process that compiles prefill's need not compile decode's.

Shape suffixes as in ``mamba2.py``.
"""

# mypy: ignore-errors

import math

import numpy as np
from torch import Tensor

from strandline.kernels.recurrences.chunk_numba import state_arguments
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.mamba2 import Mamba2Inputs
from strandline.kernels.runtime_numba import addresses, helper, kind, packed_rows, row_arguments

LAYER_FIELDS = (
    "num_heads heads_per_group state_dim head_dim dtype dt_dtype x x_stride B B_stride C C_stride dt dt_stride "
    "log_rates skips biases min_step:float max_step:float dt_factor:float states state_stride dst out "
)


def packed(inputs: Mamba2Inputs) -> Mamba2Inputs:
    """Return inputs in which the channels of each token are contiguous."""
    return Mamba2Inputs(*map(packed_rows, inputs[:4]), *inputs[4:])


def layer_arguments(inputs: Mamba2Inputs, state_SHKV: Tensor, dst_N: Tensor, out: Tensor) -> dict[str, float]:
    """Return the arguments that ``LAYER_FIELDS`` names; the channels of each token are contiguous."""
    x, B, C, dt, A_log_H, D_H, dt_bias_H, (min_step, max_step), dt_factor = inputs
    _, num_heads, state_dim, head_dim = state_SHKV.shape
    return {
        "num_heads": num_heads,
        "heads_per_group": num_heads // B.shape[1],
        "state_dim": state_dim,
        "head_dim": head_dim,
        "dtype": kind(x),
        "dt_dtype": kind(dt),
        **row_arguments(x=x, B=B, C=C, dt=dt),
        **addresses(log_rates=A_log_H, skips=D_H, biases=dt_bias_H, dst=dst_N, out=out),
        "min_step": min_step,
        "max_step": max_step,
        "dt_factor": dt_factor,
        **state_arguments(state_SHKV),
    }


@helper
def time_step(dt, bias, log_rate, min_step, max_step):
    """Return the time step and the log decay, computed in float64 as in the torch version."""
    x = dt + bias
    softplus = x if x > 20.0 else math.log1p(math.exp(x))
    step = min(max(softplus, min_step), max_step)
    return np.float32(step), np.float32(-min(step * math.exp(log_rate), -MIN_LOG_DECAY))
