"""Matrix products in FP8 in Triton (``block_scaled.py``): few rows streamed through registers, more on tensor cores.

One row, and up to ``MAX_ROWS_GEMV`` with a small weight: as ``rows_triton.py`` says. More: tiles of rows and outputs,
of many rows by torch where it can. With few rows narrow weights are split among programs along the inputs,
too, and the parts are added up in order. Rows that are not quantised yet are quantised by the programs of a
matrix-vector product themselves; otherwise a separate launch does so first.

A launch of few rows may multiply them with an ordinary weight, too (``SecondTile``): programs of its own do that.

Invariant: ``_invariant`` versions add up in an order that depends on neither the number of rows nor the tile.

Shape suffixes: as in ``block_scaled.py``.
"""
# mypy: ignore-errors

from functools import cache

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.fp8_triton import MIN_ROWS_HOPPER
from strandline.kernels.gemm.rows_triton import Gemv, Second, launch_gemv
from strandline.kernels.gemm.tiles_triton import SecondTile, launch_tiles
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import GROUP, Rows, flat_rows, new_output, shaped
from strandline.kernels.rowwise.quantizing_triton import quantized, swiglu_quantized
from strandline.kernels.sizes import NUM_SMS, cdiv

MAX_ROWS_GEMV = 4


GEMV_WIDE = Gemv(4, 512, 1)
GEMV_NARROW = Gemv(4, 2048, 4)
"""For many and few outputs (benchmarks/kernels, `linear/fp8`). Where a chunk of the rows has 16 numbers per thread,
as of one row here, sums have the same order whether rows come quantised or not."""

WIDE_OUTPUTS = 8192
"""From here on a program of few rows is one warp, and a tile has more outputs."""

MAX_NUMBERS_GEMV = {2: 1 << 25, MAX_ROWS_GEMV: 1 << 23}
"""By the largest number of rows: numbers of a weight beyond which tiles are faster. Every row costs a matrix-vector
product as many instructions again, and a larger weight has them wait for these, no longer for memory: three rows and
``[12288, 2048]`` take 12.3 us, tiles 10.6; with ``[2048, 4096]`` 5.2 and 5.7 (benchmarks/results/2026-11-24-h200-3.md).
"""

TILES = {
    16: Launch(16, 64, GROUP, 4, 6),
    32: Launch(32, 64, GROUP, 4, 5),
    64: Launch(64, 64, GROUP, 4, 4),
}
"""By the largest number of rows."""

TILE_WIDE = Launch(16, 128, GROUP, 4, 4)
"""For up to 16 rows and many outputs."""

TILE_MANY = Launch(128, 64, GROUP, 4, 4)

MAX_ROWS_TILES = 128
"""With more rows, torch's product takes two thirds of the time."""

TORCH_INPUTS = 4 * GROUP
"""What inputs are a multiple of, so that torch takes scales as they lie."""

TORCH_CUDA = (12, 9)
"""The first CUDA version whose library multiplies with scales of blocks."""

MAX_ROWS_SPLIT = 64
"""Up to this many rows a weight with few outputs is split along the inputs."""

PROGRAMS_SPLIT = 2 * NUM_SMS
"""What a split aims at: two programs per multiprocessor."""

MAX_SPANS = 8


