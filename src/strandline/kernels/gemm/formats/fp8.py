"""Weights in FP8 (e4m3): a scale for a number of rows and ``GROUP`` inputs, activations in FP8, too."""

from typing import Final

from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.launches import (
    ALL,
    MANY,
    ExpertLaunches,
    FormatLaunches,
    LinearLaunches,
    Preloaded,
    Tiles,
    few_pair,
    rows_launch,
)
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise.quantized_rows import GROUP
from strandline.kernels.sizes import NUM_SMS

FP8_FIXED: Final = {64: Launch(64, 64, GROUP, 4, 4), MANY: Launch(128, 64, GROUP, 4, 4)}
FP8_FEW: Final = {32: Launch(32, 64, GROUP, 4, 5)}

LAUNCHES: Final = FormatLaunches(
    linear=LinearLaunches(
        # Three rows and [12288, 2048] take 12.3 us, tiles 10.6; with [2048, 4096] 5.2 and 5.7
        # (benchmarks/results/2026-11-24-h200-3.md). Most products of three and four rows are preloaded since.
        max_numbers={1: MANY, 2: 1 << 25, 4: 1 << 23},
        # Where a chunk of the rows has 16 numbers per thread, as of one row here, sums have the same order whether rows
        # come quantised or not.
        rows_one=rows_launch(4, 2048, 4),
        rows_several=rows_launch(4, 2048, 4),
        rows_one_wide=rows_launch(4, 1024, 2),
        rows_several_wide=rows_launch(4, 512, 1),
        # Tiles of 64 rows of a narrow weight are split along the inputs. More rows come here where torch does not
        # multiply them: on other GPUs than Hopper's, and with scales of channels.
        tiles=Tiles(
            {16: Launch(16, 64, GROUP, 4, 6)} | FP8_FEW | {192: FP8_FIXED[64], MANY: FP8_FIXED[MANY]},
            {16: Launch(16, 128, GROUP, 4, 4)} | FP8_FEW | FP8_FIXED,
        ),
        max_rows_narrow=192,
        max_rows_wide=128,
        max_block_split=64,
        programs_split=2 * NUM_SMS,
        programs_split_several=3 * NUM_SMS,
        # Two rows take as long either way, eight 1 % less (benchmarks/results/2026-11-28-few-rows.md).
        preloaded=Preloaded(Launch(4, 64, 4 * GROUP, 4, 1), num_rows=range(3, 5), min_numbers=1 << 23),
        max_rows_pair=192,
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

FP8: Final = Format(
    name="FP8",
    functions="fp8_triton",
    multiplies_fp8=True,
    launches=LAUNCHES,
)
