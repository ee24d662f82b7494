"""Rows in FP8 on a GPU: quantised by groups of inputs in a launch, or in the launch of the activation before.

``quantize_groups`` does the same exact operations whatever the tile: results are the same to the last bit.

Shape suffixes: as in ``quantized_rows.py``; in kernels K inputs, R groups, G inputs of a group.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise import quantized_rows
from strandline.kernels.rowwise.activation_triton import silu_times
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows
from strandline.kernels.sizes import DIVISOR, cdiv, next_power_of_2, round_up

MAX_E4M3 = tl.constexpr(quantized_rows.MAX_E4M3)
MIN_SCALE = tl.constexpr(quantized_rows.MIN_SCALE)

PLAIN = tl.constexpr(0)
SWIGLU = tl.constexpr(1)
SIGMOID_GATE = tl.constexpr(2)
"""What is quantised: rows, what a gated linear unit makes of them, or gated rows."""

BLOCK_QUANTIZED = 2048
"""Inputs of a row that a program quantises."""

PADDED_ROWS = 4
"""Quantised rows are a multiple of this, as torch's product asks; those after the last one hold anything."""

MAX_ROWS_ALIGNED = 128
"""More than ``PADDED_ROWS``, and up to this many, are a multiple of ``DIVISOR``, so that tiles are compiled once. More
are multiplied by torch, on an H200 208 of them 15 % more slowly than 200."""


@triton.jit
def quantize_groups(x_RG):
    """Return rows of float32 numbers in e4m3, and their scales."""
    scale_R = tl.maximum(tl.div_rn(tl.max(tl.abs(x_RG), axis=1), MAX_E4M3), MIN_SCALE)
    return (x_RG * tl.div_rn(1.0, scale_R)[:, None]).to(tl.float8e4nv), scale_R


@triton.jit
def _quantize_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    stride_gate,
    K,
    stride_scale,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col_K = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_K = col_K < K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_K = tl.load(x_ptr + row * stride_x + col_K, mask=is_K, other=0.0).to(tl.float32)
    if KIND != PLAIN:
        gate_K = tl.load(gate_ptr + row * stride_gate + col_K, mask=is_K, other=0.0).to(tl.float32)
    if KIND == SWIGLU:
        x_K = silu_times(gate_K * GATE_FACTOR, x_K, dtype, LIMIT).to(tl.float32)
    if KIND == SIGMOID_GATE:
        factor_K = tl.sigmoid(gate_K).to(gate_ptr.dtype.element_ty).to(tl.float32)
        x_K = (x_K * factor_K).to(dtype).to(tl.float32)
    quantized_RG, scale_R = quantize_groups(tl.reshape(x_K, [BLOCK_K // GROUP, GROUP]))
    tl.store(out_ptr + row * K + col_K, tl.reshape(quantized_RG, [BLOCK_K]), mask=is_K)
    group_R = tl.program_id(1) * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    tl.store(scale_ptr + group_R * stride_scale + row, scale_R, mask=group_R * GROUP < K)


def quantize_rows(x_TI: Tensor) -> QuantizedRows:
    """Return rows quantised, and the plain rows beside them; the inputs of a row must lie together."""
    return _quantize(x_TI, x_TI, PLAIN.value, plain_TI=x_TI)


def quantized(rows: Rows) -> QuantizedRows:
    """Return rows quantised, if they are not yet."""
    return rows if isinstance(rows, QuantizedRows) else quantize_rows(rows)


def swiglu_quantized(gate_up: Tensor, limit: float | None = None, gate_factor: float = 1.0) -> QuantizedRows:
    """Return ``silu(gate_factor gate) * up`` of ``[T, 2 I]``, quantised: the gate before the up projection."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    gate_TI, up_TI = gate_up.chunk(2, dim=1)
    return _quantize(up_TI, gate_TI, SWIGLU.value, limit=limit, gate_factor=gate_factor)


def sigmoid_gate_quantized(x_TO: Tensor, gate_TO: Tensor) -> QuantizedRows:
    """Return ``x * sigmoid(gate)``, quantised."""
    x_TO, gate_TO = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (x_TO, gate_TO))
    return _quantize(x_TO, gate_TO, SIGMOID_GATE.value)


def unfilled(num_rows: int, num_inputs: int, like: Tensor, plain_TI: Tensor | None = None) -> QuantizedRows:
    """Return the memory of quantised rows; see ``PADDED_ROWS`` and ``MAX_ROWS_ALIGNED``."""
    padded_rows = round_up(num_rows, DIVISOR if PADDED_ROWS < num_rows <= MAX_ROWS_ALIGNED else PADDED_ROWS)
    values_TI = torch.empty((padded_rows, num_inputs), dtype=torch.float8_e4m3fn, device=like.device)
    scale_XT = torch.empty((cdiv(num_inputs, GROUP), padded_rows), dtype=torch.float32, device=like.device)
    return QuantizedRows(values_TI, scale_XT, num_rows, like.dtype, plain_TI)


def _quantize(
    x_TI: Tensor,
    gate_TI: Tensor,
    kind: int,
    plain_TI: Tensor | None = None,
    *,
    limit: float | None = None,
    gate_factor: float = 1.0,
) -> QuantizedRows:
    num_rows, num_inputs = x_TI.shape
    rows = unfilled(num_rows, num_inputs, x_TI, plain_TI)
    block_k = min(BLOCK_QUANTIZED, max(GROUP, next_power_of_2(num_inputs)))
    if num_rows:
        _quantize_kernel[(num_rows, cdiv(num_inputs, block_k))](
            x_TI,
            gate_TI,
            rows.values_TI,
            rows.scale_XT,
            x_TI.stride(0),
            gate_TI.stride(0),
            num_inputs,
            rows.scale_XT.stride(0),
            KIND=kind,
            LIMIT=limit,
            GATE_FACTOR=gate_factor,
            BLOCK_K=block_k,
            GROUP=GROUP,
            num_warps=4,
            **overlap_options(x_TI),
        )
    return rows
