"""How products of experts are tiled, whatever the weights' form, and with how many tokens which way is taken.

Up to ``MAX_TOKENS_FEW`` tokens: choice by choice. More: expert by expert, with tiles for the choices that an expert has
on average.
"""

from typing import Final, NamedTuple, TypeVar

MAX_TOKENS_FEW: Final = 4
"""With more tokens, reading an expert's weights once per choice costs more than sorting the choices into a list."""

CHOICES_PER_EXPERT_MIDDLE: Final = 16
CHOICES_PER_EXPERT_PREFILL: Final = 64
"""From how many choices per expert, on average, the larger tiles pay."""

T = TypeVar("T")


class Few(NamedTuple):
    """How the two products of a few tokens are tiled."""

    block_up_n: int
    block_up_k: int
    warps_up: int
    block_down_n: int
    warps_down: int
    blocks_down: int = 1
    """In bfloat16, tiles of outputs of a program of the second product, one after the other. It loads the next one
    ahead."""


class ExpertTile(NamedTuple):
    """How one of the two products of many tokens is tiled, with weights in FP8 or 4 bits."""

    block_m: int
    block_n: int
    """Features; of the first product as many of the gate and as many of the up projection."""
    warps: int
    stages: int
    split_m: int = 1
    """Programs among which an expert's choices are dealt out."""

    def options(self) -> dict[str, int]:
        """Return the launch arguments."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return {**blocks, "num_warps": self.warps, "num_stages": self.stages}


def choose_by_load(choices_per_expert: int, decode: T, middle: T, prefill: T) -> T:
    """Return one of three by how many choices an expert has on average."""
    if choices_per_expert >= CHOICES_PER_EXPERT_PREFILL:
        return prefill
    return middle if choices_per_expert >= CHOICES_PER_EXPERT_MIDDLE else decode
