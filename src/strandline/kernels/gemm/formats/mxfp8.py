"""Numbers of 8 bits (e4m3) of MXFP8: ``number * scale``, with exponents as scales of 32 inputs.

Word ``w`` of 16 holds inputs ``32 j + 2 w`` of 64, as byte ``j``, and the next ones, as byte ``j + 2``, for ``j`` 0 and
1.
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
    padded,
)
from strandline.kernels.gemm.formats.fp4 import FP4, FP4_LINEAR
from strandline.kernels.gemm.formats.launches import MANY, FormatLaunches, Tiles, few_pair, rows_launch
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise.quantized_rows import MAX_E4M3

RANDOM_STD: Final = 96.0
"""Standard deviation of random numbers; the largest is 448."""

DRAWN_WORDS: Final = 2**22
"""Words that are drawn at a time."""


def pack_bytes(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of a weight, padded with zeros."""
    # Inputs of 64 by j, w, and whether they are odd.
    of_words = padded(codes).unflatten(-1, (-1, 2, 16, 2)).movedim(-3, -1).flatten(-2)
    words: Tensor = of_words.contiguous().view(torch.int32).flatten(-3)
    return words


def unpack_bytes(words: Tensor) -> Tensor:
    """Return the uint8 codes of words, with those that pad the last block."""
    codes: Tensor = words.view(torch.uint8).unflatten(-1, (-1, 16, 2, 2)).movedim(-1, -3).flatten(-4)
    return codes


def _numbers(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _draw(words: Tensor, generator: torch.Generator | None) -> None:
    """Fill words with numbers, none of them NaN."""
    for rows in words.split(max(1, DRAWN_WORDS // words.shape[1])):
        noise = torch.empty(rows.shape[0], 4 * rows.shape[1], dtype=torch.bfloat16, device=rows.device)
        noise.normal_(std=RANDOM_STD, generator=generator).clamp_(-MAX_E4M3, MAX_E4M3)
        rows.copy_(noise.to(torch.float8_e4m3fn).view(torch.int32))


MXFP8_FEW_TOKENS: Final = Launch(16, 128, BLOCK_INPUTS, 4, 3)
MXFP8_TOKENS: Final = (Launch(64, 64, BLOCK_INPUTS, 4, 3), CODED_MIDDLE)

LAUNCHES: Final = FormatLaunches(
    linear=FP4_LINEAR._replace(
        rows_several=rows_launch(4, 1024, 2),
        rows_one_wide=rows_launch(4, 1024, 2),
        rows_several_wide=rows_launch(4, 512, 1),
        tiles=Tiles(
            {16: MXFP8_FEW_TOKENS, MANY: CODED_MIDDLE},
            {16: MXFP8_FEW_TOKENS, 64: CODED_MIDDLE, MANY: CODED_MANY},
            CODED_FLOAT32,
        ),
    ),
    linear_fixed=CODED_FIXED,
    experts=FP4.launches.experts._replace(
        decode=(MXFP8_FEW_TOKENS, MXFP8_FEW_TOKENS),
        several=None,
        middle=MXFP8_TOKENS,
        prefill=MXFP8_TOKENS,
        min_dequantized=192,
    ),
    few_experts=(few_pair((4, 512, 2), 4, 4), few_pair((4, 512, 2), 2, 2)),
)

MXFP8: Final = CodedFormat(
    name="MXFP8",
    functions="microscaled_triton",
    bits=8,
    pack=pack_bytes,
    unpack=unpack_bytes,
    numbers=_numbers,
    draw=_draw,
    random_std=RANDOM_STD,
    largest=MAX_E4M3,
    not_a_number=0x7F,
    launches=LAUNCHES,
)