def block_scaled_linear(x: Rows, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.block_scaled.block_scaled_linear`."""
    rows = flat_rows(x)
    out_TO = new_output(rows, len(weight.values))
    multiply_into(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def block_scaled_linear_invariant(x: Rows, weight: ScaledWeight, bias_O: Tensor | None = None) -> Tensor:
    """As :func:`block_scaled_linear`, with the same order of sums for any number of rows."""
    rows = flat_rows(x)
    out_TO = new_output(rows, len(weight.values))
    multiply_into_invariant(out_TO, rows, weight, bias_O)
    return shaped(out_TO, x)


def block_scaled_gated_linear(x: Rows, gate_up: ScaledWeight) -> Tensor:
    """Return ``silu(gate x) * up x``, the gate's rows before the up projection's."""
    rows = flat_rows(x)
    if uses_gemv(len(rows), gate_up):
        return shaped(_gated_gemv(rows, gate_up), x)
    return swiglu(block_scaled_linear(x, gate_up))


def block_scaled_gated_linear_quantized(x: Rows, gate_up: ScaledWeight) -> Rows:
    """As :func:`block_scaled_gated_linear`; what tiles have multiplied is quantised in the same launch."""
    rows = flat_rows(x)
    if uses_gemv(len(rows), gate_up):
        return _gated_gemv(rows, gate_up)
    return swiglu_quantized(block_scaled_linear(rows, gate_up))


def _gated_gemv(rows: Rows, gate_up: ScaledWeight) -> Tensor:
    out_TO = new_output(rows, len(gate_up.values) // 2)
    launch_gemv(out_TO, rows, gate_up, None, choose_gemv(out_TO.shape[1]), is_gated=True)
    return out_TO


def multiply_into(out_TO: Tensor, rows: Rows, weight: ScaledWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO``, whose rows may lie apart, with a product."""
    num_rows = len(rows)
    if not num_rows:
        return
    if uses_gemv(num_rows, weight):
        launch_gemv(out_TO, rows, weight, bias_O, choose_gemv(len(weight.values)))
    elif num_rows > MAX_ROWS_TILES and can_multiply_in_torch(rows, weight):
        multiply_in_torch(out_TO, rows, weight, bias_O)
    else:
        tile = choose_tile(num_rows, len(weight.values))
        tile = tile._replace(splits=choose_spans(num_rows, weight, tile))
        launch_tiles(out_TO, quantized(rows), weight, bias_O, tile)


def multiply_into_invariant(out_TO: Tensor, rows: Rows, weight: ScaledWeight, bias_O: Tensor | None) -> None:
    """As :func:`multiply_into`, with the same order of sums for any number of rows."""
    if len(rows):
        tile = choose_tile(max(len(rows), MIN_ROWS_HOPPER.value), len(weight.values))
        launch_tiles(out_TO, quantized(rows), weight, bias_O, tile)


def multiply_beside(out_TO: Tensor, rows: Rows, weight: ScaledWeight, beside: SecondTile) -> None:
    """Fill ``out_TO`` with the products of one to ``MAX_ROWS_SPLIT`` rows with both weights."""
    num_rows, num_outputs = len(rows), len(weight.values)
    if uses_gemv(num_rows, weight):
        second = Second(DenseWeight(beside.values_OI), out_TO[:, num_outputs:])
        launch_gemv(out_TO, rows, weight, None, choose_gemv(num_outputs), second=second)
        return
    tile = choose_tile(num_rows, num_outputs)
    tile = tile._replace(splits=choose_spans(num_rows, weight, tile, len(beside.values_OI)))
    launch_tiles(out_TO, quantized(rows), weight, None, tile, beside)


def can_multiply_in_torch(rows: Rows, weight: ScaledWeight) -> bool:
    """Return whether torch multiplies rows with this weight: on Hopper GPUs, with a scale for each whole block."""
    num_outputs, num_inputs = weight.values.shape
    return (
        rows.dtype == torch.bfloat16
        and weight.rows_per_scale == GROUP
        and num_outputs % GROUP == num_inputs % TORCH_INPUTS == 0
        and weight.scales.is_contiguous()
        and rows.device.type == "cuda"
        and _has_block_scales_in_torch(weight.values.get_device())
    )


@cache
def _has_block_scales_in_torch(device: int) -> bool:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == 9 and version >= TORCH_CUDA


def multiply_in_torch(out_TO: Tensor, rows: Rows, weight: ScaledWeight, bias_O: Tensor | None) -> None:
    """Fill ``out_TO`` with torch's product of quantised rows."""
    rows = quantized(rows)
    scales = {"scale_a": rows.scale_XT.t(), "scale_b": weight.scales.t()}
    operands = (rows.values_TI, weight.values.t())
    if len(rows.values_TI) == len(rows):
        torch._scaled_mm(*operands, **scales, out_dtype=out_TO.dtype, out=out_TO)
    else:
        out_TO.copy_(torch._scaled_mm(*operands, **scales, out_dtype=out_TO.dtype)[: len(rows)])
    if bias_O is not None:
        out_TO.add_(bias_O)


def uses_gemv(num_rows: int, weight: ScaledWeight) -> bool:
    """Return whether matrix-vector products are fastest."""
    if num_rows == 1:
        return True
    most = next((numbers for rows, numbers in MAX_NUMBERS_GEMV.items() if num_rows <= rows), 0)
    return num_rows > 0 and weight.values.numel() <= most


def choose_gemv(num_outputs: int) -> Gemv:
    return GEMV_WIDE if num_outputs >= WIDE_OUTPUTS else GEMV_NARROW


def choose_tile(num_rows: int, num_outputs: int) -> Launch:
    if num_rows <= TILE_WIDE.block_m and num_outputs >= WIDE_OUTPUTS:
        return TILE_WIDE
    return next((tile for rows, tile in TILES.items() if num_rows <= rows), TILE_MANY)


def choose_spans(num_rows: int, weight: ScaledWeight, tile: Launch, num_beside: int = 0) -> int:
    """Return among how many programs the inputs of a tile are dealt out.

    Args:
        num_beside: outputs of the ordinary weight in the same launch.
    """
    if not 0 < num_rows <= MAX_ROWS_SPLIT:
        return 1
    num_outputs, num_inputs = weight.values.shape
    num_tiles = (cdiv(num_outputs, tile.block_n) + cdiv(num_beside, tile.block_n)) * cdiv(num_rows, tile.block_m)
    return max(1, min(MAX_SPANS, PROGRAMS_SPLIT // num_tiles, cdiv(num_inputs, GROUP)))
