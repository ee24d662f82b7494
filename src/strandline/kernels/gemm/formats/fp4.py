"""Numbers of 4 bits (e2m1), of NVFP4 and MXFP4: ``number * scale * factor``, with a factor for each row.

Word ``w`` of a block holds inputs ``32 j + 2 w`` and the next ones, for ``j`` from 0 to 3 (``PAIR_BITS``).
Published scales are in e4m3, none of them negative, or exponents. Weights hold the former as bits of bfloat16 numbers
(``SCALE_BITS``), the eight of a block in one int64 number. Those of neighbouring rows lie side by side: a program reads
some bytes of many rows.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.formats.coded import (
    BLOCK_INPUTS,
    CODED_FIXED,
    CODED_FLOAT32,
    CODED_MANY,
    CODED_MIDDLE,
    PACKED_SCALES,
    CodedFormat,
    draw_bits,
    padded,
    scale_numbers,
)
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT, FOUR_BIT_LINEAR
from strandline.kernels.gemm.formats.launches import MANY, ExpertLaunches, FormatLaunches, Tiles, few_pair, rows_launch
from strandline.kernels.launch import Launch

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers by the lower three bits of a code; the fourth is the sign."""

PAIR_BITS: Final = -0x7E3F7E40
"""Bits of two bfloat16 numbers that hold two codes: signs, lowest two bits of exponents, highest of mantissas.

The first two codes of a word are where a mask gives them; the next four follow a rotation or shift. The last two are
where the exclusive or of two shifts has them, one operation less than to mask both: other bits of that are known, and
undone in advance (``_code_pairs``).
"""

SCALE_EXPONENT: Final = 118
"""Scales of NVFP4 have the bits of bfloat16 numbers that are this power of two times as large."""

SCALE_BITS: Final = 0x7000
"""Bits of such numbers that all of them have; the next eight are stored, in a byte."""

GROUP_ORDER: Final = (0, 2, 1, 3, 4, 6, 5, 7)
"""Groups of a block in the order of their scales: one mask gives the two of 32 inputs as halves of a register."""

E4M3_GROUP: Final = 16
"""Inputs that share a scale in NVFP4."""


def pack_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes ``[..., O, I]`` as the int32 ``words`` of a weight, padded with zeros."""
    # Of a block, planes and words.
    code_PW2 = padded(codes).unflatten(-1, (-1, 4, 16, 2)).int()
    bits_PW2 = (code_PW2 & 7) << 6 | (code_PW2 & 8) << 12
    first, second, third, fourth = (bits_PW2[..., 0] | bits_PW2[..., 1] << 16).unbind(-2)
    words = first | second << 4 | _shifted_right(second, 28) | _shifted_right(third, 6)
    fourth = fourth ^ _code_pairs(words)[3]
    # Bits that one of the shifts moves to a sign, the other one moves to the sign of the byte before.
    chain = fourth & -0x7F7F7F80
    chain ^= _shifted_right(chain, 8)
    chain ^= _shifted_right(chain, 16)
    words |= _shifted_right(chain, 2) | (fourth & 0x00400040) >> 2 | (fourth & 0x01000100) << 6
    packed: Tensor = words.flatten(-2)
    return packed


def unpack_codes(words: Tensor) -> Tensor:
    """Return the uint8 codes of words, with those that pad the last block."""
    pairs_PW = torch.stack(_code_pairs(words.unflatten(-1, (-1, 16))), dim=-2)
    bits_PW2 = torch.stack((pairs_PW, pairs_PW >> 16), dim=-1)
    return (bits_PW2 >> 6 & 7 | bits_PW2 >> 12 & 8).byte().flatten(-4)


def _code_pairs(words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of words, four times two in the bits of two numbers."""
    rotated = _shifted_right(words, 4) | words << 28
    shifted = (words, rotated, words << 6, words << 2 ^ _shifted_right(words, 6))
    first, second, third, fourth = (pairs & PAIR_BITS for pairs in shifted)
    return first, second, third, fourth


def _shifted_right(words: Tensor, by: int) -> Tensor:
    """Shift int32 words as if they were unsigned."""
    return words >> by & (1 << 32 - by) - 1


def store(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return words, and scales in e4m3 as ``PACKED_SCALES`` of all blocks; exponents stay as they are.

    No bits of scales stand for 0: the codes of a group with such a scale become zeros.
    """
    if scales.dtype == torch.uint8:
        return pack_codes(codes), scales
    numbers = scales.float()
    is_scaled = (numbers > 0).repeat_interleave(E4M3_GROUP, -1)[..., : codes.shape[-1]]
    numbers = F.pad(numbers, (0, -numbers.shape[-1] % (BLOCK_INPUTS // E4M3_GROUP)))
    bits = (numbers * 2.0**SCALE_EXPONENT).bfloat16().view(torch.int16)
    return pack_codes(codes * is_scaled), _in_order((bits >> 4).byte()).contiguous().view(PACKED_SCALES)


def stored_scale_numbers(scales: Tensor) -> Tensor:
    """Return what scales of a weight stand for, in float32."""
    if scales.dtype == torch.uint8:
        return scale_numbers(scales)
    in_rows = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    bits = _in_order(in_rows).to(torch.int16) << 4 | SCALE_BITS
    return bits.view(torch.bfloat16).float() * 2.0**-SCALE_EXPONENT


def _in_order(scales: Tensor) -> Tensor:
    """Put scales into the order in which they are stored, or back."""
    in_order: Tensor = scales.unflatten(-1, (-1, len(GROUP_ORDER)))[..., GROUP_ORDER].flatten(-2)
    return in_order


def _numbers(codes: Tensor) -> Tensor:
    return torch.tensor((*E2M1, *(-number for number in E2M1)), device=codes.device)[codes.int()]


FP4_LINEAR: Final = FOUR_BIT_LINEAR._replace(
    rows_one_wide=rows_launch(8, 2048, 2),
    rows_one_wide_gated=None,  # two warps have registers for eight outputs of both
    tiles=Tiles(
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), MANY: CODED_MIDDLE},
        {16: Launch(16, 128, BLOCK_INPUTS, 4, 3), 32: CODED_MIDDLE, MANY: CODED_MANY},
        CODED_FLOAT32,
    ),
)
LAUNCHES: Final = FormatLaunches(
    linear=FP4_LINEAR,
    linear_fixed=CODED_FIXED,
    experts=ExpertLaunches(
        # Tiles of eight rows are the smallest that tensor cores take.
        decode=(Launch(8, 64, BLOCK_INPUTS, 4, 3), Launch(8, 128, BLOCK_INPUTS, 4, 3)),
        several=(Launch(16, 64, BLOCK_INPUTS, 4, 3), Launch(16, 128, BLOCK_INPUTS, 4, 4)),
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
    store=store,
    scale_numbers=stored_scale_numbers,
    numbers=_numbers,
    draw=draw_bits,
    random_std=2.9,
    has_factors=True,
    largest=E2M1[-1],
    launches=LAUNCHES,
)
