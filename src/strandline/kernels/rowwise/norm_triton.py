"""Norms over the last dimension on a GPU: one launch each, statistics in float32, rounded where ``norm.py`` rounds.

Rows may lie far apart (views of a fused projection); the last dimension must be dense, else it is copied. A kernel is
compiled per function, size and strides: any number of rows runs it.

Shape suffixes: as in ``norm.py``; R rows of a program, Y groups of inputs of all of these, G inputs of a group; of
quantised rows T rows, I inputs, X groups. Kernels address a row by two indices, ``row // H`` and ``row % H``.
"""
# mypy: ignore-errors

from dataclasses import replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.expert_choices_triton import NO_CHOICES, NO_OPTIONS, arguments_of, options_of, sum_of_choices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows
from strandline.kernels.rowwise.quantizing_triton import quantize_groups, quantize_rows, unfilled
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
    quantized_ptr,
    scale_ptr,
    num_rows,
    H,
    stride_xt,
    stride_xh,
    stride_ot,
    stride_oh,
    stride_scale,
    eps,
    made_ptr,
    weights_ptr,
    experts_ptr,
    shared_ptr,
    shared_gate_ptr,
    stride_shared,
    stride_gate,
    first_expert,
    num_held,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    GATE: tl.constexpr,
    ROUNDS_PRODUCT: tl.constexpr,
    IS_KEPT: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col_D = tl.arange(0, BLOCK_D)
    mask_RD = (row_R < num_rows)[:, None] & (col_D < D)[None, :]
    token_R = row_R // H
    head_R = row_R % H
    x_RD_ptr = x_ptr + (token_R * stride_xt + head_R * stride_xh)[:, None] + col_D[None, :]
    other_RD_ptr = other_ptr + (token_R * stride_ot + head_R * stride_oh)[:, None] + col_D[None, :]
    out_dtype = x_ptr.dtype.element_ty
    if GATE == "silu before":
        weight_RD_ptr = weight_ptr + (head_R * D)[:, None] + col_D[None, :]
        weight_RD = tl.load(weight_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    else:
        weight_RD = tl.load(weight_ptr + col_D, mask=col_D < D, other=0.0).to(tl.float32)[None, :]
    # The next kernel, mostly a product, loads weights before it waits: it may start while this one waits, too.
    release_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    if TOP_K > 0:
        choices = (made_ptr, weights_ptr, experts_ptr, shared_ptr, shared_gate_ptr, stride_shared, stride_gate)
        places = (first_expert, num_held, row_R, col_D, row_R < num_rows, mask_RD)
        x_RD = sum_of_choices(*choices, *places, D, TOP_K, IS_DIVIDED).to(tl.float32)
    else:
        x_RD = tl.load(x_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    if ADDS:
        total_RD = x_RD + tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
        rounded_RD = total_RD.to(x_ptr.dtype.element_ty)
        tl.store(x_RD_ptr, rounded_RD, mask=mask_RD)
        x_RD = rounded_RD.to(tl.float32)
    if GATE != "":
        gate_RD = tl.load(other_RD_ptr, mask=mask_RD, other=0.0).to(tl.float32)
    if GATE == "silu before":
        x_RD = x_RD * (gate_RD * tl.sigmoid(gate_RD))
    rstd_R = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + eps)
    normed_RD = x_RD * rstd_R[:, None]
    if GATE == "sigmoid":
        out_RD = normed_RD * weight_RD * tl.sigmoid(gate_RD)
    elif GATE == "silu":
        normed_RD = normed_RD.to(out_dtype).to(tl.float32) * weight_RD
        if ROUNDS_PRODUCT:
            normed_RD = normed_RD.to(out_dtype).to(tl.float32)
        out_RD = normed_RD * (gate_RD * tl.sigmoid(gate_RD))
    elif IS_ZERO_CENTERED:
        out_RD = normed_RD * (weight_RD + 1.0)
    else:
        out_RD = normed_RD.to(out_dtype).to(tl.float32) * weight_RD
    rounded_out_RD = out_RD.to(out_dtype)
    offset_RD = row_R[:, None] * D + col_D[None, :]
    if IS_KEPT:
        tl.store(out_ptr + offset_RD, rounded_out_RD, mask=mask_RD)
    if IS_QUANTIZED:
        GROUPS: tl.constexpr = BLOCK_D // GROUP
        out_YG = tl.reshape(rounded_out_RD.to(tl.float32), [ROWS * GROUPS, GROUP])
        quantized_YG, scale_Y = quantize_groups(out_YG)
        tl.store(quantized_ptr + offset_RD, tl.reshape(quantized_YG, [ROWS, BLOCK_D]), mask=mask_RD)
        index_Y = tl.arange(0, ROWS * GROUPS)
        row_Y = tl.program_id(0).to(tl.int64) * ROWS + index_Y // GROUPS
        group_Y = row_Y % H * (D // GROUP) + index_Y % GROUPS
        is_group_Y = (row_Y < num_rows) & (index_Y % GROUPS * GROUP < D)
        tl.store(scale_ptr + group_Y * stride_scale + row_Y // H, scale_Y, mask=is_group_Y)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round to x's dtype, then multiply by the weight."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps)


def add_rms_norm(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, round the sum; return it normalised, and itself. A tensor is overwritten.

    Only ``residual`` may have an inner stride: a tensor ``x`` has to be written in place. Choices are added up in the
    same launch.
    """
    total, choices = _total_of(x)
    return _launch(total, _with_dense_rows(residual), weight_D, eps, use="add", choices=choices), total


def rms_norm_zero_centered(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise and multiply by ``1 + weight`` in float32, then round to x's dtype."""
    x = _with_dense_rows(x)
    return _launch(x, x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As :func:`add_rms_norm`, with the zero-centred norm."""
    total, choices = _total_of(x)
    kind = {"is_zero_centered": True, "use": "add"}
    return _launch(total, _with_dense_rows(residual), weight_D, eps, **kind, choices=choices), total


def rms_norm_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, round, multiply by the weight, then by ``silu(gate)`` in float32; return x's dtype."""
    return _launch(_with_dense_rows(x), _with_dense_rows(gate), weight_D, eps, use="silu")


def rms_norm_sigmoid_gated(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise, multiply by the weight and by ``sigmoid(gate)``, all in float32; return x's dtype."""
    return _launch(_with_dense_rows(x), _with_dense_rows(gate), weight_D, eps, use="sigmoid")


def rms_norm_of_gated(x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, num_groups: int) -> Tensor:
    """Multiply by ``silu(gate)`` in float32, normalise each group of channels, round, multiply by the weight."""
    x_TGD, gate_TGD = (_with_dense_rows(x).unflatten(1, (num_groups, -1)) for x in (x_TD, gate_TD))
    return _launch(x_TGD, gate_TGD, weight_D, eps, use="silu before").flatten(1)


def rms_norm_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm` of rows, quantised in the same launch; the plain result is kept."""
    x = _with_dense_rows(x)
    return _launch_quantized(x, x, weight_D, eps)


def add_rms_norm_quantized(x: Summand, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[QuantizedRows, Tensor]:
    """As :func:`add_rms_norm` of rows, quantised in the same launch; the plain result is kept."""
    total, choices = _total_of(x)
    return _launch_quantized(total, _with_dense_rows(residual), weight_D, eps, choices, use="add"), total


def rms_norm_zero_centered_quantized(x: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm_zero_centered` of rows, quantised in the same launch; the plain result is kept."""
    x = _with_dense_rows(x)
    return _launch_quantized(x, x, weight_D, eps, is_zero_centered=True)


def add_rms_norm_zero_centered_quantized(
    x: Summand, residual: Tensor, weight_D: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """As :func:`add_rms_norm_zero_centered` of rows, quantised in the same launch; the plain result is kept."""
    total, choices = _total_of(x)
    kind = {"is_zero_centered": True, "use": "add"}
    return _launch_quantized(total, _with_dense_rows(residual), weight_D, eps, choices, **kind), total


def rms_norm_gated_quantized(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> QuantizedRows:
    """As :func:`rms_norm_gated` of ``[T, H, D]``, quantised by rows of all heads.

    One launch if no group of inputs has channels of two heads.
    """
    x, gate = _with_dense_rows(x), _with_dense_rows(gate)
    num_tokens, num_heads, num_channels = x.shape
    if num_channels % GROUP:
        rows = quantize_rows(_launch(x, gate, weight_D, eps, use="silu").flatten(1))
        return replace(rows, plain_TI=None)
    rows = unfilled(num_tokens, num_heads * num_channels, x)
    _launch(x, gate, weight_D, eps, rows, use="silu")
    return rows


def _launch_quantized(
    x: Tensor, other: Tensor, weight_D: Tensor, eps: float, choices: ExpertChoices | None = None, **kind: Any
) -> QuantizedRows:
    rows = unfilled(len(x), x.shape[1], x, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    _launch(x, other, weight_D, eps, rows, **kind, choices=choices)
    return rows


def _total_of(x: Summand) -> tuple[Tensor, ExpertChoices | None]:
    """Return where the new residual stream is stored, and choices if they are what is added to it."""
    return (x, None) if isinstance(x, Tensor) else (torch.empty_like(x.like_sum), x)


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
    quantized: QuantizedRows | None = None,
    *,
    is_zero_centered: bool = False,
    use: Literal["", "add", "silu", "sigmoid", "silu before"] = "",
    choices: ExpertChoices | None = None,
) -> Tensor | None:
    """Return the result, or fill quantised rows, and the plain ones if they are kept.

    Args:
        other: what is added, or the gate; with neither, it is not read.
        use: how ``other`` is used: added first, or as a gate of the result or of what is normalised.
        weight_D: before a norm of what a gate lets through, one weight for each head, else one for all.
        choices: what is normalised, with ``other`` added, instead of x, which receives their sum.
    """
    num_channels = x.shape[-1]
    num_rows = x.numel() // num_channels
    block = next_power_of_2(num_channels) if quantized is None else max(GROUP, next_power_of_2(num_channels))
    rows = max(1, ROW_ELEMENTS // block)
    if quantized is None:
        out, values, scales = torch.empty(x.shape, dtype=x.dtype, device=x.device), None, None
    else:
        out, values, scales = quantized.plain_TI, quantized.values_TI, quantized.scale_XT
    if not num_rows:
        return out
    _norm_kernel[(cdiv(num_rows, rows),)](
        x,
        other,
        weight_D,
        out,
        values,
        scales,
        num_rows,
        x.shape[1] if x.dim() == 3 else 1,
        *_row_strides(x),
        *_row_strides(other),
        0 if scales is None else scales.stride(0),
        eps,
        *(NO_CHOICES if choices is None else arguments_of(choices)),
        D=num_channels,
        BLOCK_D=block,
        ROWS=rows,
        IS_ZERO_CENTERED=is_zero_centered,
        ADDS=use == "add",
        GATE="" if use == "add" else use,
        ROUNDS_PRODUCT=weight_D.dtype == x.dtype,
        IS_KEPT=out is not None,
        IS_QUANTIZED=quantized is not None,
        GROUP=GROUP,
        **(NO_OPTIONS if choices is None else options_of(choices)),
        num_warps=WARPS_LONG if block >= 2048 else WARPS_SHORT,
        **overlap_options(x),
    )
    return out
