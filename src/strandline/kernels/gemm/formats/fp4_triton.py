"""Weights in FP4 (e2m1) in kernels: NVFP4 and MXFP4.

Bits of two codes of a word are moved to where two bfloat16 numbers have them (``weights.CODE_BITS``). The lower three
bits of a code are those of a number whose exponent is 126 too small, denormal ones included. The exponent is corrected
by scales (tiles) and inputs (few rows), all by powers of two: every operand is exact.

A plane is two neighbouring inputs of all words of a block: inputs ``8 w + 2 plane`` and the next one. A piece is four
words of a row, 32 inputs, whose scales are one number. In tiles, a row of a tensor core's operand is held by four
threads. Each takes another piece, so that it needs only the scales of that, and x is read in the order of their inputs.

Shape suffixes: as in ``four_bit_triton.py``; W words and P pieces of a block, G words of a piece, H its halves, I the
inputs of a word.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from strandline.kernels.gemm import weights
from strandline.kernels.gemm.formats.four_bit_triton import join_halves
from strandline.kernels.gemm.weights import Fp4Weight

BLOCK_INPUTS = tl.constexpr(weights.BLOCK_INPUTS)
BLOCK_WORDS = tl.constexpr(weights.BLOCK_WORDS)
CODES_PER_WORD = tl.constexpr(weights.CODES_PER_WORD)
PLANES = tl.constexpr(weights.CODES_PER_WORD // 2)

PIECES = tl.constexpr(weights.BLOCK_WORDS // 4)
PIECE_WORDS = tl.constexpr(4)
PIECE_INPUTS = tl.constexpr(4 * weights.CODES_PER_WORD)

PAIR = tl.constexpr(-0x7E3F7E40)
"""Mask of the bits of two codes: signs, lowest two bits of exponents, highest of mantissas."""

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

    has_exponents: bool
    """Whether scales are exponents, one for each piece, else e4m3, two for each."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: Fp4Weight) -> tuple:
    """Return words and how many a row has, the scales of a piece as one number, and factors."""
    has_exponents = weight.scales.dtype == torch.uint8
    scales = weight.scales if has_exponents else weight.scales.view(torch.int16)
    return weight.words, weight.words.shape[-1], scales, weight.factors


def layout(weight: Fp4Weight) -> Fp4Layout:
    return Fp4Layout(weight.scales.dtype == torch.uint8)


