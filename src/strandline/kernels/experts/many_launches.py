"""How experts of many tokens are tiled, by the weights' format and by how many choices an expert has on average.

Measured by ``benchmarks/kernels``, ``experts --sweep``.
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
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.quantized_rows import GROUP

CHOICES_PER_EXPERT_SEVERAL: Final = 8
"""From how many choices per expert, on average, some experts have more than a tile of 16 rows."""

CHOICES_PER_EXPERT_MIDDLE: Final = 16
CHOICES_PER_EXPERT_PREFILL: Final = 64
"""From how many choices per expert, on average, the larger tiles pay."""


class Measured(NamedTuple):
    """The launches of a format."""

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


DENSE: Final = Measured(
    decode=(Launch(16, 32, 128, 4, 4), Launch(16, 64, 128, 4, 4)),
    middle=(middle := (Launch(64, 64, 64, 4, 4), Launch(64, 128, 64, 4, 4))),
    # To multiply rows that do not exist takes as long, and as much power, as to multiply others: tiles are halved.
    prefill=(prefill := (Launch(128, 128, 64, 8, 4, 4, is_halved=True), Launch(128, 256, 64, 8, 3, 2, is_halved=True))),
    fixed=(middle, middle, prefill),
    float32=(Launch(16, 32, 32, 4, 2), Launch(16, 32, 32, 4, 2)),
    several=(Launch(32, 64, 128, 4, 3), Launch(32, 64, 128, 4, 3)),
    prefill_ungated=(Launch(128, 256, 64, 8, 4, 4, is_halved=True), Launch(128, 256, 64, 8, 3, 4, is_halved=True)),
)

FP8: Final = Measured(
    # The first product always has tiles of a group of features, which it quantises together.
    decode=(Launch(16, GROUP, GROUP, 4, 3), Launch(16, GROUP, GROUP, 4, 3)),
    middle=(middle := (Launch(64, GROUP, GROUP, 8, 3), Launch(64, GROUP, GROUP, 4, 4))),
    prefill=(prefill := (Launch(128, GROUP, GROUP, 8, 3, 4), fp8_down := Launch(64, GROUP, GROUP, 4, 3, 2))),
    fixed=(middle, middle, prefill),
    prefill_ungated=(Launch(64, GROUP, GROUP, 8, 3, 2), fp8_down),
)

FOUR_BIT: Final = Measured(
    decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 3)),
    middle=(middle := (Launch(64, 64, BLOCK_INPUTS, 4, 3), Launch(16, 128, BLOCK_INPUTS, 4, 3))),
    prefill=(Launch(64, 64, BLOCK_INPUTS, 4, 3, 2), Launch(64, 128, BLOCK_INPUTS, 4, 3)),
    fixed=(middle, middle, middle),
    float32=(Launch(32, 32, BLOCK_INPUTS, 4, 2), Launch(32, 32, BLOCK_INPUTS, 4, 2)),
)

FP4: Final = Measured(
    decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 4)),
    middle=(fp4_middle := (Launch(64, 128, BLOCK_INPUTS, 8, 3), Launch(32, 128, BLOCK_INPUTS, 4, 3))),
    prefill=fp4_middle,
    fixed=(fp4_middle, fp4_middle, fp4_middle),
    float32=FOUR_BIT.float32,
    min_dequantized=160,
)

MXFP8: Final = FP4._replace(
    decode=(Launch(16, 128, BLOCK_INPUTS, 8, 3), Launch(16, 128, BLOCK_INPUTS, 8, 3)),
    min_dequantized=128,
)

MEASURED: Mapping[type, Measured] = {
    DenseWeight: DENSE,
    ScaledWeight: FP8,
    FourBitWeight: FOUR_BIT,
    Fp4Weight: FP4,
    Mxfp8Weight: MXFP8,
}
"""By the class of the experts' weights."""


def pays_to_dequantize(format_class: type, choices_per_expert: int, launches: Launches) -> bool:
    """Return whether weights of a format are best dequantised first; arguments as of ``choose_launches``."""
    least = MEASURED[format_class].min_dequantized
    return least is not None and launches is Launches.MEASURED and choices_per_expert >= least


def choose_launches(
    format_class: type,
    dtype: torch.dtype,
    choices_per_expert: int,
    launches: Launches = Launches.MEASURED,
    *,
    is_gated: bool = True,
) -> Pair:
    """Return the launches of both products.

    Args:
        format_class: class of the experts' weights.
        dtype: of activations.
        choices_per_expert: on average.
        is_gated: whether experts have a gate.
    """
    measured = MEASURED[format_class]
    if dtype == torch.float32 and measured.float32 is not None:
        return measured.float32
    is_fixed = launches is Launches.FIXED
    decode, middle, prefill = measured.fixed if is_fixed else measured[:3]
    if choices_per_expert >= CHOICES_PER_EXPERT_PREFILL:
        return prefill if is_gated else measured.prefill_ungated or prefill
    if choices_per_expert >= CHOICES_PER_EXPERT_MIDDLE:
        return middle
    has_several = choices_per_expert >= CHOICES_PER_EXPERT_SEVERAL and not is_fixed
    return measured.several or decode if has_several else decode
