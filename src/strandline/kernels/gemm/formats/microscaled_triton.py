"""Weights in microscaling formats in kernels: numbers in e2m1 (NVFP4, MXFP4) or e4m3 (MXFP8).

Bits of two codes of a word are moved to where two bfloat16 numbers have them (``fp4.PAIR_BITS``). All bits of a
code but the sign are those of a number whose exponent is too small, denormal ones included (``CODE_EXPONENTS``). The
exponent is corrected by scales (tiles) and inputs (few rows), all by powers of two: every operand is exact.

A span is 16 words: a block of 128 inputs of 4 bits, or half a block of 8 bits. A plane is a run of 32 neighbouring
inputs of all spans, two of every word: words and halves of a plane are in the order of its inputs. A run has two scales
in NVFP4, else one. One number holds the scales of a block. A piece is four words of a row.

Shape suffixes: as in ``four_bit_triton.py``; S scales of a plane, R inputs of a scale, I inputs of a piece in a plane.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gemm.formats import coded, fp4
from strandline.kernels.gemm.formats.four_bit_triton import join_halves
from strandline.kernels.gemm.formats.launches import MANY
from strandline.kernels.gemm.formats.operand_triton import DeviceFunctions, RowFunctions
from strandline.kernels.gemm.weights import CodedWeight

BLOCK_INPUTS = tl.constexpr(coded.BLOCK_INPUTS)

PLANE_INPUTS = tl.constexpr(8)
"""Inputs of a piece in a plane."""

PIECE_WORDS = tl.constexpr(4)

PAIR = tl.constexpr(fp4.PAIR_BITS)

SIGNS = tl.constexpr(-0x7FFF8000)
MAGNITUDES = tl.constexpr(0x07F007F0)
"""Masks of the bits of two codes of 8 bits: signs; lowest four bits of exponents, and highest three of mantissas."""

CODE_EXPONENTS = {4: 126, 8: 120}
"""Codes of this many bits, as bits of a number, stand for ``2 ** -126`` or ``2 ** -120`` times their number."""

RUN = tl.constexpr(32)
"""Inputs of a run."""

SPAN_WORDS = tl.constexpr(16)
"""Words of a span."""

SCALE_EXPONENT = tl.constexpr(fp4.SCALE_EXPONENT)
"""In tiles, scales are this power of two times as large, and results are multiplied with what is missing. Scales of up
to 512 are numbers in bfloat16 then, and products of numbers and scales from 1 / 65,536 on are exact in float16, too."""

HIGH_BITS = fp4.SCALE_BITS << 16 | fp4.SCALE_BITS
"""Bits that all scales of NVFP4 have in bfloat16, for two of them. As an argument of kernels, not a constant: the
compiler then sets and masks bits at once."""

SCALE_BIAS = tl.constexpr((fp4.SCALE_BITS << 16) - (fp4.SCALE_EXPONENT << 23))
"""Is added to the bits of a scale of NVFP4 in float32."""

INPUT_EXPONENT = tl.constexpr(96)
"""For few rows, inputs are multiplied with this power of two, and results with what is missing: products are not
denormal then, and inputs of up to ``2 ** 31`` are numbers."""


class MicroscaledLayout(NamedTuple):
    """What is compiled in of a weight."""

    codes: int
    """Codes of a word."""
    code_exponent: int
    """``CODE_EXPONENTS`` of these."""
    has_exponents: bool
    """Whether scales are exponents, else as of NVFP4."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: CodedWeight, extra: CodedWeight | None = None) -> tuple:
    """Return words and how many a row has, scales of blocks and their strides of rows and of blocks, factors, if there
    are any, and ``HIGH_BITS``.

    Args:
        extra: one more matrix, for tiles alone, whose number comes after the others'. Its words, scales and their
            stride of blocks, its factors and this number are further arguments.
    """
    scales, more = _block_scales(weight), (None, None, 0, None, 0)
    if extra is not None:
        extra_scales = _block_scales(extra)
        more = (extra.words, extra_scales, extra_scales.stride(-1), extra.factors, len(weight.words))
    return weight.words, weight.words.shape[-1], scales, *scales.stride()[-2:], weight.factors, HIGH_BITS, *more


def _block_scales(weight: CodedWeight) -> Tensor:
    """Return scales as one number per block."""
    return weight.scales if weight.scales.dtype == coded.PACKED_SCALES else weight.scales.view(torch.int32)