@triton.jit
def _power_of_2(EXPONENT: tl.constexpr):
    """Return ``2.0 ** EXPONENT``."""
    return tl.full([], (EXPONENT + 127) << 23, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scales_of_pieces(packed, LAYOUT: tl.constexpr):
    """Return the scales of the first and of the second half of pieces, in float32."""
    if LAYOUT.has_exponents:
        # By way of float32: if integers are extended, the compiler moves tiles through shared memory.
        scale = (packed.to(tl.float32).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        return scale, scale
    else:
        low, high = packed & 0xFF, (packed >> 8) & 0xFF
        scale = low.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return scale, high.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _unpack_pairs(words, PLANE: tl.constexpr):
    """Return a plane as bits of two bfloat16 numbers for each word, ``2 ** -CODE_EXPONENT`` times as large."""
    if PLANE == 0:
        pairs = words & PAIR
    elif PLANE == 1:
        bits = words.to(tl.uint32, bitcast=True)
        pairs = ((bits >> 4) | (bits << 28)).to(tl.int32, bitcast=True) & PAIR
    elif PLANE == 2:
        pairs = (words << 6) & PAIR
    else:
        pairs = ((words << 2) & (PAIR & ~0x01000100)) | ((words >> 6) & 0x01000100)
    return pairs


@triton.jit
def _unpack_words(words):
    """Return numbers in the order of inputs, ``[..., 2, 2, 2]``, ``2 ** -CODE_EXPONENT`` times as large, in float32."""
    first, second = _unpack_pairs(words, 0), _unpack_pairs(words, 1)
    third, fourth = _unpack_pairs(words, 2), _unpack_pairs(words, 3)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.join(pairs << 16, pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_plane(words_NW, scale_NK, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of a plane times their scales, ``2 ** -CODE_EXPONENT`` times as large."""
    code_NK = join_halves(_unpack_pairs(words_NW, PLANE), tl.bfloat16)
    # The compiler multiplies two numbers at a time if a sum follows.
    return (code_NK * scale_NK + 0.0).to(DTYPE)


@triton.jit
def _deal_words(words_NW):
    """Return the words of blocks as tiles take them: the first one of every piece, then the second ones."""
    words_NPG = tl.reshape(words_NW, [words_NW.shape[0], PIECES, PIECE_WORDS])
    return tl.reshape(tl.permute(words_NPG, [0, 2, 1]), words_NW.shape)


@triton.jit
def _deal_scales(packed_NP, LAYOUT: tl.constexpr):
    """Return the scales of the inputs of a plane, ``[N, K]``, whose words are in the order of ``_deal_words``."""
    N: tl.constexpr = packed_NP.shape[0]
    power = _power_of_2(SCALE_EXPONENT)
    first_NP, second_NP = _scales_of_pieces(packed_NP, LAYOUT)
    scale_NPH = tl.join((first_NP * power).to(tl.bfloat16), (second_NP * power).to(tl.bfloat16))
    scale_NHP = tl.permute(scale_NPH, [0, 2, 1])
    # Broadcast, not joined: else the compiler moves tiles through shared memory.
    scales = tl.broadcast_to(scale_NHP[:, :, None, :, None], [N, 2, PIECE_WORDS // 2, PIECES, 2])
    return tl.reshape(scales, [N, 2 * BLOCK_WORDS])


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
    read_N = tl.cast(matrix, tl.int64) * (NUM_PARTS * N) + tl.minimum(col_N, N - 1)
    up_N = read_N + N
    word_W = tl.arange(0, BLOCK_WORDS)
    piece_P = tl.arange(0, PIECES)
    # The inputs of the first plane, whose words are in the order of ``_deal_words``.
    input_K = tl.arange(0, 2 * BLOCK_WORDS)
    input_K = input_K // 2 % PIECES * PIECE_INPUTS + input_K // (2 * PIECES) * CODES_PER_WORD + input_K % 2
    x_KM_ptr = x_ptr + (read_M.to(tl.int64) * stride_x)[None, :] + input_K[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    num_pieces = num_words // PIECE_WORDS
    scales_NP_ptr = scale_ptr + (read_N * num_pieces)[:, None] + piece_P[None, :]
    up_scales_NP_ptr = scale_ptr + (up_N * num_pieces)[:, None] + piece_P[None, :]
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(first, end):
        words_NW = _deal_words(tl.load(words_NW_ptr + block * BLOCK_WORDS))
        scale_NK = _deal_scales(tl.load(scales_NP_ptr + block * PIECES), LAYOUT)
        if IS_GATED:
            up_NW = _deal_words(tl.load(up_NW_ptr + block * BLOCK_WORDS))
            up_scale_NK = _deal_scales(tl.load(up_scales_NP_ptr + block * PIECES), LAYOUT)
        for plane in tl.static_range(PLANES):
            start = block * BLOCK_INPUTS + 2 * plane
            if IS_EVEN:
                x_KM = tl.load(x_KM_ptr + start)
            else:
                x_KM = tl.load(x_KM_ptr + start, mask=(start + input_K < K)[:, None], other=0.0)
            code_NK = _unpack_plane(words_NW, scale_NK, plane, DTYPE)
            acc_NM = tl.dot(code_NK, x_KM, acc_NM, input_precision="ieee")
            if IS_GATED:
                up_code_NK = _unpack_plane(up_NW, up_scale_NK, plane, DTYPE)
                acc_up_NM = tl.dot(up_code_NK, x_KM, acc_up_NM, input_precision="ieee")
    missing = _power_of_2(CODE_EXPONENT - SCALE_EXPONENT)
    acc_NM *= (tl.load(factor_ptr + read_N) * missing)[:, None]
    if IS_GATED:
        acc_up_NM *= (tl.load(factor_ptr + up_N) * missing)[:, None]
    return tl.trans(acc_NM), tl.trans(acc_up_NM)


@triton.jit
def dequantize(weight, read_N, block, LAYOUT: tl.constexpr):
    """Return as ``operand_triton.py`` says the numbers of a block."""
    weight_ptr, num_words, scale_ptr, factor_ptr = weight
    N: tl.constexpr = read_N.shape[0]
    word_W = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    piece_P = block * PIECES + tl.arange(0, PIECES)
    words_NW = tl.load(weight_ptr + (read_N * num_words)[:, None] + word_W[None, :])
    packed_NP = tl.load(scale_ptr + (read_N * (num_words // PIECE_WORDS))[:, None] + piece_P[None, :])
    scale_NPH = tl.join(*_scales_of_pieces(packed_NP, LAYOUT))
    scale_NW = tl.reshape(tl.join(scale_NPH, scale_NPH), [N, BLOCK_WORDS])
    number_NWI = tl.reshape(_unpack_words(words_NW), [N, BLOCK_WORDS, CODES_PER_WORD]) * _power_of_2(CODE_EXPONENT)
    number_NWI *= (scale_NW * tl.load(factor_ptr + read_N)[:, None])[:, :, None]
    return tl.reshape(number_NWI, [N, BLOCK_INPUTS])


@triton.jit
def _load_pieces(weight, row_CN, is_1N, start, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, G]``, and their scales, ``[J, C, N]``."""
    weight_ptr, num_words, scale_ptr, _ = weight
    num_pieces = num_words // PIECE_WORDS
    piece_J = start // PIECE_INPUTS + tl.arange(0, BLOCK_K // PIECE_INPUTS)
    word_JG = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNG = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JG[:, None, None, :]
    scale_JCN_ptr = scale_ptr + (row_CN * num_pieces)[None, :, :] + piece_J[:, None, None]
    if IS_EVEN:
        words_JCNG = tl.load(ptr_JCNG, eviction_policy="evict_first")
        scales_JCN = tl.load(scale_JCN_ptr)
    else:
        is_JCN = is_1N[None, :, :] & (piece_J < num_pieces)[:, None, None]
        words_JCNG = tl.load(ptr_JCNG, mask=is_JCN[:, :, :, None], other=0, eviction_policy="evict_first")
        scales_JCN = tl.load(scale_JCN_ptr, mask=is_JCN, other=0)
    return words_JCNG, scales_JCN


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
    """Load as ``operand_triton.py`` says: words of pieces and their scales."""
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    row_N = first_N + tl.arange(0, BLOCK_N)
    is_1N = (row_N < N)[None, :]
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    words_JCNG, scales_JCN = _load_pieces(weight, row_CN, is_1N, start, IS_EVEN, BLOCK_K)
    up_JCNG, up_scales_JCN = words_JCNG, scales_JCN
    if IS_GATED:
        up_JCNG, up_scales_JCN = _load_pieces(weight, row_CN + N, is_1N, start, IS_EVEN, BLOCK_K)
    return words_JCNG, scales_JCN, up_JCNG, up_scales_JCN


@triton.jit
def _split_words(words_JCNG):
    """Return the four words of pieces, ``[J, C, N]`` each."""
    J: tl.constexpr = words_JCNG.shape[0]
    even, odd = tl.split(tl.reshape(words_JCNG, [J, words_JCNG.shape[1], words_JCNG.shape[2], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _multiply_words(words_JCN, x_JMI):
    """Return the sums of a word's products with inputs, ``[J, M, N]``, ``2 ** -CODE_EXPONENT`` times as large."""
    J: tl.constexpr = words_JCN.shape[0]
    shape: tl.constexpr = [J, words_JCN.shape[1], words_JCN.shape[2], CODES_PER_WORD]
    return tl.sum(tl.reshape(_unpack_words(words_JCN), shape) * x_JMI[:, :, None, :], axis=3)


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
    words_JCNG, scales_JCN, up_JCNG, up_scales_JCN = loaded
    x_ptr, _, stride_x, _ = x
    _, _, _, factor_ptr = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    J: tl.constexpr = BLOCK_K // PIECE_INPUTS
    M: tl.constexpr = row_M.shape[0]
    row_N = first_N + tl.arange(0, BLOCK_N)
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    is_CN = (row_N < N)[None, :] & (row_CN >= 0)
    piece_J = start // PIECE_INPUTS + tl.arange(0, J)
    col_JI = (piece_J * PIECE_INPUTS)[:, None] + tl.arange(0, CODES_PER_WORD)[None, :]
    x_JMI_ptr = x_ptr + (row_M.to(tl.int64) * stride_x)[None, :, None] + col_JI[:, None, :]
    power = _power_of_2(INPUT_EXPONENT)
    words, up_words = _split_words(words_JCNG), _split_words(up_JCNG)
    scales, up_scales = _scales_of_pieces(scales_JCN, LAYOUT), _scales_of_pieces(up_scales_JCN, LAYOUT)
    out_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    for word in tl.static_range(PIECE_WORDS):
        is_JMI = is_row_M[None, :, None]
        if not IS_EVEN:
            is_JMI = is_JMI & (col_JI + word * CODES_PER_WORD < K)[:, None, :]
        x_JMI = tl.load(x_JMI_ptr + word * CODES_PER_WORD, mask=is_JMI, other=0.0).to(tl.float32) * power
        out_JMN += _multiply_words(words[word], x_JMI) * scales[word // 2]
        if IS_GATED:
            out_up_JMN += _multiply_words(up_words[word], x_JMI) * up_scales[word // 2]
    missing = _power_of_2(CODE_EXPONENT - INPUT_EXPONENT)
    out_JMN *= (tl.load(factor_ptr + row_CN, mask=is_CN, other=0.0) * missing)[None, :, :]
    if IS_GATED:
        out_up_JMN *= (tl.load(factor_ptr + row_CN + N, mask=is_CN, other=0.0) * missing)[None, :, :]
    return out_JMN, out_up_JMN


@triton.jit
def add_rows(sums_JMN):
    """Return the sums of pieces' sums, ``[M, N]``."""
    return tl.sum(sums_JMN, axis=0)
