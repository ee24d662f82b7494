"""Ordinary weights in kernels, of any strides.

Shape suffixes: M rows of x, C matrices, one or as many as rows of x, N outputs, K inputs.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from strandline.kernels.gemm.formats.operand_triton import DeviceFunctions, RowFunctions
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.rowwise.norm_triton import normed_inputs


class DenseLayout(NamedTuple):
    """Nothing of an ordinary weight is compiled in."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: DenseWeight, extra: DenseWeight | None = None) -> tuple:
    """Return the tensor, and the strides of matrices, rows and inputs.

    Args:
        extra: one more matrix, whose number comes after the others'; it is as each of them.
    """
    values = weight.values_OI
    strides = (values.stride(0) if values.dim() == 3 else 0, values.stride(-2), values.stride(-1))
    return values, *strides, *((None, 0) if extra is None else (extra.values_OI, len(values)))


def can_extend(weight: DenseWeight, extra: object) -> bool:
    """Return whether a matrix is as each of several, so that it can be one more of them."""
    each = weight.values_OI[0]
    return (
        isinstance(extra, DenseWeight)
        and extra.values_OI.shape == each.shape
        and extra.values_OI.stride() == each.stride()
        and extra.values_OI.dtype == each.dtype
    )


def layout(_: DenseWeight) -> DenseLayout:
    return DenseLayout()


@triton.jit
def tile(
    x,
    weight,
    matrix,
    read_M,
    is_row_M,
    col_N,
    first,
    end,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says."""
    x_ptr, _, stride_x, _ = x
    weight_ptr, stride_matrix, stride_row, stride_input, extra_ptr, num_matrices = weight
    offset_K = tl.arange(0, BLOCK_K)
    is_col_N = col_N < N
    x_MK_ptr = x_ptr + read_M[:, None].to(tl.int64) * stride_x + offset_K[None, :]
    first_ptr = weight_ptr + tl.cast(matrix, tl.int64) * stride_matrix
    if extra_ptr is not None:
        first_ptr = tl.where(matrix == num_matrices, extra_ptr, first_ptr)
    weight_KN_ptr = first_ptr + offset_K[:, None] * stride_input + col_N[None, :].to(tl.int64) * stride_row
    up_KN_ptr = weight_KN_ptr + N * stride_row
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first * BLOCK_K, tl.minimum(end * BLOCK_K, K), BLOCK_K):
        if IS_EVEN:
            if is_row_M is None:
                x_MK = tl.load(x_MK_ptr + start)
            else:
                x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start * stride_input)
            if IS_GATED:
                up_KN = tl.load(up_KN_ptr + start * stride_input)
        else:
            is_K = start + offset_K < K
            is_KN = is_K[:, None] & is_col_N[None, :]
            if is_row_M is None:
                x_MK = tl.load(x_MK_ptr + start, mask=is_K[None, :], other=0.0)
            else:
                x_MK = tl.load(x_MK_ptr + start, mask=is_row_M[:, None] & is_K[None, :], other=0.0)
            weight_KN = tl.load(weight_KN_ptr + start * stride_input, mask=is_KN, other=0.0)
            if IS_GATED:
                up_KN = tl.load(up_KN_ptr + start * stride_input, mask=is_KN, other=0.0)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
        if IS_GATED:
            acc_up_MN = tl.dot(x_MK, up_KN, acc_up_MN, input_precision="ieee")
    return acc_MN, acc_up_MN


@triton.jit
def load_rows(
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load as ``operand_triton.py`` says, ``[C, N, K]``."""
    weight_ptr, stride_matrix, stride_row, stride_input, extra_ptr, num_matrices = weight
    row_N = first_N + tl.arange(0, BLOCK_N)
    col_K = tl.arange(0, BLOCK_K)
    first_C_ptr = weight_ptr + matrix_C.to(tl.int64) * stride_matrix
    if extra_ptr is not None:
        first_C_ptr = tl.where(matrix_C == num_matrices, extra_ptr, first_C_ptr)
    ptr_CNK = (
        (first_C_ptr[:, None] + (row_N * stride_row)[None, :])[:, :, None]
        + (col_K * stride_input)[None, None, :]
        + start * stride_input
    )
    up_CNK_ptr = ptr_CNK + tl.cast(N, tl.int64) * stride_row
    if IS_EVEN:
        weight_CNK = tl.load(ptr_CNK, eviction_policy="evict_first")
        up_CNK = weight_CNK
        if IS_GATED:
            up_CNK = tl.load(up_CNK_ptr, eviction_policy="evict_first")
    else:
        is_CNK = (row_N < N)[None, :, None] & (start + col_K < K)[None, None, :]
        weight_CNK = tl.load(ptr_CNK, mask=is_CNK, other=0.0, eviction_policy="evict_first")
        up_CNK = weight_CNK
        if IS_GATED:
            up_CNK = tl.load(up_CNK_ptr, mask=is_CNK, other=0.0, eviction_policy="evict_first")
    return weight_CNK, up_CNK


@triton.jit
def multiply_rows(
    loaded,
    x,
    norm,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says: products that are not added up yet, ``[M, N, K]``."""
    weight_CNK, up_CNK = loaded
    x_ptr, _, stride_x, _ = x
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_K = tl.arange(0, BLOCK_K)
    if row_M.shape[0] == 1:
        # A vector first: the compiler then moves inputs to the threads that hold the weight, and not the weight.
        is_x_K = is_row_M
        if not IS_EVEN:
            is_x_K = is_x_K & (start + col_K < K)
        x_K_ptr = x_ptr + row_M.to(tl.int64) * stride_x + col_K + start
        x_K = tl.load(x_K_ptr, mask=is_x_K, other=0.0).to(tl.float32)
        if NORM is not None:
            x_K = normed_inputs(x_K, norm[0], norm[1], row_M.to(tl.int64), start + col_K, is_x_K, NORM, dtype)
        x_M1K = x_K[None, None, :]
    else:
        x_M1K_ptr = x_ptr + (row_M.to(tl.int64) * stride_x)[:, None, None] + col_K[None, None, :] + start
        is_x_M1K = is_row_M[:, None, None]
        # Unmasked, rows of x for several matrices take half as many registers again.
        if not IS_EVEN or matrix_C.shape[0] > 1:
            is_x_M1K = is_x_M1K & (start + col_K < K)[None, None, :]
        x_M1K = tl.load(x_M1K_ptr, mask=is_x_M1K, other=0.0).to(tl.float32)
        if NORM is not None:
            row_M11, rstd_M11 = row_M.to(tl.int64)[:, None, None], norm[1][:, None, None]
            col_11K = (start + col_K)[None, None, :]
            x_M1K = normed_inputs(x_M1K, norm[0], rstd_M11, row_M11, col_11K, is_x_M1K, NORM, dtype)
    return weight_CNK.to(tl.float32) * x_M1K, up_CNK.to(tl.float32) * x_M1K


@triton.jit
def add_rows(products_MNK):
    """Return the sums of products, ``[M, N]``."""
    return tl.sum(products_MNK, axis=2)


FUNCTIONS = DeviceFunctions(
    tile,
    RowFunctions(load_rows, multiply_rows, add_rows),
    data,
    layout,
    min_block_k=1,
    min_rows=1,
    can_extend=can_extend,
)
