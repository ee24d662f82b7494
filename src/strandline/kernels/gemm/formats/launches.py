"""The launches of every format of weights, for linear layers and for experts: a table with a row for each.

Measured on an H200 by ``python benchmarks/kernels --case 'linear/*' --sweep`` and ``--case 'experts/*' --sweep``. A row
says what is fastest, and what ``--deterministic`` takes, whose sums have one order for any number of rows.
``gemm/launches.py``, ``experts/few_launches.py`` and ``experts/many_launches.py`` choose among them.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from strandline.kernels.gemm.weights import (
    BLOCK_INPUTS,
    DenseWeight,
    FourBitWeight,
    Fp4Weight,
    Mxfp8Weight,
    ScaledWeight,
)
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.kernels.sizes import NUM_SMS

MAX_ROWS_PROGRAM: Final = 8
"""Rows that a program multiplies with its rows of the weight; registers hold all of theirs at once."""

MANY: Final = 1 << 62
"""More than there are."""

ALL: Final = 1 << 30
"""More inputs than there are."""


def rows_launch(block_n: int, block_k: int, warps: int) -> Launch:
    """Return the launch of a kernel of few rows."""
    return Launch(MAX_ROWS_PROGRAM, block_n, block_k, warps, 1)


def few_pair(up: tuple[int, int, int], block_down_n: int, warps_down: int, blocks_down: int = 1) -> Pair:
    """Return the launches of both products; a program of the second one takes all inputs at once.

    Args:
        up: outputs, inputs at a time and warps of the first one.
    """
    return rows_launch(*up), rows_launch(block_down_n, ALL, warps_down)._replace(blocks=blocks_down)


class Tiles(NamedTuple):
    """Tiles of a format, by the largest number of rows."""

    narrow: Mapping[int, Launch]
    wide: Mapping[int, Launch]
    """For many outputs."""
    float32: Launch | None = None
    """Exact products, without tensor cores, for tests and small models; None: as in other dtypes."""
    wide_outputs: int = 8192
    """From here on there are many outputs."""

    def choose(self, num_rows: int, num_outputs: int, dtype: torch.dtype) -> Launch:
        """Return the tile for some rows and a weight."""
        if dtype == torch.float32 and self.float32 is not None:
            return self.float32
        tiles = self.wide if num_outputs >= self.wide_outputs else self.narrow
        return next(tile for rows, tile in tiles.items() if num_rows <= rows)


class LinearLaunches(NamedTuple):
    """The fastest launches of linear layers with a quantised weight."""

    max_numbers: Mapping[int, int]
    """By the largest number of rows: numbers of a weight beyond which tiles are faster. Every row costs a matrix-vector
    product as many instructions again, and a larger weight has them wait for these, no longer for memory."""
    rows_one: Launch
    rows_several: Launch
    rows_one_wide: Launch
    rows_several_wide: Launch
    """Few rows: one and several, and these with many outputs."""
    tiles: Tiles
    max_rows_narrow: int
    max_rows_wide: int
    """With more rows the library is faster: with few outputs and with many."""
    max_block_split: int
    """Tiles of up to this many rows are split along the inputs, where there are few."""
    programs_split: int
    """What a split aims at."""


class ExpertLaunches(NamedTuple):
    """The launches of experts of many tokens."""

    decode: Pair
    """Few choices per expert: reading the weights takes nearly all the time; several small programs per multiprocessor
    read at once."""
    middle: Pair
    """Tens of choices per expert: reading weights and multiplying take about as long."""
    prefill: Pair
    """Hundreds of choices per expert: tiles as large as the registers allow."""
    fixed: tuple[Pair, Pair, Pair]
    """Launches that add in one order, for the same three numbers of choices."""
    float32: Pair | None = None
    """Exact products, without tensor cores, for tests and small models; None: as in other dtypes."""
    several: Pair | None = None
    """As ``decode``, with taller tiles, so that no expert's weights are read twice; None: the same."""
    prefill_ungated: Pair | None = None
    """As ``prefill``, for experts without a gate, also where launches are fixed: their first product has half as many
    accumulators. None: the same."""
    min_dequantized: int | None = None
    """From how many choices per expert, on average, weights are dequantised first, unless launches are fixed; None:
    never."""


class FormatLaunches(NamedTuple):
    """All launches of a format."""

    linear: LinearLaunches | None
    """None: those of ordinary weights depend on more (``gemm/launches.py``)."""
    linear_fixed: Tiles
    """Tiles of linear layers that add in one order."""
    experts: ExpertLaunches
    few_experts: tuple[Pair, Pair] | None = None
    """Both products of experts of one token, and of a few; None: they depend on more (``experts/few_launches.py``)."""
    few_experts_wide: Launch | None = None
    """Their second product of more inputs (``experts/few_launches.WIDE_FACTOR``); None: the same."""
    few_experts_three: Launch | None = None
    """Their second product of three tokens, as of one sequence with two drafts, where all programs run at once
    (``experts/few_launches.PROGRAMS_AT_ONCE``); None: the same."""


