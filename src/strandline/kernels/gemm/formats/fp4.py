"""Numbers of 4 bits (e2m1), of NVFP4 and MXFP4: ``number * scale * factor``, with a factor for each row.

Scales are in e4m3, none of them negative, or exponents. Word ``w`` of four holds inputs ``8 j + 2 w`` of 32 and the
next ones, for ``j`` from 0 to 3 (``CODE_BITS``).
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
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT, FOUR_BIT_LINEAR
from strandline.kernels.gemm.formats.launches import MANY, ExpertLaunches, FormatLaunches, Tiles, few_pair, rows_launch
from strandline.kernels.launch import Launch

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers by the lower three bits of a code; the fourth is the sign."""

CODES_PER_WORD: Final = 8

CODE_BITS: Final = ((6, 7, 8, 15), (10, 11, 12, 19), (0, 1, 2, 9), (4, 5, 14, 13))
"""Bits of a word that hold four of its codes, the lowest bit of a code first. Those of the codes of
the next inputs are 16 further, modulo 32.

Two numbers in bfloat16 have the bits of two codes at 6 to 8 and 15 of both halves. A mask gives the first two codes, a
rotation or shift and a mask the next four, two of each the last two.
"""


def pack_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of a weight, padded with zeros."""
    codes = padded(codes).unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for i, position_8 in enumerate(_bit_positions(codes.device)):
        words |= ((codes >> i & 1).int() << position_8).sum(-1, dtype=torch.int32)
    return words


def unpack_codes(words: Tensor) -> Tensor:
    """Return the uint8 codes of words, with those that pad the last block."""
    codes = torch.zeros((*words.shape, CODES_PER_WORD), dtype=torch.uint8, device=words.device)
    for i, position_8 in enumerate(_bit_positions(words.device)):
        codes |= (words.unsqueeze(-1) >> position_8 & 1).byte() << i
    in_order: Tensor = codes.unflatten(-1, (4, 2)).unflatten(-3, (-1, 4)).transpose(-2, -3)
    return in_order.flatten(-4)


def _numbers(codes: Tensor) -> Tensor:
    return torch.tensor((*E2M1, *(-number for number in E2M1)), device=codes.device)[codes.int()]


def _bit_positions(device: torch.device) -> Tensor:
    """Return where a word has each of the four bits of its eight codes, ``[4, 8]``."""
    even = torch.tensor(CODE_BITS, dtype=torch.int32, device=device).t()
    return torch.stack((even, (even + 16) % 32), dim=2).flatten(1)


FP4_LINEAR: Final = FOUR_BIT_LINEAR._replace(
    rows_one_wide=rows_launch(8, 2048, 2),
    tiles=Tiles(
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), MANY: CODED_MIDDLE},
        {16: Launch(16, 64, BLOCK_INPUTS, 4, 4), 32: CODED_MIDDLE, MANY: CODED_MANY},
        CODED_FLOAT32,
    ),
)
LAUNCHES: Final = FormatLaunches(
    linear=FP4_LINEAR,
    linear_fixed=CODED_FIXED,
    experts=ExpertLaunches(
        decode=(Launch(16, 64, BLOCK_INPUTS, 4, 4), Launch(16, 128, BLOCK_INPUTS, 4, 4)),
        middle=(fp4_middle := (Launch(64, 128, BLOCK_INPUTS, 8, 3), Launch(32, 128, BLOCK_INPUTS, 4, 3))),
        prefill=fp4_middle,
        fixed=(fp4_middle, fp4_middle, fp4_middle),
        float32=FOUR_BIT.launches.experts.float32,
        min_dequantized=160,
    ),
    few_experts=(few_pair((8, 1024, 2), 8, 4), few_pair((8, 1024, 2), 4, 1)),
)

FP4: Final = CodedFormat(
    name="FP4",
    functions="microscaled_triton",
    bits=4,
    pack=pack_codes,
    unpack=unpack_codes,
    numbers=_numbers,
    draw=draw_bits,
    random_std=2.9,
    has_factors=True,
    largest=E2M1[-1],
    launches=LAUNCHES,
)
