"""A weight as kernels take it: the tensors of its format, and the device functions that multiply with it.

A kernel is a skeleton for one shape of work (few rows, many rows, experts). It takes a weight of any format as two
arguments: a tuple of tensors and strides, and a ``tl.constexpr`` NamedTuple of numbers that are compiled in. It takes
the format's device function as a ``tl.constexpr``, too. A format is a module here, and a row of ``FORMATS``.

``tile`` multiplies many rows on tensor cores::

    tile(x, weight, matrix, read_M, is_row_M, col_N, first, end, N, K,
         LAYOUT, IS_GATED, IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K) -> acc_MN, acc_up_MN

``x`` is ``(pointer, pointer to scales or None, row stride, scale stride)``, ``matrix`` the number of one of several
matrices of ``N`` rows, or ``2 N`` with a gate. ``read_M`` are rows of x, none after the last; only those where
``is_row_M`` is true are wanted. ``col_N`` are outputs, which may be after the last; ``first`` and ``end`` count blocks
of ``BLOCK_K`` inputs. ``IS_EVEN``: ``K`` and ``N`` are multiples of ``BLOCK_K`` and ``BLOCK_N``. Both results are
float32 ``[BLOCK_M, BLOCK_N]``; the second is that of the rows ``N`` further on, with a gate alone.
"""
# mypy: ignore-errors

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from strandline.kernels.gemm.formats import dense_triton, four_bit_triton, fp8_triton
from strandline.kernels.gemm.weights import DenseWeight, FourBitWeight, ScaledWeight, Weight
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, Rows

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Format(NamedTuple):
    """What kernels need of a format."""

    tile: JITFunction
    data: Callable[..., tuple]
    """Returns a weight's tensors and strides."""
    layout: Callable[..., NamedTuple]
    """Returns the numbers that are compiled in."""
    multiplies_fp8: bool = False
    """Whether ``tile`` takes rows of x in FP8."""
    can_extend: Callable[..., bool] = lambda _weight, _extra: False
    """Returns whether ``data`` takes a certain matrix as one more of several."""


class Operand(NamedTuple):
    """A weight as arguments of kernels."""

    format: Format
    data: tuple[Any, ...]
    """A runtime argument."""
    layout: NamedTuple
    """A ``tl.constexpr`` argument."""


FORMATS: Mapping[type, Format] = {
    DenseWeight: Format(dense_triton.tile, dense_triton.data, dense_triton.layout),
    ScaledWeight: Format(fp8_triton.tile, fp8_triton.data, fp8_triton.layout, True, fp8_triton.can_extend),
    FourBitWeight: Format(four_bit_triton.tile, four_bit_triton.data, four_bit_triton.layout),
}


def operand(weight: Weight, extra: Weight | None = None) -> Operand:
    """Return a matrix, or several of one shape, as arguments of kernels.

    Args:
        extra: one more matrix; only where ``can_extend`` says so.
    """
    weight_format = FORMATS[type(weight)]
    data = weight_format.data(weight) if extra is None else weight_format.data(weight, extra)
    return Operand(weight_format, data, weight_format.layout(weight))


def can_extend(weight: Weight, extra: Weight) -> bool:
    """Return whether kernels can take ``extra`` as one more of several matrices."""
    return FORMATS[type(weight)].can_extend(weight, extra)


def rows_operand(rows: Rows) -> tuple[Any, ...]:
    """Return rows as an argument of kernels; the inputs of a row are contiguous."""
    if isinstance(rows, QuantizedRows):
        return rows.values_TI, rows.scale_XT, rows.values_TI.stride(0), rows.scale_XT.stride(0)
    return rows, None, rows.stride(0), 0
