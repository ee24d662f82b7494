"""Products of few rows of x with rows of a weight in any format, and how they read inputs.

Inputs are read in float32 by a function that takes pointers of any shape, a mask, and how much further on the up
projections are that belong to gates: as they are, or through an activation on the way. What goes through an activation
bypasses the multiprocessor's own cache: a kernel that has not yet waited may read it.

Shape suffixes: M rows of x, N outputs, K inputs, C matrices, one or as many as rows of x.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from strandline.kernels.rowwise.activation_triton import silu_times, squared_relu


@triton.jit
def read_plain(ptr, mask, _):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def read_gated(ptr, mask, up_offset):
    """Return ``silu(gate) * up``."""
    gate = tl.load(ptr, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(ptr + up_offset, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return silu_times(gate, up, ptr.dtype.scalar.element_ty).to(tl.float32)


@triton.jit
def read_relu_squared(ptr, mask, _):
    x = tl.load(ptr, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return squared_relu(x, ptr.dtype.scalar.element_ty).to(tl.float32)


@triton.jit
def multiply_few(
    loaded,
    x,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    N,
    K,
    ROWS: tl.constexpr,
    READ: tl.constexpr,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return products over all inputs, ``[M, N]``, and those with the rows ``N`` further on, with a gate alone.

    Args:
        loaded: what ``ROWS.load`` returned for the first chunk of inputs; the others as in ``operand_triton.py``.
    """
    acc, acc_up = ROWS.multiply(
        loaded,
        x,
        row_M,
        is_row_M,
        weight,
        matrix_C,
        first_N,
        0,
        N,
        K,
        READ,
        LAYOUT,
        IS_GATED,
        IS_EVEN,
        BLOCK_N,
        BLOCK_K,
    )
    for chunk in tl.static_range(1, NUM_K):
        start = chunk * BLOCK_K
        of_chunk = (weight, matrix_C, first_N)
        loaded = ROWS.load(*of_chunk, start, N, K, LAYOUT, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K)
        more, more_up = ROWS.multiply(
            loaded, x, row_M, is_row_M, *of_chunk, start, N, K, READ, LAYOUT, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K
        )
        acc += more
        if IS_GATED:
            acc_up += more_up
    return ROWS.add(acc), ROWS.add(acc_up)
