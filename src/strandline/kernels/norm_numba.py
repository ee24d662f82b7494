"""Norms over the last dimension on a CPU: one pass over each row, rounded where ``norm.py`` rounds.

A task is a stretch of rows of some ``TASK_ELEMENTS``; so few are not worth a second thread.
"""

# mypy: ignore-errors

import math

import numpy as np
import torch
from torch import Tensor

from strandline.kernels.runtime_numba import (
    TASKS,
    bits,
    claim,
    compiled,
    helper,
    kind,
    load,
    number,
    packed_rows,
    round_to,
    sigmoid,
    store,
)

TASK_ELEMENTS = 2**13


def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Numba twin of :func:`strandline.kernels.norm.rms_norm_zero_centered`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(_zero_centered, x, 0, out, weight_D, eps)
    return out


def add_rms_norm_zero_centered(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Numba twin of :func:`strandline.kernels.norm.add_rms_norm_zero_centered`."""
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    _launch(_zero_centered, x, residual.data_ptr(), out, weight_D, eps)
    return out, x


def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Numba twin of :func:`strandline.kernels.norm.rms_norm_gated`."""
    x, gate = x.contiguous(), packed_rows(gate)
    out = torch.empty_like(x)
    rows_per_gate = x[0].numel() // x.shape[-1] if len(x) else 1
    _launch(_gated, x, gate.data_ptr(), out, weight_D, eps, kind(gate), gate.stride(0), rows_per_gate)
    return out


def _launch(kernel, x: Tensor, beside: int, out: Tensor, weight_D: Tensor, eps: float, *more: int) -> None:
    num_channels = x.shape[-1]
    num_rows = x.numel() // num_channels
    rows_per_task = max(1, TASK_ELEMENTS // num_channels)
    kernel(
        -(-num_rows // rows_per_task),
        *(num_rows, rows_per_task, num_channels, kind(x), bits(eps)),
        *(x.data_ptr(), beside, out.data_ptr(), weight_D.data_ptr(), kind(weight_D)),
        *more,
    )


@helper
def _scale_of(row, eps):
    """Return the inverse of the root of a row's mean square."""
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i] * row[i]
    return np.float32(1.0 / math.sqrt(total / row.size + eps))


@helper
def _multiply(row, scale, weight):
    for i in range(row.size):
        row[i] = row[i] * scale * weight[i]


@helper
def _add(row, added):
    for i in range(row.size):
        row[i] += added[i]


@helper
def _gate(row, weight, gate, product_dtype):
    for i in range(row.size):
        row[i] *= weight[i]
    round_to(product_dtype, row)
    for i in range(row.size):
        row[i] *= gate[i] * sigmoid(gate[i])


@compiled
def _zero_centered(args):
    num_rows, rows_per_task, num_channels, dtype, eps = args[2], args[3], args[4], args[5], number(args[6])
    x, residual, out = args[7], args[8], args[9]
    weight, row = np.empty(num_channels, np.float32), np.empty(num_channels, np.float32)
    added = np.empty(num_channels, np.float32)
    load(args[10], args[11], 0, weight)
    weight += np.float32(1.0)
    task = claim(args)
    while task < args[TASKS]:
        for index in range(task * rows_per_task, min((task + 1) * rows_per_task, num_rows)):
            load(x, dtype, index * num_channels, row)
            if residual:
                load(residual, dtype, index * num_channels, added)
                _add(row, added)
                round_to(dtype, row)
                store(x, dtype, index * num_channels, row)
            _multiply(row, _scale_of(row, eps), weight)
            store(out, dtype, index * num_channels, row)
        task = claim(args)


@compiled
def _gated(args):
    num_rows, rows_per_task, num_channels, dtype, eps = args[2], args[3], args[4], args[5], number(args[6])
    x, gates, out = args[7], args[8], args[9]
    gate_dtype, gate_stride, rows_per_gate = args[12], args[13], args[14]
    weight, row = np.empty(num_channels, np.float32), np.empty(num_channels, np.float32)
    gate, ones = np.empty(num_channels, np.float32), np.ones(num_channels, np.float32)
    load(args[10], args[11], 0, weight)
    task = claim(args)
    while task < args[TASKS]:
        for index in range(task * rows_per_task, min((task + 1) * rows_per_task, num_rows)):
            load(x, dtype, index * num_channels, row)
            place = index // rows_per_gate * gate_stride + index % rows_per_gate * num_channels
            load(gates, gate_dtype, place, gate)
            _multiply(row, _scale_of(row, eps), ones)
            round_to(dtype, row)
            _gate(row, weight, gate, min(dtype, args[11]))  # a float32 weight makes a float32 product
            store(out, dtype, index * num_channels, row)
        task = claim(args)
