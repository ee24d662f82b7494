"""Formats whose weights are codes of a few bits, with scales of groups of inputs.

A row of a weight consists of blocks of ``BLOCK_INPUTS`` inputs, the last one padded. Each format orders the codes of a
block as its device functions unpack them fast. Activations are not quantised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.formats.format import Format
from strandline.kernels.gemm.formats.launches import MANY, Tiles
from strandline.kernels.launch import Launch

BLOCK_INPUTS: Final = 128
"""Inputs whose codes lie together. Rows are padded to a multiple."""

PACKED_SCALES: Final = torch.int64
"""Dtype of packed scales (NVFP4): a number holds the scales of a block. Those of consecutive rows are contiguous."""

E8M0_BIAS: Final = 127
"""A byte ``s`` is the scale ``2 ** (s - 127)``."""


def scale_numbers(scales: Tensor) -> Tensor:
    """Return published scales in float32; bytes are exponents (``E8M0_BIAS``)."""
    if scales.dtype != torch.uint8:
        return scales.float()
    return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - E8M0_BIAS)


@dataclass(kw_only=True, slots=True, eq=False)
class CodedFormat(Format):
    """A format of codes: ``(number - zero) * scale * factor``."""

    bits: int
    """Size of a code."""
    pack: Callable[[Tensor], Tensor]
    """Returns uint8 codes ``[..., O, I]`` as int32 words ``[..., O, W]``, padded with zeros."""
    unpack: Callable[[Tensor], Tensor]
    """Returns the codes of words, with those that pad the last block."""
    numbers: Callable[[Tensor], Tensor]
    """Returns the float32 numbers that codes stand for."""
    store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Returns codes and scales ``[..., X]`` as weights hold them; None: packed codes, and scales as published."""
    scale_numbers: Callable[[Tensor], Tensor] = scale_numbers
    """Returns what scales of a weight stand for, in float32."""
    draw: Callable[[Tensor, torch.Generator | None], None]
    """Fills words, ``[R, W]``, with random codes."""
    random_std: float
    """Standard deviation of such numbers, less ``zero``."""
    zero: int = 0
    """Zero point of weights without zero points of their own."""
    has_factors: bool = False
    """Whether every row has a factor."""
    largest: float | None = None
    """Largest number; None: it is not limited."""
    not_a_number: int | None = None
    """The code, without its sign, that stands for no number."""


def draw_bits(words: Tensor, generator: torch.Generator | None) -> None:
    """Fill words with random bits."""
    words.random_(-(2**31), 2**31, generator=generator)


def padded(codes: Tensor) -> Tensor:
    """Return codes with zeros up to the end of the last block."""
    return F.pad(codes, (0, -codes.shape[-1] % BLOCK_INPUTS))


CODED_MANY: Final = Launch(64, 128, BLOCK_INPUTS, 8, 3)
CODED_MIDDLE: Final = Launch(32, 128, BLOCK_INPUTS, 4, 3)
CODED_FLOAT32: Final = Launch(32, 64, BLOCK_INPUTS, 4, 2)
CODED_FIXED: Final = Tiles({MANY: CODED_MANY}, {MANY: CODED_MANY}, CODED_FLOAT32)
"""Launches of all formats with codes."""
