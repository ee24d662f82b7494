"""Matrix products with a weight of parts, some of them quantised: each writes its columns of one result.

Of few rows, a dense weight that follows a quantised one is multiplied in the same launch.

Shape suffixes: as in ``linear.py``; T rows.
"""
# mypy: ignore-errors

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from strandline.kernels.gemm import block_scaled_triton, four_bit_triton, linear_triton, matmul_triton
from strandline.kernels.gemm.block_scaled_triton import MAX_ROWS_SPLIT, multiply_beside
from strandline.kernels.gemm.tiles_triton import SecondTile
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, QuantizedWeight, StackedWeight
from strandline.kernels.rowwise.quantized_rows import Rows, flat_rows, new_output, plain_rows, shaped
from strandline.kernels.rowwise.quantizing_triton import quantized


class Ways(NamedTuple):
    """How parts of each form are multiplied, into columns of a result: arguments as of ``multiply_into``."""

    dense: Callable[..., None]
    scaled: Callable[..., None]
    four_bit: Callable[..., None]


FASTEST = Ways(linear_triton.multiply_into, block_scaled_triton.multiply_into, four_bit_triton.multiply_into)

INVARIANT = Ways(
    matmul_triton.multiply_into, block_scaled_triton.multiply_into_invariant, four_bit_triton.multiply_into_invariant
)


def stacked_linear(x: Rows, weight: StackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    rows = flat_rows(x)
    if bias_O is not None or not 0 < len(rows) <= MAX_ROWS_SPLIT or not _is_pair(weight):
        return _multiply(x, weight, bias_O, FASTEST)
    first, dense = weight.parts
    out_TO = new_output(rows, sum(map(_num_outputs, weight.parts)))
    if isinstance(first, CodedWeight):
        four_bit_triton.multiply_beside(out_TO, rows, first, dense.values_OI)
    else:
        multiply_beside(out_TO, rows, first, SecondTile(plain_rows(rows), dense.values_OI))
    return shaped(out_TO, x)


def stacked_linear_invariant(x: Rows, weight: StackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`stacked_linear`, with the same order of sums for any number of rows."""
    return _multiply(x, weight, bias_O, INVARIANT)


def _is_pair(weight: StackedWeight) -> bool:
    """Return whether a dense part follows a single one that is not."""
    return [isinstance(part, DenseWeight) for part in weight.parts] == [False, True]


def _num_outputs(part: DenseWeight | QuantizedWeight) -> int:
    return part.shape[0]


def _multiply(x: Rows, weight: StackedWeight, bias_O: Tensor | None, ways: Ways) -> Tensor:
    """Multiply part by part."""
    rows, sizes = flat_rows(x), list(map(_num_outputs, weight.parts))
    if weight.is_in_fp8:
        rows = quantized(rows)
    out_TO = new_output(rows, sum(sizes))
    biases = [None] * len(sizes) if bias_O is None else bias_O.split(sizes)
    for part, part_TO, bias_part_O in zip(weight.parts, out_TO.split(sizes, dim=1), biases, strict=True):
        if isinstance(part, DenseWeight):
            ways.dense(part_TO, plain_rows(rows), part.values_OI, bias_part_O)
        elif isinstance(part, CodedWeight):
            ways.four_bit(part_TO, rows, part, bias_part_O)
        else:
            ways.scaled(part_TO, rows, part, bias_part_O)
    return shaped(out_TO, x)
