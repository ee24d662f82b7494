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
of ``BLOCK_K`` inputs. ``IS_EVEN``: ``K`` is a multiple of ``BLOCK_K``, and no output is after the last. Both results
are float32 ``[BLOCK_M, BLOCK_N]``; the second is that of the rows ``N`` further on, with a gate alone.

``rows`` multiply few rows of x: they read the weight through registers, ``BLOCK_K`` inputs at a time::

    rows.load(weight, matrix_C, first_N, start, N, K, LAYOUT, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K) -> loaded
    rows.multiply(loaded, x, norm, row_M, is_row_M, weight, matrix_C, first_N, start, N, K,
                  LAYOUT, NORM, IS_GATED, IS_EVEN, BLOCK_N, BLOCK_K) -> products, up_products
    rows.add(products) -> acc_MN

``matrix_C`` are the numbers of one matrix, or of one for each row of x; ``first_N`` is the first of ``BLOCK_N`` outputs
and ``start``, a constant, the first of ``BLOCK_K`` inputs. Loads are apart so that a kernel may wait after the first
one: weights are older than any launch of a step. Products of several chunks of inputs are added before they are reduced
by ``add``; their shape is the format's. Dense weights may multiply rows before their norm: ``norm`` is a norm's
argument and the inverse root of each row's mean square, ``NORM`` its constants (``norm_triton.py``).

``dequantize``, of formats whose ``words`` hold codes (``weights.py``), returns the numbers that a block of inputs of
rows ``read_N`` stands for, in float32, so that a library can multiply with them::

    dequantize(weight, read_N, block, LAYOUT) -> number_NK
"""
# mypy: ignore-errors

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from strandline.kernels.gemm.formats import dense_triton, four_bit_triton, fp8_triton, microscaled_triton
from strandline.kernels.gemm.weights import (
    BLOCK_INPUTS,
    DenseWeight,
    FourBitWeight,
    Fp4Weight,
    Mxfp8Weight,
    ScaledWeight,
    Weight,
)
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, Rows

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class RowFunctions(NamedTuple):
    """Device functions that multiply few rows."""

    load: JITFunction
    multiply: JITFunction
    add: JITFunction

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk knows them by: without this, by their names, whatever their source."""
        return "-".join(function.cache_key for function in self)


class Format(NamedTuple):
    """What kernels need of a format."""

    tile: JITFunction
    rows: RowFunctions
    min_block_k: int
    """Fewest inputs that ``rows`` may take at a time."""
    min_rows: int
    """Fewest rows of x that tensor cores take as rows in ``tile``: in smaller tiles outputs take their place."""
    data: Callable[..., tuple]
    """Returns a weight's tensors and strides."""
    layout: Callable[..., NamedTuple]
    """Returns the numbers that are compiled in."""
    dequantize: JITFunction | None = None
    """Returns numbers; None: of formats without codes."""
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


def _format(module: ModuleType, min_block_k: int, min_rows: int) -> Format:
    rows = RowFunctions(module.load_rows, module.multiply_rows, module.add_rows)
    return Format(module.tile, rows, min_block_k, min_rows, module.data, module.layout)


def _coded_format(module: ModuleType) -> Format:
    return _format(module, BLOCK_INPUTS, 1 << 30)._replace(dequantize=module.dequantize)


FORMATS: Mapping[type, Format] = {
    DenseWeight: _format(dense_triton, 1, 1)._replace(can_extend=dense_triton.can_extend),
    ScaledWeight: _format(fp8_triton, GROUP, fp8_triton.MIN_ROWS_HOPPER.value)._replace(
        multiplies_fp8=True, can_extend=fp8_triton.can_extend
    ),
    FourBitWeight: _coded_format(four_bit_triton),
    Fp4Weight: _coded_format(microscaled_triton),
    Mxfp8Weight: _coded_format(microscaled_triton),
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
