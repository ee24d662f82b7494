"""Ordinary weights: the row of formats for what is not quantised."""

from typing import Final

from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.launches import MANY, ExpertLaunches, FormatLaunches, Tiles
from strandline.kernels.launch import Launch
from strandline.kernels.sizes import NUM_SMS

# Each output is one chain of additions over the inputs in order, 16 at a time, in the tensor core's float32 accumulator
# (float32 inputs: one at a time). Tiles differ in how many rows and columns they have, never in that order: all give
# the same bits (tests/gpu/kernels/gemm/test_gemms.py). None has fewer than 64 rows: below, the compiler uses another
# instruction, whose order of additions is not documented.
DENSE_FIXED: Final = {512: Launch(128, 64, 64, 4, 4), MANY: Launch(128, 256, 64, 8, 3)}

LAUNCHES: Final = FormatLaunches(
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

DENSE: Final = Format(
    name="dense",
    functions="dense_triton",
    launches=LAUNCHES,
)
