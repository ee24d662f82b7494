"""Gates on a CPU: one pass over each row, rounded where torch rounds (``activation.py``).

Shape suffixes as in ``activation.py``.
"""

# mypy: ignore-errors

import numpy as np
from torch import Tensor

from strandline.kernels import activation
from strandline.kernels.runtime_numba import TASKS, claim, compiled, kind, load, packed_rows, round_to, sigmoid, store


def swiglu(gate_up: Tensor) -> Tensor:
    """Numba twin of :func:`strandline.kernels.activation.swiglu`."""
    rows = packed_rows(gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, gate_up.shape[-1]))
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    _swiglu_kernel(len(rows), kind(rows), size, rows.data_ptr(), rows.stride(0), out.data_ptr())
    return out


def sigmoid_gate(x_TO: Tensor, gate_TO: Tensor) -> Tensor:
    """Numba twin of :func:`strandline.kernels.activation.sigmoid_gate`."""
    if x_TO.stride(1) != 1 or gate_TO.dtype != x_TO.dtype:
        return activation.sigmoid_gate.__wrapped__(x_TO, gate_TO)
    gate_TO = packed_rows(gate_TO)
    num_rows, num_columns = x_TO.shape
    gate = (gate_TO.data_ptr(), gate_TO.stride(0))
    _sigmoid_gate_kernel(num_rows, kind(x_TO), num_columns, x_TO.data_ptr(), x_TO.stride(0), *gate)
    return x_TO


@compiled
def _swiglu_kernel(args):
    dtype, size, gate_up, stride, out = args[2], args[3], args[4], args[5], args[6]
    gate, up = np.empty(size, np.float32), np.empty(size, np.float32)
    task = claim(args)
    while task < args[TASKS]:
        load(gate_up, dtype, task * stride, gate)
        load(gate_up, dtype, task * stride + size, up)
        for i in range(size):
            gate[i] *= sigmoid(gate[i])
        round_to(dtype, gate)
        for i in range(size):
            gate[i] *= up[i]
        store(out, dtype, task * size, gate)
        task = claim(args)


@compiled
def _sigmoid_gate_kernel(args):
    dtype, size, x, stride, gates, gate_stride = args[2], args[3], args[4], args[5], args[6], args[7]
    row, gate = np.empty(size, np.float32), np.empty(size, np.float32)
    task = claim(args)
    while task < args[TASKS]:
        load(x, dtype, task * stride, row)
        load(gates, dtype, task * gate_stride, gate)
        for i in range(size):
            gate[i] = sigmoid(gate[i])
        round_to(dtype, gate)
        for i in range(size):
            row[i] *= gate[i]
        store(x, dtype, task * stride, row)
        task = claim(args)