# Each output is one chain of additions over the inputs in order, 16 at a time, in the tensor core's float32 accumulator
# (float32 inputs: one at a time). Tiles differ in how many rows and columns they have, never in that order: all give
# the same bits (tests/gpu/kernels/gemm/test_gemms.py). None has fewer than 64 rows: below, the compiler uses another
# instruction, whose order of additions is not documented.
DENSE_FIXED: Final = {512: Launch(128, 64, 64, 4, 4), MANY: Launch(128, 256, 64, 8, 3)}

DENSE: Final = FormatLaunches(
    linear=None,
    linear_fixed=Tiles(
        # Up to 512 rows reading the weight takes nearly all the time: narrow tiles keep every multiprocessor reading.
        {64: Launch(64, 32, 64, 4, 6)} | DENSE_FIXED,
        {64: Launch(64, 64, 64, 4, 5)} | DENSE_FIXED,
        Launch(64, 64, 16, 4, 2),
        # Below this many outputs, tiles of 64 columns would leave multiprocessors idle.
        wide_outputs=64 * NUM_SMS,
    ),
    experts=ExpertLaunches(
        decode=(Launch(16, 32, 128, 4, 4), Launch(16, 64, 128, 4, 4)),
        middle=(middle := (Launch(64, 64, 64, 4, 4), Launch(64, 128, 64, 4, 4))),
        # To multiply rows that do not exist takes as long, and as much power, as to multiply others: tiles are halved.
        prefill=(
            prefill := (Launch(128, 128, 64, 8, 4, 4, is_halved=True), Launch(128, 256, 64, 8, 3, 2, is_halved=True))
        ),
        fixed=(middle, middle, prefill),
        float32=(Launch(16, 32, 32, 4, 2), Launch(16, 32, 32, 4, 2)),
        several=(Launch(32, 64, 128, 4, 3), Launch(32, 64, 128, 4, 3)),
        prefill_ungated=(Launch(128, 256, 64, 8, 4, 4, is_halved=True), Launch(128, 256, 64, 8, 3, 4, is_halved=True)),
    ),
)

FP8_FIXED: Final = {64: Launch(64, 64, GROUP, 4, 4), MANY: Launch(128, 64, GROUP, 4, 4)}
FP8_TILES: Final = {32: Launch(32, 64, GROUP, 4, 5)} | FP8_FIXED

FP8: Final = FormatLaunches(
    linear=LinearLaunches(
        # Three rows and [12288, 2048] take 12.3 us, tiles 10.6; with [2048, 4096] 5.2 and 5.7
        # (benchmarks/results/2026-11-24-h200-3.md).
        max_numbers={1: MANY, 2: 1 << 25, 4: 1 << 23},
        # Where a chunk of the rows has 16 numbers per thread, as of one row here, sums have the same order whether rows
        # come quantised or not.
        rows_one=rows_launch(4, 2048, 4),
        rows_several=rows_launch(4, 2048, 4),
        rows_one_wide=rows_launch(4, 1024, 2),
        rows_several_wide=rows_launch(4, 512, 1),
        tiles=Tiles({16: Launch(16, 64, GROUP, 4, 6)} | FP8_TILES, {16: Launch(16, 128, GROUP, 4, 4)} | FP8_TILES),
        max_rows_narrow=128,
        max_rows_wide=128,
        max_block_split=64,
        programs_split=2 * NUM_SMS,
    ),
    linear_fixed=Tiles(FP8_FIXED, FP8_FIXED),
    experts=ExpertLaunches(
        # The first product always has tiles of a group of features, which it quantises together.
        decode=(Launch(16, GROUP, GROUP, 4, 3), Launch(16, GROUP, GROUP, 4, 3)),
        middle=(middle := (Launch(64, GROUP, GROUP, 8, 3), Launch(64, GROUP, GROUP, 4, 4))),
        prefill=(prefill := (Launch(128, GROUP, GROUP, 8, 3, 4), fp8_down := Launch(64, GROUP, GROUP, 4, 3, 2))),
        fixed=(middle, middle, prefill),
        prefill_ungated=(Launch(64, GROUP, GROUP, 8, 3, 2), fp8_down),
    ),
    # For several tokens, a program of one warp of the first product needs no barrier.
    few_experts=(few_pair((8, 1024, 4), 4, 4), few_pair((4, 512, 1), 8, 4)),
    # Every program quantises all inputs, so that fewer outputs for each would cost more than the registers that they
    # take.
    few_experts_wide=rows_launch(8, ALL, 8),
    # A program chooses experts and quantises hidden features once for four tiles.
    few_experts_three=rows_launch(4, ALL, 4)._replace(blocks=4),
)

