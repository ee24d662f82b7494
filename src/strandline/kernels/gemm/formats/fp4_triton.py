"""Weights in FP4 (e2m1) in kernels: NVFP4 and MXFP4.

Bits ``[4 j, 4 j + 4)`` of a block's sixteen numbers are the codes of sixteen neighbouring inputs, a plane: as many as
share a scale in NVFP4. The three lower bits of a code are those of a bfloat16 or float32 number whose exponent is 126
too small, denormal ones included: shifting them there, and the sign, converts them. The exponent is corrected by scales
(tiles) and inputs (few rows), all by powers of two: every operand is exact.

Shape suffixes: as in ``four_bit_triton.py``.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from strandline.kernels.gemm import weights
from strandline.kernels.gemm.weights import Fp4Weight

BLOCK_INPUTS = tl.constexpr(weights.BLOCK_INPUTS)
BLOCK_WORDS = tl.constexpr(weights.BLOCK_WORDS)
PLANES = tl.constexpr(weights.CODES_PER_WORD)
PLANE_INPUTS = BLOCK_WORDS

PIECE_WORDS = tl.constexpr(4)
PIECE_INPUTS = tl.constexpr(4 * weights.CODES_PER_WORD)

CODE_EXPONENT = tl.constexpr(126)
"""Codes, as bits of a number, stand for ``2 ** -126`` times their number."""

SCALE_EXPONENT = tl.constexpr(118)
"""In tiles, scales are multiplied with this power of two, and results with what is missing. Scales of up to 512 are
numbers in bfloat16 then, and products of numbers and scales from 1 / 65,536 on are exact in float16, too."""

INPUT_EXPONENT = tl.constexpr(96)
"""For few rows, inputs are multiplied with this power of two, and results with what is missing: products are not
denormal then, and inputs of up to ``2 ** 31`` are numbers."""


class Fp4Layout(NamedTuple):
    """What is compiled in of a weight in FP4."""

    group: int
    """Inputs that share a scale."""
    has_exponents: bool
    """Whether scales are exponents, else e4m3."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: Fp4Weight) -> tuple:
    """Return words and how many a row has, the scales of a block as one number, and factors."""
    packed = weight.scales.view(torch.int64 if weight.group == BLOCK_WORDS.value else torch.int32)
    return weight.words, weight.words.shape[-1], packed, weight.factors


def layout(weight: Fp4Weight) -> Fp4Layout:
    return Fp4Layout(weight.group, weight.scales.dtype == torch.uint8)


