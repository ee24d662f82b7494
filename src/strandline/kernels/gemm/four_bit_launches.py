"""How products with weights in 4 bits are tiled, and from which sizes on which way is taken.

Measured by ``python benchmarks/kernels --case '*/int4' --sweep``. All that depends on the GPU is here.
"""

from typing import Final

import torch

from strandline.kernels.gemm.rows_triton import Gemv
from strandline.kernels.gemm.weights import BLOCK_INPUTS
from strandline.kernels.launch import Launch
from strandline.kernels.sizes import NUM_SMS, cdiv

GEMV_WIDE: Final = Gemv(4, 1024, 1)
GEMV_NARROW: Final = Gemv(4, 4096, 4)
GEMV_NARROW_ROWS: Final = Gemv(4, 2048, 2)
"""For many outputs; for few, of one row and of several."""

WIDE_OUTPUTS: Final = 8192
"""From here on there are many outputs."""

MAX_ROWS_GEMV: Final = 4
"""Most rows that programs of matrix-vector products can take."""

MAX_CODES_GEMV: Final = {1: 1 << 62, 2: 1 << 24, 4: 1 << 23}
"""By the largest number of rows: codes of a weight beyond which tiles are faster."""

TILES_NARROW: Final = {16: Launch(16, 64, BLOCK_INPUTS, 2, 4), 64: Launch(32, 128, BLOCK_INPUTS, 4, 3)}
TILES_WIDE: Final = {
    16: Launch(16, 128, BLOCK_INPUTS, 4, 3),
    32: Launch(32, 128, BLOCK_INPUTS, 4, 3),
    64: Launch(64, 128, BLOCK_INPUTS, 8, 3),
}
"""For few outputs and for many, by the largest number of rows. From 64 outputs on and with four warps, tensor cores of
Hopper GPUs take the weight from registers."""

TILE_MANY: Final = Launch(64, 128, BLOCK_INPUTS, 8, 3)

TILE_INVARIANT: Final = TILE_MANY
"""For any number of rows, if results may not depend on it."""

TILE_FLOAT32: Final = Launch(32, 64, BLOCK_INPUTS, 4, 2)
"""For any number of rows in plain float32, which does not use tensor cores: for tests and small models."""

MAX_ROWS_NARROW: Final = 64
MAX_ROWS_WIDE: Final = 256
"""With more rows the weight is dequantised, and multiplied by torch: with few outputs and with many."""

MAX_TILE_ROWS_SPLIT: Final = 32
"""Tiles of up to this many rows are split along the inputs, where there are few."""

PROGRAMS_SPLIT: Final = 3 * NUM_SMS
"""What a split aims at: three programs per multiprocessor."""

MAX_SPANS: Final = 8


def uses_gemv(num_rows: int, num_codes: int) -> bool:
    """Return whether matrix-vector products are fastest."""
    most = next((codes for rows, codes in MAX_CODES_GEMV.items() if num_rows <= rows), 0)
    return num_rows > 0 and num_codes <= most


def choose_gemv(num_rows: int, num_outputs: int) -> Gemv:
    if num_outputs >= WIDE_OUTPUTS:
        return GEMV_WIDE
    return GEMV_NARROW if num_rows == 1 else GEMV_NARROW_ROWS


def uses_tiles(num_rows: int, num_outputs: int) -> bool:
    """Return whether products of codes are faster than one with the dequantised weight."""
    return num_rows <= (MAX_ROWS_WIDE if num_outputs >= WIDE_OUTPUTS else MAX_ROWS_NARROW)


def choose_tile(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Launch:
    if dtype == torch.float32:
        return TILE_FLOAT32
    tiles = TILES_WIDE if num_outputs >= WIDE_OUTPUTS else TILES_NARROW
    return next((tile for rows, tile in tiles.items() if num_rows <= rows), TILE_MANY)


def choose_tile_invariant(dtype: torch.dtype) -> Launch:
    return TILE_FLOAT32 if dtype == torch.float32 else TILE_INVARIANT


def choose_spans(num_rows: int, num_outputs: int, num_blocks: int, tile: Launch) -> int:
    """Return among how many programs the inputs of a tile are dealt out.

    Args:
        num_blocks: blocks of a row's inputs.
    """
    if tile.block_m > MAX_TILE_ROWS_SPLIT:
        return 1
    num_tiles = cdiv(num_outputs, tile.block_n) * cdiv(num_rows, tile.block_m)
    return max(1, min(MAX_SPANS, PROGRAMS_SPLIT // num_tiles, num_blocks))
