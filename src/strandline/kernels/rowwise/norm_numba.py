"""Norms over the last dimension on a CPU: one pass over each row, rounded where ``norm.py`` rounds.

A task is a stretch of rows of some ``TASK_ELEMENTS``; so few are not worth a second thread.
"""

# mypy: ignore-errors

import math

import numpy as np
import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.runtime_numba import (
    Kernel,
    arguments,
    claim,
    helper,
    kernel,
    kind,
    load,
    packed_rows,
    round_to,
    sigmoid,
    store,
)
from strandline.kernels.sizes import cdiv

TASK_ELEMENTS = 2**13


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Numba version of :func:`strandline.kernels.rowwise.norm.rms_norm`."""
    return _normed(x, weight_D, eps, is_zero_centered=False)


def add_rms_norm(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Numba version of :func:`strandline.kernels.rowwise.norm.add_rms_norm`."""
    return _added_and_normed(x, residual, weight_D, eps, is_zero_centered=False)


def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Numba version of :func:`strandline.kernels.rowwise.norm.rms_norm_zero_centered`."""
    return _normed(x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Numba version of :func:`strandline.kernels.rowwise.norm.add_rms_norm_zero_centered`."""
    return _added_and_normed(x, residual, weight_D, eps, is_zero_centered=True)


def _normed(x: Tensor, weight_D: Tensor, eps: float, *, is_zero_centered: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(_norm, x, out, weight_D, eps, residual=0, is_zero_centered=is_zero_centered)
    return out


def _added_and_normed(
    x: Summand, residual: Tensor, weight_D: Tensor, eps: float, *, is_zero_centered: bool
) -> tuple[Tensor, Tensor]:
    x, residual = added_up(x).contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    _launch(_norm, x, out, weight_D, eps, residual=residual.data_ptr(), is_zero_centered=is_zero_centered)
    return out, x


def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Numba version of :func:`strandline.kernels.rowwise.norm.rms_norm_gated`."""
    x, gate = x.contiguous(), packed_rows(gate)
    out = torch.empty_like(x)
    rows_per_gate = x[0].numel() // x.shape[-1] if len(x) else 1
    gates = {"gates": gate.data_ptr(), "gate_dtype": kind(gate), "gate_stride": gate.stride(0)}
    _launch(_gated, x, out, weight_D, eps, rows_per_gate=rows_per_gate, **gates)
    return out


def _launch(norm: Kernel, x: Tensor, out: Tensor, weight_D: Tensor, eps: float, **more: int) -> None:
    num_channels = x.shape[-1]
    num_rows = x.numel() // num_channels
    rows_per_task = max(1, TASK_ELEMENTS // num_channels)
    norm(
        cdiv(num_rows, rows_per_task),
        num_rows=num_rows,
        rows_per_task=rows_per_task,
        num_channels=num_channels,
        dtype=kind(x),
        eps=eps,
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight_D.data_ptr(),
        weight_dtype=kind(weight_D),
        **more,
    )


@helper
def _scale_of(row, eps):
    """Return the inverse of the root of a row's mean square."""
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i] * row[i]
    return np.float32(1.0 / math.sqrt(total / row.size + eps))


@helper
def _scale(row, factor):
    for i in range(row.size):
        row[i] *= factor


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


SHARED = "num_rows rows_per_task num_channels dtype eps:float x out weight weight_dtype "


@kernel(SHARED + "residual is_zero_centered")
def _norm(tasks):
    args = arguments(tasks)
    num_channels, dtype = args.num_channels, args.dtype
    weight, row = np.empty(num_channels, np.float32), np.empty(num_channels, np.float32)
    added = np.empty(num_channels, np.float32)
    load(args.weight, args.weight_dtype, 0, weight)
    if args.is_zero_centered:
        weight += np.float32(1.0)
    task = claim(tasks)
    while task < args.num_tasks:
        for index in range(task * args.rows_per_task, min((task + 1) * args.rows_per_task, args.num_rows)):
            load(args.x, dtype, index * num_channels, row)
            if args.residual:
                load(args.residual, dtype, index * num_channels, added)
                _add(row, added)
                round_to(dtype, row)
                store(args.x, dtype, index * num_channels, row)
            scale = _scale_of(row, args.eps)
            if not args.is_zero_centered:
                _scale(row, scale)
                round_to(dtype, row)
                scale = np.float32(1.0)
            _multiply(row, scale, weight)
            store(args.out, dtype, index * num_channels, row)
        task = claim(tasks)


@kernel(SHARED + "gates gate_dtype gate_stride rows_per_gate")
def _gated(tasks):
    args = arguments(tasks)
    num_channels, dtype = args.num_channels, args.dtype
    product_dtype = min(dtype, args.weight_dtype)  # float32 if one of the two is
    weight, row = np.empty(num_channels, np.float32), np.empty(num_channels, np.float32)
    gate = np.empty(num_channels, np.float32)
    load(args.weight, args.weight_dtype, 0, weight)
    task = claim(tasks)
    while task < args.num_tasks:
        for index in range(task * args.rows_per_task, min((task + 1) * args.rows_per_task, args.num_rows)):
            load(args.x, dtype, index * num_channels, row)
            offset = index // args.rows_per_gate * args.gate_stride + index % args.rows_per_gate * num_channels
            load(args.gates, args.gate_dtype, offset, gate)
            _scale(row, _scale_of(row, args.eps))
            round_to(dtype, row)
            _gate(row, weight, gate, product_dtype)
            store(args.out, dtype, index * num_channels, row)
        task = claim(tasks)
