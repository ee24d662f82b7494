"""Norms over the last dimension on a GPU: one launch each, statistics in float32, rounded where ``norm.py`` rounds.

Rows may lie far apart (views of a fused projection); the last dimension must be dense, else it is copied. A kernel is
compiled per function, size and strides: any number of rows runs it.

Shape suffixes: as in ``norm.py``; R rows of a program. Kernels address a row by two indices,
``row // H`` and ``row % H``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

ROW_ELEMENTS = 1024
"""A program takes as many short rows (heads of 128) as make up this many elements: 16 bytes per thread."""

WARPS_SHORT = 4
WARPS_LONG = 8
"""A program with one long row (hidden sizes from 2,048 on) has twice the threads: one row is all that a decode has."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,
    other_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    H,
    stride_xt,
    stride_xh,
    stride_ot,
    stride_oh,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    GATES: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col_D = tl.arange(0, BLOCK_D)
    mask_RD = (row_R < num_rows)[:, None] & (col_D < D)[None, :]
    token_R = row_R // H
    head_R = row_R % H
    x_RD_ptr = x_ptr + (token_R * stride_xt + head_R * stride_xh)[:, None] + col_D[None, :]
    other_RD_ptr = other_ptr + (token_R * stride_ot + head_R * stride_oh)[:, None] + col_D[None, :]
    out_dtype = out_ptr.dtype.element_ty
    weight_D = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_RD = tl.load(x_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    if ADDS:
        total_RD = x_RD + tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
        rounded_RD = total_RD.to(x_ptr.dtype.element_ty)
        tl.store(x_RD_ptr, rounded_RD, mask=mask_RD)
        x_RD = rounded_RD.to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + eps)
    normed_RD = x_RD * rstd_R[:, None]
    if GATES:
        gate_RD = tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
        normed_RD = normed_RD.to(out_dtype).to(tl.float32) * weight_D[None, :]
        if ROUNDS_PRODUCT:
            normed_RD = normed_RD.to(out_dtype).to(tl.float32)
        out_RD = normed_RD * (gate_RD * tl.sigmoid(gate_RD))
    elif IS_ZERO_CENTERED:
        out_RD = normed_RD * (weight_D + 1.0)[None, :]
    else:
        out_RD = normed_RD.to(out_dtype).to(tl.float32) * weight_D[None, :]
    out_RD_ptr = out_ptr + row_R[:, None] * D + col_D[None, :]
    tl.store(out_RD_ptr, out_RD.to(out_dtype), mask=mask_RD)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round to x's dtype, then multiply by the weight."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, round the sum; return it normalised, and itself. ``x`` is overwritten.

    Only ``residual`` may have an inner stride: ``x`` has to be written in place.
    """
    return _launch(x, _with_dense_rows(residual), weight_D, eps, adds=True), x


def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise and multiply by ``1 + weight`` in float32, then round to x's dtype."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`, with the zero-centred norm."""
    return _launch(x, _with_dense_rows(residual), weight_D, eps, is_zero_centered=True, adds=True), x


def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round, multiply by the weight, then by ``silu(gate)`` in float32; return x's dtype."""
    return _launch(_with_dense_rows(x), _with_dense_rows(gate), weight_D, eps, gates=True)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and x.dim() <= 3 else x.contiguous()


def _row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of a row's two indices; a tensor of more dimensions is dense here."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1)
    return (x.stride(-2), 0) if x.dim() == 2 else (x.shape[-1], 0)


def _launch(
    x: Tensor,
    other: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    is_zero_centered: bool = False,
    adds: bool = False,
    gates: bool = False,
) -> Tensor:
    num_channels = x.shape[-1]
    num_rows = x.numel() // num_channels
    block = next_power_of_2(num_channels)
    rows = max(1, ROW_ELEMENTS // block)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_kernel[(cdiv(num_rows, rows),)](
        x,
        other,
        weight_D,
        out,
        num_rows,
        x.shape[1] if x.dim() == 3 else 1,
        *_row_strides(x),
        *_row_strides(other),
        eps,
        D=num_channels,
        BLOCK_D=block,
        ROWS=rows,
        IS_ZERO_CENTERED=is_zero_centered,
        ADDS=adds,
        GATES=gates,
        ROUNDS_PRODUCT=weight_D.dtype == x.dtype,
        num_warps=WARPS_LONG if block >= 2048 else WARPS_SHORT,
        **overlap_options(x),
    )
    return out