CODED_MANY: Final = Launch(64, 128, BLOCK_INPUTS, 8, 3)
CODED_MIDDLE: Final = Launch(32, 128, BLOCK_INPUTS, 4, 3)
CODED_FLOAT32: Final = Launch(32, 64, BLOCK_INPUTS, 4, 2)
CODED_FIXED: Final = Tiles({MANY: CODED_MANY}, {MANY: CODED_MANY}, CODED_FLOAT32)
"""Launches of all formats with codes."""

# From 64 outputs on and with four warps, tensor cores of Hopper GPUs take the weight from registers.
FOUR_BIT_LINEAR: Final = LinearLaunches(
    max_numbers={1: MANY, 2: 1 << 24, 4: 1 << 23},
    rows_one=rows_launch(4, 4096, 4),
    rows_several=rows_launch(4, 2048, 2),
    rows_one_wide=rows_launch(8, 1024, 1),
    rows_several_wide=rows_launch(4, 1024, 1),
    tiles=Tiles(
        {16: Launch(16, 64, BLOCK_INPUTS, 2, 4), MANY: CODED_MIDDLE},
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), 32: CODED_MIDDLE, MANY: CODED_MANY},
        CODED_FLOAT32,
    ),
    # Dequantising moves 2.5 bytes for a weight; at 4.3 TB/s and 700 TFLOP/s that takes as long as its products with 200
    # rows. Tiles unpack the weight once for every 64 rows instead.
    max_rows_narrow=64,
    max_rows_wide=256,
    max_block_split=32,
    programs_split=3 * NUM_SMS,
)
FOUR_BIT: Final = FormatLaunches(
    linear=FOUR_BIT_LINEAR,
    linear_fixed=CODED_FIXED,
    experts=ExpertLaunches(
        decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 3)),
        middle=(middle := (Launch(64, 64, BLOCK_INPUTS, 4, 3), Launch(16, 128, BLOCK_INPUTS, 4, 3))),
        prefill=(Launch(64, 64, BLOCK_INPUTS, 4, 3, 2), Launch(64, 128, BLOCK_INPUTS, 4, 3)),
        fixed=(middle, middle, middle),
        float32=(Launch(32, 32, BLOCK_INPUTS, 4, 2), Launch(32, 32, BLOCK_INPUTS, 4, 2)),
    ),
    few_experts=(few_pair((8, 2048, 4), 4, 4), few_pair((8, 1024, 2), 4, 1)),
)

FP4_LINEAR: Final = FOUR_BIT_LINEAR._replace(
    rows_one_wide=rows_launch(8, 2048, 2),
    tiles=Tiles(
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), MANY: CODED_MIDDLE},
        {16: Launch(16, 64, BLOCK_INPUTS, 4, 4), 32: CODED_MIDDLE, MANY: CODED_MANY},
        CODED_FLOAT32,
    ),
)
FP4: Final = FormatLaunches(
    linear=FP4_LINEAR,
    linear_fixed=CODED_FIXED,
    experts=ExpertLaunches(
        decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 4)),
        middle=(fp4_middle := (Launch(64, 128, BLOCK_INPUTS, 8, 3), Launch(32, 128, BLOCK_INPUTS, 4, 3))),
        prefill=fp4_middle,
        fixed=(fp4_middle, fp4_middle, fp4_middle),
        float32=FOUR_BIT.experts.float32,
        min_dequantized=160,
    ),
    few_experts=(few_pair((8, 1024, 2), 8, 4), few_pair((8, 1024, 2), 4, 1)),
)

MXFP8_FEW_TOKENS: Final = Launch(16, 128, BLOCK_INPUTS, 4, 3)
MXFP8_TOKENS: Final = (Launch(64, 64, BLOCK_INPUTS, 4, 3), CODED_MIDDLE)

MXFP8: Final = FormatLaunches(
    linear=FP4_LINEAR._replace(
        rows_several=rows_launch(4, 1024, 2),
        rows_one_wide=rows_launch(4, 1024, 2),
        rows_several_wide=rows_launch(4, 512, 1),
        tiles=Tiles(
            {16: MXFP8_FEW_TOKENS, MANY: CODED_MIDDLE},
            {16: MXFP8_FEW_TOKENS, 64: CODED_MIDDLE, MANY: CODED_MANY},
            CODED_FLOAT32,
        ),
    ),
    linear_fixed=CODED_FIXED,
    experts=FP4.experts._replace(
        decode=(MXFP8_FEW_TOKENS, MXFP8_FEW_TOKENS),
        middle=MXFP8_TOKENS,
        prefill=MXFP8_TOKENS,
        min_dequantized=192,
    ),
    few_experts=(few_pair((4, 512, 2), 4, 4), few_pair((4, 512, 2), 2, 2)),
)

LAUNCHES: Final[dict[type, FormatLaunches]] = {
    DenseWeight: DENSE,
    ScaledWeight: FP8,
    FourBitWeight: FOUR_BIT,
    Fp4Weight: FP4,
    Mxfp8Weight: MXFP8,
}
"""By the class of the weight."""
