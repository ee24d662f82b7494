"""How experts in 4 bits are tiled. Measured by ``benchmarks/kernels/four_bit.py --experts --sweep``."""

from typing import Final

import torch

from strandline.kernels.experts.expert_tiles import ExpertTile, Few, choose_by_load

FEW: Final = Few(4, 2048, 2, 8, 4)

EXPERTS_DECODE: Final = (ExpertTile(16, 64, 4, 4), ExpertTile(16, 128, 4, 3))
EXPERTS_MIDDLE: Final = (ExpertTile(64, 64, 4, 3), ExpertTile(16, 128, 4, 3))
EXPERTS_PREFILL: Final = (ExpertTile(64, 64, 4, 3, 2), ExpertTile(64, 128, 8, 3))
EXPERTS_INVARIANT: Final = EXPERTS_MIDDLE
"""For any number of tokens, if results may not depend on it."""

EXPERTS_FLOAT32: Final = (ExpertTile(32, 32, 4, 2), ExpertTile(32, 32, 4, 2))
"""In plain float32, which does not use tensor cores: for tests and small models."""


def choose_expert_tiles(choices_per_expert: int, dtype: torch.dtype) -> tuple[ExpertTile, ExpertTile]:
    if dtype == torch.float32:
        return EXPERTS_FLOAT32
    return choose_by_load(choices_per_expert, EXPERTS_DECODE, EXPERTS_MIDDLE, EXPERTS_PREFILL)


def choose_expert_tiles_invariant(dtype: torch.dtype) -> tuple[ExpertTile, ExpertTile]:
    return EXPERTS_FLOAT32 if dtype == torch.float32 else EXPERTS_INVARIANT
