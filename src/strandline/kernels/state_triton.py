"""What Triton kernels of recurrences share: precision, gates, and how states are read from slots and written to them.

Invariants: the null slot reads as zeros and is not written. States are float32 in registers, whatever their dtype in
memory. A NaN stays one.

Shape suffixes: X the dimensions of one program's part of a state.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

FLOAT32_PRECISION = "tf32x3"
"""Precision of matrix products of float32 inputs: three GEMMs of tf32 parts keep 21 bits. With plain float32 GEMMs of
this size, kernels compile for minutes and spill thousands of registers."""

LOG2_E = tl.constexpr(1.4426950408889634)

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter knows no assembly."""


@triton.jit
def load_state(state_ptr, slot, slot_stride, offset_X, is_part_X):
    """Return what a slot has at these offsets, in float32."""
    ptrs_X = state_ptr + slot.to(tl.int64) * slot_stride + offset_X
    return tl.load(ptrs_X, mask=is_part_X & (slot != 0), other=0.0).to(tl.float32)


@triton.jit
def store_state(state_ptr, slot, slot_stride, offset_X, is_part_X, state_X):
    """Write a slot's part, unless it is the null slot."""
    if slot != 0:
        ptrs_X = state_ptr + slot.to(tl.int64) * slot_stride + offset_X
        tl.store(ptrs_X, state_X.to(state_ptr.dtype.element_ty), mask=is_part_X)


@triton.jit
def without_empty(first, end, lengths_ptr):
    """Return the end of a sequence's chunks without the last one, where that has no tokens."""
    last_length = tl.load(lengths_ptr + end - 1, mask=end > first, other=1)
    return end - (last_length == 0).to(tl.int32)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, exact to float32 where it is small: the hardware's ``log`` is not, near 1."""
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    zz = z * z
    tail = 1.0 / 9 + zz * (1.0 / 11 + zz * (1.0 / 13 + zz * (1.0 / 15 + zz * (1.0 / 17))))
    series = 1.0 + zz * (1.0 / 3 + zz * (1.0 / 5 + zz * (1.0 / 7 + zz * tail)))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def at_least(x, limit):
    """Return the larger: by a comparison, as a maximum makes a number of NaN."""
    return tl.where(x < limit, limit, x)


@triton.jit
def at_most(x, limit):
    """Return the smaller, or NaN."""
    return tl.where(x > limit, limit, x)


@triton.jit
def fast_exp2(x):
    """Return ``2 ** x``; compiled, 0 where that would be a subnormal number: two instructions fewer per element."""
    if IS_INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
