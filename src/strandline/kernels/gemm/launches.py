"""Which kernel multiplies, and with which launch, by the weight's format, sizes and number of rows.

Launches of quantised weights are in the rows of formats (``formats``), those of dense ones here, measured in the same
way. The choice depends on shapes and dtypes, and on whether the GPU's launches overlap; ``Launches.FIXED`` always
chooses tiles that add in one order.
"""

from enum import Enum
from typing import Final, NamedTuple

import torch

from strandline.kernels.gemm.formats.launches import MANY, LinearLaunches, Preloaded, Tiles, rows_launch
from strandline.kernels.gemm.fp8 import can_multiply_in_torch
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, ScaledWeight
from strandline.kernels.gpu import HOST, gpu_of
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.sizes import NUM_SMS, cdiv


class Kernel(Enum):
    """What multiplies."""

    ROWS = "rows"
    """Few rows, the weight streamed through registers (``rows_triton.py``)."""
    SKINNY = "skinny"
    """Up to 16 rows, a dense weight streamed through tensor cores (``skinny_triton.py``)."""
    PRELOADED = "preloaded"
    """A few rows, a large weight in FP8 that is loaded before the launch waits (``preloaded_triton.py``), on GPUs whose
    launches overlap."""
    TILES = "tiles"
    """Tiles of rows and outputs (``tiles_triton.py``)."""
    LIBRARY = "library"
    """Torch (``library_triton.py``)."""


class Plan(NamedTuple):
    """A kernel, and its launch."""

    kernel: Kernel
    launch: Launch | None = None
    """None: the library's."""


MAX_SPLITS: Final = 8

MAX_ROWS_FEW: Final = 4
MAX_ROWS_SKINNY: Final = 16

MAX_OUTPUTS: Final = 65536
"""Beyond (the head), two rows and more take torch's GEMM; one row takes 0.92 of its time on an H200."""

MIN_OUTPUTS_QUANTIZED: Final = 1 << 15
"""From here on (heads of drafts) a few rows are quantised in a launch before; else every program does so, which takes
as many instructions as the product (benchmarks/results/2026-11-28-one-row.md)."""

DENSE_TINY: Final = rows_launch(1, 2048, 4)
DENSE_SMALL: Final = rows_launch(1, 1024, 2)
DENSE_NARROW: Final = rows_launch(2, 512, 2)
DENSE_LONG: Final = rows_launch(2, 1024, 2)
DENSE_WIDE: Final = rows_launch(4, 512, 2)
"""Programs of 2 to 4 KiB at a time, a thousand of them and more: most of a small weight is under way at once."""

TINY_ELEMENTS: Final = 3 << 20
"""Up to this size there are too few programs of two outputs."""

LONG_INPUTS: Final = 4096

SMALL_ELEMENTS: Final = 12 << 20
"""Up to this size a weight is streamed faster by ever more programs, and for one to four rows; a larger one takes
torch's GEMM from three rows on: the arithmetic outweighs the stream there."""

WIDE_INPUTS: Final = 2560
"""From here on a program has four outputs."""

SKINNY: Final = Launch(16, 64, 128, 4, 4)
SKINNY_GATED: Final = Launch(16, 16, 256, 2, 4)
"""Some 200 to 600 programs, each with 48 to 64 KiB under way."""

MIN_OUTPUTS_SKINNY: Final = 8192
"""Below, there are too few tiles to fill the GPU: torch splits the inputs there."""

MAX_ROWS_ADAPTED: Final = 128
"""Up to this many rows, tiles that add what adapters do are faster than torch's GEMM and two launches after it
(benchmarks/results/2026-11-28-h200-lora.md)."""

PROGRAMS_ADAPTED: Final = 2 * NUM_SMS
"""What a split of such tiles aims at."""

