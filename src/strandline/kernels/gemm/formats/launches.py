"""What a format's launches are, for linear layers and for experts.

Measured on an H200 by ``python benchmarks/kernels --case 'linear/*' --sweep`` and ``--case 'experts/*' --sweep``. A row
says what is fastest, and what ``--deterministic`` takes, whose sums have one order for any number of rows.
``gemm/launches.py``, ``experts/few_launches.py`` and ``experts/many_launches.py`` choose among them.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from strandline.kernels.launch import Launch, Pair

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


class Preloaded(NamedTuple):
    """Which products load their weight before they wait, and how."""

    launch: Launch
    num_rows: range
    min_numbers: int
    """How large a weight has to be."""


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
    programs_split_several: int | None = None
    """What it aims at where there are several tiles of rows; None: the same."""
    rows_one_wide_gated: Launch | None = None
    """As ``rows_one_wide``, of gate and up projections: with a gate a program holds twice as many numbers; None: the
    same."""
    preloaded: Preloaded | None = None
    """None: no product does; else those whose inputs blocks divide."""
    max_rows_pair: int = 64
    """Up to this many rows a dense weight may be multiplied in the launch of the quantised one before it."""


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
