"""Gates on a CPU: one pass over each row, rounded where torch rounds (``activation.py``).

Shape suffixes as in ``activation.py``.
"""

# mypy: ignore-errors

import numpy as np
from torch import Tensor

from strandline.kernels import activation
from strandline.kernels.runtime_numba import arguments, claim, kernel, kind, load, packed_rows, round_to, sigmoid, store


def swiglu(gate_up: Tensor) -> Tensor:
    """Numba twin of :func:`strandline.kernels.activation.swiglu`."""
    rows = packed_rows(gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, gate_up.shape[-1]))
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    args = {"dtype": kind(rows), "size": size, "gate_up": rows.data_ptr(), "stride": rows.stride(0)}
    _swiglu_kernel(len(rows), out=out.data_ptr(), **args)
    return out


def sigmoid_gate(x_TO: Tensor, gate_TO: Tensor) -> Tensor:
    """Numba twin of :func:`strandline.kernels.activation.sigmoid_gate`."""
    if x_TO.stride(1) != 1 or gate_TO.dtype != x_TO.dtype:
        return activation.sigmoid_gate.__wrapped__(x_TO, gate_TO)
    gate_TO = packed_rows(gate_TO)
    num_rows, num_columns = x_TO.shape
    gate = {"gates": gate_TO.data_ptr(), "gate_stride": gate_TO.stride(0)}
    x = {"dtype": kind(x_TO), "x": x_TO.data_ptr(), "stride": x_TO.stride(0)}
    _sigmoid_gate_kernel(num_rows, size=num_columns, **x, **gate)
    return x_TO


@kernel("dtype size gate_up stride out")
def _swiglu_kernel(tasks):
    args = arguments(tasks)
    dtype, size = args.dtype, args.size
    gate, up = np.empty(size, np.float32), np.empty(size, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        load(args.gate_up, dtype, task * args.stride, gate)
        load(args.gate_up, dtype, task * args.stride + size, up)
        for i in range(size):
            gate[i] *= sigmoid(gate[i])
        round_to(dtype, gate)
        for i in range(size):
            gate[i] *= up[i]
        store(args.out, dtype, task * size, gate)
        task = claim(tasks)


@kernel("dtype size x stride gates gate_stride")
def _sigmoid_gate_kernel(tasks):
    args = arguments(tasks)
    dtype, size = args.dtype, args.size
    row, gate = np.empty(size, np.float32), np.empty(size, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        load(args.x, dtype, task * args.stride, row)
        load(args.gates, dtype, task * args.gate_stride, gate)
        for i in range(size):
            gate[i] = sigmoid(gate[i])
        round_to(dtype, gate)
        for i in range(size):
            row[i] *= gate[i]
        store(args.x, dtype, task * args.stride, row)
        task = claim(tasks)