ADAPTED_FEW: Final = {16: Launch(16, 64, 128, 4, 4), 32: Launch(32, 64, 128, 4, 3)}
ADAPTED: Final = Tiles(
    ADAPTED_FEW | {64: Launch(64, 64, 128, 4, 3), MANY: Launch(128, 64, 64, 4, 4)},
    ADAPTED_FEW | {64: Launch(64, 64, 64, 4, 4), MANY: Launch(128, 128, 64, 8, 3)},
    Launch(64, 64, 16, 4, 2),
    # A multiprocessor has room for two of the larger tiles, and for three of the smaller ones.
    wide_outputs=64 * PROGRAMS_ADAPTED + 1,
)

MAX_BLOCK_PAIR: Final = 64
"""A dense weight is multiplied in the launch of the quantised one before it where tiles have no more rows."""

LOGITS_PAIR: Final = rows_launch(1, 1024, 2)
"""A product and a router's: programs of 2 KiB of a bfloat16 weight at a time, or 4 KiB of a float32 one."""

LOGITS: Final = rows_launch(1, 1024, 4)
"""A router's product: a chunk has 8 inputs for each thread, so that its rows and the weight's are in the same
threads."""

ROUTER: Final = rows_launch(4, 2048, 8)
"""A router's product, in whose launch its rows are normalised: few outputs, so that the programs are few that do it."""

MAX_ROWS_LOGITS: Final = 64

LOGITS_TILE: Final = Launch(64, 64, 64, 4, 4)
"""A tile of a router's product of many rows."""

MIN_ROWS_LOGITS_TILES: Final = 2048
"""From this many rows on, a router's product is computed in tiles; of fewer, by torch, which divides the inputs."""


def choose(
    rows: Rows,
    weight: DenseWeight | QuantizedWeight,
    launches: Launches,
    *,
    is_gated: bool = False,
    num_second: int = 0,
) -> Plan:
    """Return what multiplies some rows with a weight.

    Args:
        is_gated: whether the outputs are those of a gate and an up projection. Tiles and the library do not apply it.
        num_second: outputs of a dense weight that is multiplied in the same launch.
    """
    of_format = weight.format.launches
    if launches is Launches.FIXED:
        return Plan(Kernel.TILES, of_format.linear_fixed.choose(len(rows), weight.shape[0], rows.dtype))
    if isinstance(weight, DenseWeight):
        return choose_dense(rows, weight, is_gated=is_gated)
    assert of_format.linear is not None, "only launches of dense weights are in no table"
    return choose_quantized(rows, weight, of_format.linear, is_gated=is_gated, num_second=num_second)


