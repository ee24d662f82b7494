"""Matrix products whose every row's bits depend on that row alone: ``linear`` and ``head_linear``, deterministic.

A library picks another kernel, and with it another order of the sum, for another number of rows. Here each output is
one chain of additions over the inputs in order, 16 at a time, in the tensor core's float32 accumulator (float32 inputs:
one at a time). Tiles differ in how many rows and columns they have, never in that order, so that the tile may still be
chosen by the number of rows: ``tests/gpu/engine/test_deterministic.py`` holds that all tiles give the same bits. None
has fewer than 64 rows: below, the compiler uses another instruction, whose order of additions is not documented.

Shape suffixes: as in ``linear.py``; T rows; in kernels M rows of x, N outputs, K the dimension that a matrix product
sums over, H products of the same sizes.
"""
# mypy: ignore-errors

import torch
from torch import Tensor

from strandline.kernels.gemm.tiles_triton import launch_heads, launch_tiles
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise.quantized_rows import flat_rows, new_output, shaped
from strandline.kernels.sizes import NUM_SMS

FEW_ROWS = 64
MIDDLE_ROWS = 512
"""Up to this many rows reading the weight takes nearly all the time: narrow tiles keep every multiprocessor reading."""

TILE_NARROW = Launch(64, 32, 64, 4, 6)
TILE_FEW = Launch(64, 64, 64, 4, 5)
TILE_MIDDLE = Launch(128, 64, 64, 4, 4)
TILE_MANY = Launch(128, 256, 64, 8, 3)
TILE_FLOAT32 = Launch(64, 64, 16, 4, 2)
"""GEMMs in plain float32 do not use tensor cores: for tests and small models."""

NARROW_OUTPUTS = 64 * NUM_SMS
"""Below this many outputs, tiles of 64 columns would leave multiprocessors idle."""


def linear_invariant(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x weight^T + bias``. Rows of x and of the weight may lie apart, their elements lie together."""
    rows = flat_rows(x)
    out_TO = new_output(rows, len(weight_OI))
    multiply_into(out_TO, rows, weight_OI, bias_O)
    return shaped(out_TO, x)


def multiply_into(out_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, a matrix with dense rows, with a matrix product."""
    if len(x_TI):
        launch = choose_tile(len(x_TI), len(weight_OI), x_TI.dtype)
        launch_tiles(out_TO, x_TI, DenseWeight(weight_OI), bias_O, launch)


def head_linear_invariant(x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
    """As :func:`strandline.kernels.gemm.linear.head_linear`. Rows, heads and the weight may have any strides."""
    (num_rows, num_heads, _), num_outputs = x_THI.shape, weight_HOI.shape[1]
    out_THO = torch.empty((num_rows, num_heads, num_outputs), dtype=x_THI.dtype, device=x_THI.device)
    if num_rows:
        launch = choose_tile(num_rows, num_outputs, x_THI.dtype)
        launch_heads(out_THO, x_THI.transpose(0, 1), DenseWeight(weight_HOI), launch)
    return out_THO


def choose_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Launch:
    if dtype == torch.float32:
        return TILE_FLOAT32
    if num_rows <= FEW_ROWS:
        return TILE_NARROW if num_outputs < NARROW_OUTPUTS else TILE_FEW
    return TILE_MIDDLE if num_rows <= MIDDLE_ROWS else TILE_MANY
