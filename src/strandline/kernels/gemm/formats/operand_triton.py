"""A weight as kernels take it: the tensors of its format, and the device functions that multiply with it.

A kernel is a skeleton for one shape of work (few rows, many rows, experts). It takes a weight of any format as two
arguments: a tuple of tensors and strides, and a ``tl.constexpr`` NamedTuple of numbers that are compiled in. It takes
the format's device function as a ``tl.constexpr``, too. Each format names its module of device functions, which ends
with ``FUNCTIONS``.

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

``dequantize``, of formats of codes (``coded.py``), returns the numbers that a block of inputs of
rows ``read_N`` stands for, in float32, so that a library can multiply with them::

    dequantize(weight, read_N, block, LAYOUT) -> number_NK
"""
# mypy: ignore-errors

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, Rows

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


class DeviceFunctions(NamedTuple):
    """What kernels need of a format."""

    tile: JITFunction
    rows: RowFunctions
    data: Callable[..., tuple]
    """Returns a weight's tensors and strides."""
    layout: Callable[..., NamedTuple]
    """Returns the numbers that are compiled in."""
    min_block_k: int
    """Fewest inputs that ``rows`` may take at a time."""
    min_rows: int
    """Fewest rows of x that tensor cores take as rows in ``tile``: in smaller tiles outputs take their place."""
    dequantize: JITFunction | None = None
    """Returns numbers; None: of formats without codes."""
    can_extend: Callable[..., bool] = lambda _weight, _extra: False
    """Returns whether ``data`` takes a certain matrix as one more of several."""
    extends_rows: bool = True
    """Whether ``rows`` take that, too."""


class Operand(NamedTuple):
    """A weight as arguments of kernels."""

    functions: DeviceFunctions
    data: tuple[Any, ...]
    """A runtime argument."""
    layout: NamedTuple
    """A ``tl.constexpr`` argument."""


@cache
def device_functions(module: str) -> DeviceFunctions:
    """Return the device functions of a format, by the name of their module."""
    return import_module(f"strandline.kernels.gemm.formats.{module}").FUNCTIONS


def operand(weight: DenseWeight | QuantizedWeight, extra: DenseWeight | QuantizedWeight | None = None) -> Operand:
    """Return a matrix, or several of one shape, as arguments of kernels.

    Args:
        extra: one more matrix; only where ``can_extend`` says so.
    """
    functions = device_functions(weight.format.functions)
    data = functions.data(weight) if extra is None else functions.data(weight, extra)
    return Operand(functions, data, functions.layout(weight))


def can_extend(weight: DenseWeight | QuantizedWeight, extra: object) -> bool:
    """Return whether tiles can take ``extra`` as one more of several matrices."""
    return device_functions(weight.format.functions).can_extend(weight, extra)


def can_extend_rows(weight: DenseWeight | QuantizedWeight, extra: object) -> bool:
    """Return whether kernels of few rows can do so."""
    functions = device_functions(weight.format.functions)
    return functions.extends_rows and functions.can_extend(weight, extra)


def rows_operand(rows: Rows) -> tuple[Any, ...]:
    """Return rows as an argument of kernels; the inputs of a row are contiguous."""
    if isinstance(rows, QuantizedRows):
        return rows.values_TI, rows.scale_XT, rows.values_TI.stride(0), rows.scale_XT.stride(0)
    return rows, None, rows.stride(0), 0
