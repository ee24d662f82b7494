"""Matrix products with a weight of parts, some in FP8 (``stacked_linear``): every part writes its own columns.

Shape suffixes: as in ``linear.py``; T rows.
"""
# mypy: ignore-errors

from collections.abc import Callable

import torch
from torch import Tensor

from strandline.kernels import block_scaled_triton
from strandline.kernels.linear_triton import linear
from strandline.kernels.matmul_triton import linear_invariant
from strandline.kernels.weights import DenseWeight, StackedWeight


def stacked_linear(x: Tensor, weight: StackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``."""
    return _multiply(x, weight, bias_O, linear, block_scaled_triton.block_scaled_linear)


def stacked_linear_invariant(x: Tensor, weight: StackedWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`stacked_linear`, with the same order of sums for any number of rows."""
    return _multiply(x, weight, bias_O, linear_invariant, block_scaled_triton.block_scaled_linear_invariant)


def _multiply(
    x: Tensor, weight: StackedWeight, bias_O: Tensor | None, dense: Callable[..., Tensor], scaled: Callable[..., Tensor]
) -> Tensor:
    parts = []
    first = 0
    for part in weight.parts:
        values_OI = part.values_OI if isinstance(part, DenseWeight) else part.values
        bias_part_O = None if bias_O is None else bias_O[first : first + len(values_OI)]
        first += len(values_OI)
        if isinstance(part, DenseWeight):
            parts.append(dense(x, values_OI, bias_part_O))
        else:
            parts.append(scaled(x, part, bias_part_O))
    return torch.cat(parts, dim=-1)
