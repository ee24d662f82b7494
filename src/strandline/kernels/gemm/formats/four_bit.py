"""Integers of 4 bits, from 0 to 15: ``(code - zero) * scale``.

Int32 number ``w`` of a block holds inputs ``32 j + 2 w`` in bits ``[4 j, 4 j + 4)`` and inputs ``32 j + 2 w + 1`` in
bits ``[4 j + 16, 4 j + 20)``, for ``j`` from 0 to 3: one mask gives two neighbouring inputs as halves of a register, as
tensor cores take them.
"""

from typing import Final

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import (
    BLOCK_INPUTS,
    CODED_FIXED,
    CODED_FLOAT32,
    CODED_MANY,
    CODED_MIDDLE,
    CodedFormat,
    draw_bits,
    padded,
)
from strandline.kernels.gemm.formats.launches import (
    MANY,
    ExpertLaunches,
    FormatLaunches,
    LinearLaunches,
    Tiles,
    few_pair,
    rows_launch,
)
from strandline.kernels.launch import Launch
from strandline.kernels.sizes import NUM_SMS

BLOCK_WORDS: Final = 16
"""Int32 numbers of a block."""

CODES_PER_WORD: Final = 8

GROUPS_FOUR_BIT: Final = (32, 64, 128)
"""Inputs that may share a scale."""

SYMMETRIC_ZERO: Final = 8
"""The zero point of weights that are published without."""

LOWEST_BITS: Final = 0x11111111
"""The lowest bits of the codes of a word."""


def pack_code_pairs(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of a weight, padded with zeros."""
    # Inputs of a block by j // 2, j % 2, w, and whether they are odd; two codes whose j differ by one are a byte.
    low, high = padded(codes).unflatten(-1, (-1, 2, 2, BLOCK_WORDS, 2)).unbind(-3)
    pairs: Tensor = low | high << 4
    return pairs.movedim(-3, -1).flatten(-2).contiguous().view(torch.int32).flatten(-3)


def unpack_code_pairs(words: Tensor) -> Tensor:
    """Return the uint8 codes of words, with those that pad the last block."""
    pairs = words.view(torch.uint8).unflatten(-1, (-1, BLOCK_WORDS, 2, 2)).movedim(-1, -3)
    return torch.stack((pairs & 15, pairs >> 4), dim=-3).flatten(-5)


def _draw(words: Tensor, generator: torch.Generator | None) -> None:
    """Fill words with random codes from 1 to 15.

    The zero point is their mean: with another mean all hidden states soon have one direction, and a router chooses the
    same experts for all tokens.
    """
    draw_bits(words, generator)
    has_bits = words | words >> 1 | words >> 2 | words >> 3
    words |= (~has_bits & LOWEST_BITS) << 3


# From 64 outputs on and with four warps, tensor cores of Hopper GPUs take the weight from registers.
FOUR_BIT_LINEAR: Final = LinearLaunches(
    max_numbers={1: MANY, 2: 1 << 24, 4: 1 << 23},
    rows_one=rows_launch(4, 4096, 4),
    rows_several=rows_launch(4, 2048, 2),
    rows_one_wide=rows_launch(8, 1024, 1),
    # Eight outputs of both are more than a thread has registers for.
    rows_one_wide_gated=rows_launch(2, 1024, 1),
    rows_several_wide=rows_launch(4, 1024, 1),
    tiles=Tiles(
        {16: Launch(16, 64, BLOCK_INPUTS, 2, 4), MANY: CODED_MIDDLE},
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), 32: CODED_MIDDLE, MANY: CODED_MANY},
        CODED_FLOAT32,
    ),
    # Dequantising moves 2.5 bytes for a weight; at 4.3 TB/s and 700 TFLOP/s that takes as long as its products with 200
    # rows. Tiles unpack the weight once for every 64 rows instead.
    max_rows_narrow=64,
    max_rows_wide=256,
    max_block_split=32,
    programs_split=3 * NUM_SMS,
)
LAUNCHES: Final = FormatLaunches(
    linear=FOUR_BIT_LINEAR,
    linear_fixed=CODED_FIXED,
    experts=ExpertLaunches(
        decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 3)),
        middle=(middle := (Launch(64, 64, BLOCK_INPUTS, 4, 3), Launch(16, 128, BLOCK_INPUTS, 4, 3))),
        prefill=(Launch(64, 64, BLOCK_INPUTS, 4, 3, 2), Launch(64, 128, BLOCK_INPUTS, 4, 3)),
        fixed=(middle, middle, middle),
        float32=(Launch(32, 32, BLOCK_INPUTS, 4, 2), Launch(32, 32, BLOCK_INPUTS, 4, 2)),
    ),
    few_experts=(few_pair((8, 2048, 4), 4, 4), few_pair((8, 1024, 2), 4, 1)),
)

FOUR_BIT: Final = CodedFormat(
    name="4 bits",
    functions="four_bit_triton",
    bits=4,
    pack=pack_code_pairs,
    unpack=unpack_code_pairs,
    numbers=torch.Tensor.float,
    draw=_draw,
    random_std=4.2,
    zero=SYMMETRIC_ZERO,
    launches=LAUNCHES,
)
