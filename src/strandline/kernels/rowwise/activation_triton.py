"""Gates on a GPU: one launch each, rounded where ``activation.py`` rounds.

Rows may lie far apart (views of a fused projection); the last dimension must be dense, else it is copied.

Shape suffixes: as in ``activation.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv

BLOCK = 1024
"""Columns of a program: 16 bytes per thread and operand, and a decode's one row is spread over several programs."""

WARPS = 4


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr, LIMIT: tl.constexpr = None):
    """Round as the reference: both products, the gate's silu, and the result; NaN stays NaN."""
    gate = gate.to(dtype).to(tl.float32)
    if LIMIT is not None:
        limit = tl.full([], LIMIT, tl.float32).to(dtype).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _gelu(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # 0.5 x (1 + tanh(y)), since (1 + tanh(y)) / 2 is sigmoid(2 y).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _glu_kernel(
    gate_up_ptr,
    out_ptr,
    stride_t,
    F,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_F = col_F < F
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    dtype = out_ptr.dtype.element_ty
    gate_F = tl.load(gate_up_ptr + row * stride_t + col_F, mask=mask_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + row * stride_t + F + col_F, mask=mask_F, other=0.0).to(tl.float32)
    gate_F *= GATE_FACTOR
    if ACTIVATION == "silu":
        out_F = silu_times(gate_F, up_F, dtype, LIMIT)
    else:
        out_F = (_gelu(gate_F, ACTIVATION).to(dtype).to(tl.float32) * up_F).to(dtype)
    tl.store(out_ptr + row * F + col_F, out_F, mask=mask_F)


@triton.jit
def _gate_kernel(
    x_ptr,
    gate_ptr,
    stride_x,
    stride_gate,
    size,
    IS_SILU: tl.constexpr,
    GATE_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col_O = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_O = col_O < size
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_O_ptr = x_ptr + row * stride_x + col_O
    gate_O = tl.load(gate_ptr + row * stride_gate + col_O, mask=mask_O, other=0.0).to(tl.float32)
    x_O = tl.load(x_O_ptr, mask=mask_O, other=0.0).to(tl.float32)
    if GATE_FACTOR != 1.0:
        gate_O = (gate_O * GATE_FACTOR).to(gate_ptr.dtype.element_ty).to(tl.float32)
    factor_O = tl.sigmoid(gate_O)
    if IS_SILU:
        factor_O = gate_O * factor_O
    factor_O = factor_O.to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(x_O_ptr, (x_O * factor_O).to(x_ptr.dtype.element_ty), mask=mask_O)


@triton.jit
def squared_relu(x, dtype: tl.constexpr):
    """Round as the reference; NaN stays NaN, which a maximum would make a number."""
    x = x.to(dtype).to(tl.float32)
    return tl.where(x < 0.0, 0.0, x * x).to(dtype)


@triton.jit
def _relu_squared_kernel(x_ptr, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x = tl.load(x_ptr + offset, mask=offset < size, other=0.0).to(tl.float32)
    tl.store(x_ptr + offset, squared_relu(x, x_ptr.dtype.element_ty), mask=offset < size)


def relu_squared(x: Tensor) -> Tensor:
    """Return ``relu(x) ** 2``; ``x``, which is dense, is overwritten."""
    size = x.numel()
    _relu_squared_kernel[(cdiv(size, BLOCK),)](x, size, BLOCK=BLOCK, num_warps=WARPS, **overlap_options(x))
    return x


def swiglu(gate_up: Tensor, limit: float | None = None, gate_factor: float = 1.0) -> Tensor:
    """Return ``silu(gate_factor gate) * up`` of ``[..., 2 F]``, clamped before as the reference says."""
    return _launch_glu(gate_up, "silu", limit, gate_factor)


def geglu(gate_up: Tensor, is_tanh: bool = False) -> Tensor:
    """Return ``gelu(gate) * up`` of ``[..., 2 F]``, the gate before the up projection."""
    return _launch_glu(gate_up, "gelu_tanh" if is_tanh else "gelu")


def _launch_glu(gate_up: Tensor, activation: str, limit: float | None = None, gate_factor: float = 1.0) -> Tensor:
    if gate_up.dim() != 2 or gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    stride = gate_up.stride(0) if gate_up.dim() == 2 else 2 * size
    grid = (gate_up.numel() // (2 * size), cdiv(size, BLOCK))
    options = {"ACTIVATION": activation, "LIMIT": limit, "GATE_FACTOR": gate_factor, **overlap_options(gate_up)}
    _glu_kernel[grid](gate_up, out, stride, size, BLOCK=BLOCK, num_warps=WARPS, **options)
    return out


def sigmoid_gate(x_TO: Tensor, gate_TO: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)``, the sigmoid rounded to its input's dtype; ``x_TO`` is overwritten.

    ``x_TO`` has dense rows: it is written in place.
    """
    return _launch_gate(x_TO, gate_TO, is_silu=False)


def silu_gate(x_TO: Tensor, gate_TO: Tensor, gate_factor: float = 1.0) -> Tensor:
    """Return ``x * silu(gate_factor gate)``; ``x_TO``, which has dense rows, is overwritten."""
    return _launch_gate(x_TO, gate_TO, is_silu=True, gate_factor=gate_factor)


def _launch_gate(x_TO: Tensor, gate_TO: Tensor, *, is_silu: bool, gate_factor: float = 1.0) -> Tensor:
    gate_TO = gate_TO if gate_TO.stride(-1) == 1 else gate_TO.contiguous()
    num_rows, size = x_TO.shape
    grid = (num_rows, cdiv(size, BLOCK))
    strides, options = (x_TO.stride(0), gate_TO.stride(0)), overlap_options(x_TO)
    options = options | {"IS_SILU": is_silu, "GATE_FACTOR": gate_factor}
    _gate_kernel[grid](x_TO, gate_TO, *strides, size, BLOCK=BLOCK, num_warps=WARPS, **options)
    return x_TO