@triton.jit
def _power_of_2(EXPONENT: tl.constexpr):
    """Return ``2.0 ** EXPONENT``."""
    return tl.full([], (EXPONENT + 127) << 23, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scales_of_plane(packed, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return, of the scales of whole blocks, that of a plane, in float32."""
    SHIFT: tl.constexpr = 8 * (PLANE * BLOCK_WORDS // LAYOUT.group)
    byte = ((packed >> SHIFT) & 0xFF).to(tl.int32)
    if LAYOUT.has_exponents:
        scale = (byte << 23).to(tl.float32, bitcast=True)
    else:
        scale = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def _unpack_plane(words_NW, scale_N, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of a plane times scales in bfloat16, ``2 ** -CODE_EXPONENT`` times as large."""
    pair_NW = words_NW >> (4 * (PLANE % 4))
    pair_NW = ((pair_NW & 0x00080008) << 12) | ((pair_NW & 0x00070007) << 6)
    if PLANE >= 4:
        pair_NW = pair_NW >> 16
    code_NW = pair_NW.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (code_NW * scale_N[:, None]).to(DTYPE)


@triton.jit
def _numbers_of_plane(words, PLANE: tl.constexpr):
    """Return the numbers of a plane in float32, ``2 ** -CODE_EXPONENT`` times as large."""
    # The shift to the right copies the sign into the upper bits of the exponent, which the mask clears.
    return (((words << (28 - 4 * PLANE)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@triton.jit
def tile(
    x,
    weight,
    matrix,
    read_M,
    is_row_M,
    col_N,
    first,
    end,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says; ``BLOCK_K`` is a block."""
    x_ptr, _, stride_x, _ = x
    weight_ptr, num_words, scale_ptr, factor_ptr = weight
    tl.static_assert(BLOCK_K == BLOCK_INPUTS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    num_blocks = num_words // BLOCK_WORDS
    read_N = tl.cast(matrix, tl.int64) * (NUM_PARTS * N) + tl.minimum(col_N, N - 1)
    up_N = read_N + N
    word_W = tl.arange(0, BLOCK_WORDS)
    x_WM_ptr = x_ptr + (read_M.to(tl.int64) * stride_x)[None, :] + word_W[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    power = _power_of_2(SCALE_EXPONENT)
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(first, end):
        words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
        scales_N = tl.load(scale_ptr + read_N * num_blocks + block)
        if IS_GATED:
            up_NW = tl.load(up_NW_ptr + block * BLOCK_WORDS)
            up_scales_N = tl.load(scale_ptr + up_N * num_blocks + block)
        for plane in tl.static_range(PLANES):
            start = block * BLOCK_INPUTS + plane * BLOCK_WORDS
            if IS_EVEN:
                x_WM = tl.load(x_WM_ptr + start)
            else:
                x_WM = tl.load(x_WM_ptr + start, mask=(start + word_W < K)[:, None], other=0.0)
            scale_N = (_scales_of_plane(scales_N, plane, LAYOUT) * power).to(tl.bfloat16)
            acc_NM = tl.dot(_unpack_plane(words_NW, scale_N, plane, DTYPE), x_WM, acc_NM, input_precision="ieee")
            if IS_GATED:
                up_scale_N = (_scales_of_plane(up_scales_N, plane, LAYOUT) * power).to(tl.bfloat16)
                up_code_NW = _unpack_plane(up_NW, up_scale_N, plane, DTYPE)
                acc_up_NM = tl.dot(up_code_NW, x_WM, acc_up_NM, input_precision="ieee")
    missing = _power_of_2(CODE_EXPONENT - SCALE_EXPONENT)
    acc_NM *= (tl.load(factor_ptr + read_N) * missing)[:, None]
    if IS_GATED:
        acc_up_NM *= (tl.load(factor_ptr + up_N) * missing)[:, None]
    return tl.trans(acc_NM), tl.trans(acc_up_NM)


@triton.jit
def load_scaling(weight, read_N, block, GROUP_INDEX: tl.constexpr, LAYOUT: tl.constexpr):
    """Load as ``operand_triton.py`` says: scales of rows, times their factors."""
    _, num_words, scale_ptr, factor_ptr = weight
    packed_N = tl.load(scale_ptr + read_N * (num_words // BLOCK_WORDS) + block)
    scale_N = _scales_of_plane(packed_N, GROUP_INDEX * LAYOUT.group // BLOCK_WORDS, LAYOUT)
    return (scale_N * tl.load(factor_ptr + read_N),)


@triton.jit
def dequantize_plane(words_NW, scaling, PLANE: tl.constexpr):
    """Return as ``operand_triton.py`` says the numbers of a plane."""
    number_NW = _numbers_of_plane(words_NW, PLANE) * _power_of_2(CODE_EXPONENT)
    return number_NW * scaling[0][:, None]


@triton.jit
def _load_pieces(weight, row_CN, is_1N, start, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, W]``, and the scales of their blocks, ``[J, C, N]``."""
    weight_ptr, num_words, scale_ptr, _ = weight
    piece_J = start // PIECE_INPUTS + tl.arange(0, BLOCK_K // PIECE_INPUTS)
    word_JW = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNW = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JW[:, None, None, :]
    num_blocks = num_words // BLOCK_WORDS
    block_J = piece_J // 4
    scale_JCN_ptr = scale_ptr + (row_CN * num_blocks)[None, :, :] + block_J[:, None, None]
    if IS_EVEN:
        words_JCNW = tl.load(ptr_JCNW, eviction_policy="evict_first")
        scales_JCN = tl.load(scale_JCN_ptr)
    else:
        is_JCN = is_1N[None, :, :] & (block_J < num_blocks)[:, None, None]
        words_JCNW = tl.load(ptr_JCNW, mask=is_JCN[:, :, :, None], other=0, eviction_policy="evict_first")
        scales_JCN = tl.load(scale_JCN_ptr, mask=is_JCN, other=0)
    return words_JCNW, scales_JCN


@triton.jit
def load_rows(
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Load as ``operand_triton.py`` says: words of pieces and the scales of their blocks."""
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    row_N = first_N + tl.arange(0, BLOCK_N)
    is_1N = (row_N < N)[None, :]
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    words_JCNW, scales_JCN = _load_pieces(weight, row_CN, is_1N, start, IS_EVEN, BLOCK_K)
    up_JCNW, up_scales_JCN = words_JCNW, scales_JCN
    if IS_GATED:
        up_JCNW, up_scales_JCN = _load_pieces(weight, row_CN + N, is_1N, start, IS_EVEN, BLOCK_K)
    return words_JCNW, scales_JCN, up_JCNW, up_scales_JCN


@triton.jit
def _multiply_plane(words_JCNW, scales_JCN, x_JMW, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the products of a plane's numbers with inputs, times its scales, ``[J, M, N]``."""
    number_JCNW = _numbers_of_plane(words_JCNW, PLANE)
    return tl.sum(number_JCNW * x_JMW[:, :, None, :], axis=3) * _scales_of_plane(scales_JCN, PLANE, LAYOUT)


@triton.jit
def multiply_rows(
    loaded,
    x,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says: sums of pieces, ``[J, M, N]``."""
    words_JCNW, scales_JCN, up_JCNW, up_scales_JCN = loaded
    x_ptr, _, stride_x, _ = x
    _, _, _, factor_ptr = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    J: tl.constexpr = BLOCK_K // PIECE_INPUTS
    M: tl.constexpr = row_M.shape[0]
    row_N = first_N + tl.arange(0, BLOCK_N)
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    is_CN = (row_N < N)[None, :] & (row_CN >= 0)
    piece_J = start // PIECE_INPUTS + tl.arange(0, J)
    col_J = piece_J // 4 * BLOCK_INPUTS + piece_J % 4 * PIECE_WORDS
    col_JW = col_J[:, None] + tl.arange(0, PIECE_WORDS)[None, :]
    x_JMW_ptr = x_ptr + (row_M.to(tl.int64) * stride_x)[None, :, None] + col_JW[:, None, :]
    power = _power_of_2(INPUT_EXPONENT)
    out_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    for plane in tl.static_range(PLANES):
        is_JMW = is_row_M[None, :, None]
        if not IS_EVEN:
            is_JMW = is_JMW & (col_JW + plane * BLOCK_WORDS < K)[:, None, :]
        x_JMW = tl.load(x_JMW_ptr + plane * BLOCK_WORDS, mask=is_JMW, other=0.0).to(tl.float32) * power
        out_JMN += _multiply_plane(words_JCNW, scales_JCN, x_JMW, plane, LAYOUT)
        if IS_GATED:
            out_up_JMN += _multiply_plane(up_JCNW, up_scales_JCN, x_JMW, plane, LAYOUT)
    missing = _power_of_2(CODE_EXPONENT - INPUT_EXPONENT)
    out_JMN *= (tl.load(factor_ptr + row_CN, mask=is_CN, other=0.0) * missing)[None, :, :]
    if IS_GATED:
        out_up_JMN *= (tl.load(factor_ptr + row_CN + N, mask=is_CN, other=0.0) * missing)[None, :, :]
    return out_JMN, out_up_JMN


@triton.jit
def add_rows(sums_JMN):
    """Return the sums of pieces' sums, ``[M, N]``."""
    return tl.sum(sums_JMN, axis=0)
