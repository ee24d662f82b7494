"""Products of few rows of x with rows of a weight in any format.

Shape suffixes: M rows of x, N outputs, K inputs, C matrices, one or as many as rows of x.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def multiply_few(
    loaded,
    x,
    norm,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    N,
    K,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
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
        norm,
        row_M,
        is_row_M,
        weight,
        matrix_C,
        first_N,
        0,
        N,
        K,
        LAYOUT,
        NORM,
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
            loaded, x, norm, row_M, is_row_M, *of_chunk, start, N, K, LAYOUT, NORM, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K
        )
        acc += more
        if IS_GATED:
            acc_up += more_up
    return ROWS.add(acc), ROWS.add(acc_up)
