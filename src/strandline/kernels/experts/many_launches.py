"""How experts of many tokens are tiled, by the weights' format and by how many choices an expert has on average.

The launches are in the rows of formats (``gemm/formats``).
"""

from typing import Final

import torch

from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.launch import Pair
from strandline.kernels.operation import Launches

CHOICES_PER_EXPERT_SEVERAL: Final = 8
"""From how many choices per expert, on average, some experts have more than a tile of 16 rows."""

CHOICES_PER_EXPERT_MIDDLE: Final = 16
CHOICES_PER_EXPERT_PREFILL: Final = 64
"""From how many choices per expert, on average, the larger tiles pay."""


def pays_to_dequantize(format: Format, choices_per_expert: int, launches: Launches) -> bool:
    """Return whether weights of a format are best dequantised first; arguments as of ``choose_launches``."""
    least = format.launches.experts.min_dequantized
    return least is not None and launches is Launches.MEASURED and choices_per_expert >= least


def choose_launches(
    format: Format,
    dtype: torch.dtype,
    choices_per_expert: int,
    launches: Launches = Launches.MEASURED,
    *,
    is_gated: bool = True,
) -> Pair:
    """Return the launches of both products.

    Args:
        format: format of the experts' weights.
        dtype: dtype of activations.
        choices_per_expert: on average.
        is_gated: whether experts have a gate.
    """
    measured = format.launches.experts
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