def choose_quantized(
    rows: Rows, weight: QuantizedWeight, measured: LinearLaunches, *, is_gated: bool = False, num_second: int = 0
) -> Plan:
    """Return the fastest way; other arguments as of ``choose``."""
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape
    if not is_gated and (preloaded := measured.preloaded) is not None and _can_preload(rows, weight, preloaded):
        return Plan(Kernel.PRELOADED, preloaded.launch)
    wide_outputs = measured.tiles.wide_outputs
    if num_outputs * num_inputs <= next((n for most, n in measured.max_numbers.items() if num_rows <= most), 0):
        is_wide = num_outputs // (1 + is_gated) >= wide_outputs
        if num_rows == 1 and is_wide:
            gated = measured.rows_one_wide_gated if is_gated else None
            return Plan(Kernel.ROWS, gated or measured.rows_one_wide)
        if num_rows == 1:
            return Plan(Kernel.ROWS, measured.rows_one)
        return Plan(Kernel.ROWS, measured.rows_several_wide if is_wide else measured.rows_several)
    max_rows = measured.max_rows_wide if num_outputs >= wide_outputs else measured.max_rows_narrow
    if num_rows > max_rows and (not isinstance(weight, ScaledWeight) or can_multiply_in_torch(rows, weight)):
        return Plan(Kernel.LIBRARY)
    tile = measured.tiles.choose(num_rows, num_outputs, rows.dtype)
    if tile.block_m > measured.max_block_split:
        return Plan(Kernel.TILES, tile)
    num_row_tiles, wanted = cdiv(num_rows, tile.block_m), measured.programs_split
    if num_row_tiles > 1:
        wanted = measured.programs_split_several or wanted
    num_tiles = (cdiv(num_outputs, tile.block_n) + cdiv(num_second, tile.block_n)) * num_row_tiles
    return Plan(Kernel.TILES, _split(tile, num_inputs, wanted // num_tiles))


def _can_preload(rows: Rows, weight: QuantizedWeight, preloaded: Preloaded) -> bool:
    """Return whether a product loads its weight before it waits; interpreted kernels do as those of Hopper GPUs."""
    gpu = gpu_of(rows.device)
    num_outputs, num_inputs = weight.shape
    is_few = len(rows) in preloaded.num_rows and rows.dtype != torch.float32
    is_large = num_outputs * num_inputs >= preloaded.min_numbers
    is_divided = num_inputs % preloaded.launch.block_k == 0
    return is_few and is_large and is_divided and (gpu.can_overlap or gpu is HOST)


def _split(tile: Launch, num_inputs: int, splits: int) -> Launch:
    """Return the launch with this many splits, but at least one, and at most as many as it can have."""
    return tile._replace(splits=max(1, min(MAX_SPLITS, cdiv(num_inputs, tile.block_k), splits)))


def choose_dense(rows: Rows, weight: DenseWeight, *, is_gated: bool = False) -> Plan:
    """Return the fastest way; arguments as of ``choose``."""
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape
    most = MAX_ROWS_FEW if rows.dtype == torch.float32 else MAX_ROWS_SKINNY
    if num_rows > most or not weight.values_OI.is_contiguous():
        return Plan(Kernel.LIBRARY)
    if num_outputs > MAX_OUTPUTS:
        return Plan(Kernel.ROWS, DENSE_NARROW) if num_rows == 1 else Plan(Kernel.LIBRARY)
    if num_outputs * num_inputs <= SMALL_ELEMENTS:
        if num_rows > MAX_ROWS_FEW:
            return Plan(Kernel.LIBRARY)
        return Plan(Kernel.ROWS, _of_a_row(num_inputs, num_outputs) if num_rows == 1 else DENSE_NARROW)
    if num_rows == 1:
        return Plan(Kernel.ROWS, DENSE_WIDE if num_inputs >= WIDE_INPUTS else DENSE_NARROW)
    if num_outputs < MIN_OUTPUTS_SKINNY:
        return Plan(Kernel.LIBRARY)
    return Plan(Kernel.SKINNY, SKINNY_GATED if is_gated else SKINNY)


def choose_adapted(rows: Rows, weight: DenseWeight | QuantizedWeight) -> Plan:
    """Return what multiplies rows if some have adapters: tiles instead of torch up to ``MAX_ROWS_ADAPTED``."""
    if not isinstance(weight, DenseWeight):
        measured = weight.format.launches.linear
        assert measured is not None, "only launches of dense weights are in no table"
        return choose_quantized(rows, weight, measured._replace(preloaded=None))
    plan, (num_outputs, num_inputs) = choose(rows, weight, Launches.MEASURED), weight.shape
    if plan.kernel is Kernel.ROWS or len(rows) > MAX_ROWS_ADAPTED:
        return plan
    tile = ADAPTED.choose(len(rows), num_outputs, rows.dtype)
    num_tiles = cdiv(num_outputs, tile.block_n) * cdiv(len(rows), tile.block_m)
    return Plan(Kernel.TILES, _split(tile, num_inputs, PROGRAMS_ADAPTED // num_tiles))


def _of_a_row(num_inputs: int, num_outputs: int) -> Launch:
    """Return the launch for one row and a small weight: whole blocks, if the inputs can be divided so."""
    is_tiny, is_long = num_outputs * num_inputs <= TINY_ELEMENTS, num_inputs >= LONG_INPUTS
    wanted = [DENSE_TINY] * is_tiny + [DENSE_LONG] * is_long + [DENSE_NARROW]
    return next((launch for launch in wanted if num_inputs % launch.block_k == 0), DENSE_SMALL)