def can_extend(weight: CodedWeight, extra: object) -> bool:
    """Return whether a matrix is as each of several, so that it can be one more of them."""
    return (
        isinstance(extra, CodedWeight)
        and extra.format is weight.format
        and extra.shape == weight.shape[1:]
        and extra.scales.dtype == weight.scales.dtype
        and _block_scales(extra).stride(-2) == _block_scales(weight).stride(-2)
        and (extra.factors is None) == (weight.factors is None)
    )


def layout(weight: CodedWeight) -> MicroscaledLayout:
    bits = weight.format.bits
    return MicroscaledLayout(32 // bits, CODE_EXPONENTS[bits], weight.scales.dtype != coded.PACKED_SCALES)


@triton.jit
def _power_of_2(EXPONENT: tl.constexpr):
    """Return ``2.0 ** EXPONENT``."""
    return tl.full([], (EXPONENT + 127) << 23, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scale_number(packed, BYTE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the scale in a byte of a number, in float32."""
    byte = (packed >> (8 * BYTE)).to(tl.int32) & 0xFF
    bits = (byte << 23) if LAYOUT.has_exponents else ((byte << 20) + SCALE_BIAS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _unpack_pairs(words, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return a plane as bits of two bfloat16 numbers for each word, ``2 ** -code_exponent`` times as large."""
    if LAYOUT.codes == 4 and PLANE == 0:
        pairs = ((words << 4) & MAGNITUDES) | ((words << 8) & SIGNS)
    elif LAYOUT.codes == 4:
        pairs = ((words >> 4) & MAGNITUDES) | (words & SIGNS)
    elif PLANE == 0:
        pairs = words & PAIR
    elif PLANE == 1:
        bits = words.to(tl.uint32, bitcast=True)
        pairs = ((bits >> 4) | (bits << 28)).to(tl.int32, bitcast=True) & PAIR
    elif PLANE == 2:
        pairs = (words << 6) & PAIR
    else:
        pairs = ((words << 2) ^ (words.to(tl.uint32, bitcast=True) >> 6).to(tl.int32, bitcast=True)) & PAIR
    return pairs


@triton.jit
def _unpack_numbers(words, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers of a plane's even and odd inputs, ``2 ** -code_exponent`` times as large, in float32."""
    pairs = _unpack_pairs(words, PLANE, LAYOUT)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_plane(words_NW, scale_NK, PLANE: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers of a plane times their scales, ``2 ** -code_exponent`` times as large."""
    code_NK = join_halves(_unpack_pairs(words_NW, PLANE, LAYOUT), tl.bfloat16)
    # The compiler multiplies two numbers at a time if a sum follows.
    return (code_NK * scale_NK + 0.0).to(DTYPE)


@triton.jit
def _scales_of_plane(packed_N1, high_bits, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the scales of a plane, ``[N, K]``, times ``2 ** SCALE_EXPONENT``."""
    N: tl.constexpr = packed_N1.shape[0]
    INPUTS: tl.constexpr = RUN if LAYOUT.codes == 4 else RUN // 2
    if not LAYOUT.has_exponents:
        pair_N1 = (packed_N1 >> (PLANE // 2 * 32)).to(tl.int32)
        bits_N1 = (((pair_N1 << 4) if PLANE % 2 == 0 else (pair_N1 >> 4)) & 0x0FF00FF0) | high_bits
        scale_NS = join_halves(bits_N1, tl.bfloat16)
    elif LAYOUT.codes == 4:
        bits_N1 = ((packed_N1 << 7) if PLANE == 0 else (packed_N1 >> 1)) & 0x7F807F80
        scale_NS = join_halves(bits_N1, tl.bfloat16) * _power_of_2(SCALE_EXPONENT).to(tl.bfloat16)
    else:
        scale_N1 = (_scale_number(packed_N1, PLANE, LAYOUT) * _power_of_2(SCALE_EXPONENT)).to(tl.bfloat16)
        scale_NS = tl.reshape(tl.join(scale_N1, scale_N1), [N, 2])
    return tl.reshape(tl.broadcast_to(scale_NS[:, :, None], [N, 2, INPUTS]), [N, 2 * INPUTS])


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
    weight_ptr, num_words, scale_ptr, stride_row, stride_block, factor_ptr, high_bits = weight[:7]
    extra_ptr, extra_scale_ptr, extra_stride_block, extra_factor_ptr, num_matrices = weight[7:]
    if extra_ptr is not None:
        is_extra = matrix == num_matrices
        weight_ptr = tl.where(is_extra, extra_ptr, weight_ptr)
        scale_ptr = tl.where(is_extra, extra_scale_ptr, scale_ptr)
        stride_block = tl.where(is_extra, extra_stride_block, stride_block)
        if factor_ptr is not None:
            factor_ptr = tl.where(is_extra, extra_factor_ptr, factor_ptr)
        matrix = tl.where(is_extra, 0, matrix)
    tl.static_assert(BLOCK_K == BLOCK_INPUTS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    BLOCK_WORDS: tl.constexpr = BLOCK_INPUTS // LAYOUT.codes
    PLANES: tl.constexpr = LAYOUT.codes // 2
    read_N = tl.cast(matrix, tl.int64) * (NUM_PARTS * N) + tl.minimum(col_N, N - 1)
    up_N = read_N + N
    word_W = tl.arange(0, BLOCK_WORDS)
    input_K = tl.arange(0, 2 * BLOCK_WORDS)
    input_K = input_K // RUN * (RUN * PLANES) + input_K % RUN
    x_KM_ptr = x_ptr + (read_M.to(tl.int64) * stride_x)[None, :] + input_K[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    scale_N1_ptr = (scale_ptr + read_N * stride_row)[:, None]
    up_scale_N1_ptr = (scale_ptr + up_N * stride_row)[:, None]
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    # Two blocks at a time need twice the shared memory, and are faster in small tiles with many inputs.
    UNROLL: tl.constexpr = 2 if IS_GATED and LAYOUT.codes == 8 and BLOCK_M <= 16 else 1
    for block in tl.range(first, end, loop_unroll_factor=UNROLL):
        words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
        packed_N1 = tl.load(scale_N1_ptr + tl.cast(block, tl.int64) * stride_block)
        if IS_GATED:
            up_NW = tl.load(up_NW_ptr + block * BLOCK_WORDS)
            up_packed_N1 = tl.load(up_scale_N1_ptr + tl.cast(block, tl.int64) * stride_block)
        for plane in tl.static_range(PLANES):
            start = block * BLOCK_INPUTS + plane * RUN
            if IS_EVEN:
                x_KM = tl.load(x_KM_ptr + start)
            else:
                x_KM = tl.load(x_KM_ptr + start, mask=(start + input_K < K)[:, None], other=0.0)
            scale_NK = _scales_of_plane(packed_N1, high_bits, plane, LAYOUT)
            code_NK = _unpack_plane(words_NW, scale_NK, plane, DTYPE, LAYOUT)
            acc_NM = tl.dot(code_NK, x_KM, acc_NM, input_precision="ieee")
            if IS_GATED:
                up_scale_NK = _scales_of_plane(up_packed_N1, high_bits, plane, LAYOUT)
                up_code_NK = _unpack_plane(up_NW, up_scale_NK, plane, DTYPE, LAYOUT)
                acc_up_NM = tl.dot(up_code_NK, x_KM, acc_up_NM, input_precision="ieee")
    missing = _power_of_2(LAYOUT.code_exponent - SCALE_EXPONENT)
    if factor_ptr is None:
        acc_NM *= missing
        acc_up_NM *= missing
    else:
        acc_NM *= (tl.load(factor_ptr + read_N) * missing)[:, None]
        if IS_GATED:
            acc_up_NM *= (tl.load(factor_ptr + up_N) * missing)[:, None]
    return tl.trans(acc_NM), tl.trans(acc_up_NM)


@triton.jit
def dequantize(weight, read_N, block, LAYOUT: tl.constexpr):
    """Return as ``operand_triton.py`` says the numbers of a block."""
    weight_ptr, num_words, scale_ptr, stride_row, stride_block, factor_ptr = weight[:6]
    N: tl.constexpr = read_N.shape[0]
    BLOCK_WORDS: tl.constexpr = BLOCK_INPUTS // LAYOUT.codes
    word_W = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    words_NW = tl.load(weight_ptr + (read_N * num_words)[:, None] + word_W[None, :])
    packed_N = tl.load(scale_ptr + read_N * stride_row + tl.cast(block, tl.int64) * stride_block)
    factor_N = tl.full([N], 1.0, tl.float32)
    if factor_ptr is not None:
        factor_N *= tl.load(factor_ptr + read_N)
    first = _dequantize_plane(words_NW, packed_N, factor_N, 0, LAYOUT)
    second = _dequantize_plane(words_NW, packed_N, factor_N, 1, LAYOUT)
    if LAYOUT.codes == 4:
        # Of each span.
        pairs_NSRP = tl.reshape(tl.join(first, second), [N, 2, RUN, 2])
        number_NSPR = tl.permute(pairs_NSRP, [0, 1, 3, 2])
    else:
        third = _dequantize_plane(words_NW, packed_N, factor_N, 2, LAYOUT)
        fourth = _dequantize_plane(words_NW, packed_N, factor_N, 3, LAYOUT)
        number_NSPR = tl.permute(tl.join(tl.join(first, third), tl.join(second, fourth)), [0, 2, 3, 1])
    return tl.reshape(number_NSPR, [N, BLOCK_INPUTS])


@triton.jit
def _dequantize_plane(words_NW, packed_N, factor_N, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers of a plane."""
    even_NW, odd_NW = _unpack_numbers(words_NW, PLANE, LAYOUT)
    N: tl.constexpr = words_NW.shape[0]
    # Bytes of the scales of both halves of the words.
    if not LAYOUT.has_exponents:
        FIRST: tl.constexpr = PLANE // 2 * 4 + PLANE % 2
        SECOND: tl.constexpr = FIRST + 2
    elif LAYOUT.codes == 4:
        FIRST: tl.constexpr = PLANE
        SECOND: tl.constexpr = PLANE + 2
    else:
        FIRST: tl.constexpr = PLANE
        SECOND: tl.constexpr = PLANE
    first_N, second_N = _scale_number(packed_N, FIRST, LAYOUT), _scale_number(packed_N, SECOND, LAYOUT)
    scale_NS = tl.join(first_N * factor_N, second_N * factor_N)
    number_NSR = tl.reshape(tl.join(even_NW, odd_NW), [N, 2, words_NW.shape[1]])
    number_NSR = number_NSR * _power_of_2(LAYOUT.code_exponent) * scale_NS[:, :, None]
    return tl.reshape(number_NSR, [N, 2 * words_NW.shape[1]])


@triton.jit
def _load_pieces(weight, row_CN, is_1N, start, LAYOUT: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, W]``, and the scales of their first two and of other planes, ``[J, C, N]``."""
    weight_ptr, num_words, scale_ptr, stride_row, stride_block = weight[:5]
    PIECE_INPUTS: tl.constexpr = PIECE_WORDS * LAYOUT.codes
    SPAN_PIECES: tl.constexpr = SPAN_WORDS // PIECE_WORDS
    BLOCK_PIECES: tl.constexpr = BLOCK_INPUTS // PIECE_INPUTS
    PAIRS: tl.constexpr = 2 if LAYOUT.has_exponents else 4
    piece_J = start // PIECE_INPUTS + tl.arange(0, BLOCK_K // PIECE_INPUTS)
    word_JW = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNW = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JW[:, None, None, :]
    # Two scales in each number: a block has two or four such pairs.
    scale_ptr = scale_ptr.to(tl.pointer_type(tl.int16))
    if not LAYOUT.has_exponents:
        in_block_J = piece_J % SPAN_PIECES // (SPAN_PIECES // 2)
    elif LAYOUT.codes == 4:
        in_block_J = piece_J % BLOCK_PIECES // SPAN_PIECES
    else:
        in_block_J = tl.zeros_like(piece_J)
    offset_J = (piece_J // BLOCK_PIECES).to(tl.int64) * (PAIRS * stride_block) + in_block_J
    scale_JCN_ptr = scale_ptr + (row_CN * (PAIRS * stride_row))[None, :, :] + offset_J[:, None, None]
    if IS_EVEN:
        words_JCNW = tl.load(ptr_JCNW, eviction_policy="evict_first")
        first_JCN = tl.load(scale_JCN_ptr)
        second_JCN = first_JCN
        if LAYOUT.codes == 8:
            second_JCN = tl.load(scale_JCN_ptr + PAIRS // 2)
    else:
        is_JCN = is_1N[None, :, :] & (piece_J < num_words // PIECE_WORDS)[:, None, None]
        words_JCNW = tl.load(ptr_JCNW, mask=is_JCN[:, :, :, None], other=0, eviction_policy="evict_first")
        first_JCN = tl.load(scale_JCN_ptr, mask=is_JCN, other=0)
        second_JCN = first_JCN
        if LAYOUT.codes == 8:
            second_JCN = tl.load(scale_JCN_ptr + PAIRS // 2, mask=is_JCN, other=0)
    return words_JCNW, (first_JCN, second_JCN)


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
    words_JCNW, scales = _load_pieces(weight, row_CN, is_1N, start, LAYOUT, IS_EVEN, BLOCK_K)
    up_JCNW, up_scales = words_JCNW, scales
    if IS_GATED:
        up_JCNW, up_scales = _load_pieces(weight, row_CN + N, is_1N, start, LAYOUT, IS_EVEN, BLOCK_K)
    return words_JCNW, scales, up_JCNW, up_scales


@triton.jit
def _multiply_plane(words_JCNW, even_JMW, odd_JMW, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the products with the codes of a plane, those of two neighbouring inputs added."""
    even_JCNW, odd_JCNW = _unpack_numbers(words_JCNW, PLANE, LAYOUT)
    return even_JCNW * even_JMW[:, :, None, :] + odd_JCNW * odd_JMW[:, :, None, :]


@triton.jit
def multiply_rows(
    loaded,
    x,
    norm,
    row_M,
    is_row_M,
    weight,
    matrix_C,
    first_N,
    start,
    N,
    K,
    LAYOUT: tl.constexpr,
    NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply as ``operand_triton.py`` says: sums of pieces, ``[J, M, N]``."""
    tl.static_assert(NORM is None, "only dense weights normalise rows as they read them")
    words_JCNW, scales, up_JCNW, up_scales = loaded
    x_ptr, _, stride_x, _ = x
    factor_ptr = weight[5]
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    PIECE_INPUTS: tl.constexpr = PIECE_WORDS * LAYOUT.codes
    SPAN_PIECES: tl.constexpr = SPAN_WORDS // PIECE_WORDS
    PLANES: tl.constexpr = LAYOUT.codes // 2
    J: tl.constexpr = BLOCK_K // PIECE_INPUTS
    M: tl.constexpr = row_M.shape[0]
    row_N = first_N + tl.arange(0, BLOCK_N)
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    is_CN = (row_N < N)[None, :] & (row_CN >= 0)
    piece_J = start // PIECE_INPUTS + tl.arange(0, J)
    col_J = piece_J // SPAN_PIECES * (SPAN_PIECES * PIECE_INPUTS) + piece_J % SPAN_PIECES * PLANE_INPUTS
    col_JI = col_J[:, None] + tl.arange(0, PLANE_INPUTS)[None, :]
    x_JMI_ptr = x_ptr + (row_M.to(tl.int64) * stride_x)[None, :, None] + col_JI[:, None, :]
    power = _power_of_2(INPUT_EXPONENT)
    out_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    for plane in tl.static_range(PLANES):
        is_JMI = is_row_M[None, :, None]
        if not IS_EVEN:
            is_JMI = is_JMI & (col_JI + plane * RUN < K)[:, None, :]
        x_JMI = tl.load(x_JMI_ptr + plane * RUN, mask=is_JMI, other=0.0).to(tl.float32) * power
        even_JMW, odd_JMW = tl.split(tl.reshape(x_JMI, [J, M, PIECE_WORDS, 2]))
        acc_JMNW = _multiply_plane(words_JCNW, even_JMW, odd_JMW, plane, LAYOUT)
        out_JMN += tl.sum(acc_JMNW, axis=3) * _scale_number(scales[plane // 2], plane % 2, LAYOUT)
        if IS_GATED:
            acc_JMNW = _multiply_plane(up_JCNW, even_JMW, odd_JMW, plane, LAYOUT)
            out_up_JMN += tl.sum(acc_JMNW, axis=3) * _scale_number(up_scales[plane // 2], plane % 2, LAYOUT)
    missing = _power_of_2(LAYOUT.code_exponent - INPUT_EXPONENT)
    if factor_ptr is None:
        out_JMN *= missing
        out_up_JMN *= missing
    else:
        out_JMN *= (tl.load(factor_ptr + row_CN, mask=is_CN, other=0.0) * missing)[None, :, :]
        if IS_GATED:
            out_up_JMN *= (tl.load(factor_ptr + row_CN + N, mask=is_CN, other=0.0) * missing)[None, :, :]
    return out_JMN, out_up_JMN


@triton.jit
def add_rows(sums_JMN):
    """Return the sums of pieces' sums, ``[M, N]``."""
    return tl.sum(sums_JMN, axis=0)


FUNCTIONS = DeviceFunctions(
    tile,
    RowFunctions(load_rows, multiply_rows, add_rows),
    data,
    layout,
    min_block_k=BLOCK_INPUTS.value,
    min_rows=MANY,
    dequantize=dequantize,
    can_extend=can_extend,
    extends_rows=False,
)
