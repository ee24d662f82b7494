"""Weights in microscaling formats in kernels: numbers in e2m1 (NVFP4, MXFP4) or e4m3 (MXFP8).

Bits of two codes of a word are moved to where two bfloat16 numbers have them (``fp4.CODE_BITS``). All bits of a
code but the sign are those of a number whose exponent is too small, denormal ones included (``CODE_EXPONENTS``). The
exponent is corrected by scales (tiles) and inputs (few rows), all by powers of two: every operand is exact.

A span is 32 neighbouring inputs of 4 bits, or 64 of 8 bits. A plane is a run of eight or 32 neighbouring inputs of all
spans, two of every word: words and halves of a plane are in the order of its inputs. One number holds the scales of a
span: one in MXFP4; else that of the first half of its planes and that of the second half. A piece is four words of a
row.

Shape suffixes: as in ``four_bit_triton.py``; S spans of a block, R inputs of a run, I inputs of a piece in a plane, L
numbers that hold the scales of a block.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from strandline.kernels.gemm.formats import coded
from strandline.kernels.gemm.formats.four_bit_triton import join_halves
from strandline.kernels.gemm.formats.launches import MANY
from strandline.kernels.gemm.formats.operand_triton import DeviceFunctions, RowFunctions
from strandline.kernels.gemm.weights import CodedWeight

BLOCK_INPUTS = tl.constexpr(coded.BLOCK_INPUTS)

PLANE_INPUTS = tl.constexpr(8)
"""Inputs of a piece in a plane."""

PIECE_WORDS = tl.constexpr(4)

PAIR = tl.constexpr(-0x7E3F7E40)
"""Mask of the bits of two codes of 4 bits: signs, lowest two bits of exponents, highest of mantissas."""

SIGNS = tl.constexpr(-0x7FFF8000)
MAGNITUDES = tl.constexpr(0x07F007F0)
"""Masks of the bits of two codes of 8 bits: signs; lowest four bits of exponents, and highest three of mantissas."""

CODE_EXPONENTS = {4: 126, 8: 120}
"""Codes of this many bits, as bits of a number, stand for ``2 ** -126`` or ``2 ** -120`` times their number."""

RUNS = {4: 8, 8: 32}
"""Inputs of a run of codes of this many bits."""

SCALE_EXPONENT = tl.constexpr(118)
"""In tiles, scales are multiplied with this power of two, and results with what is missing. Scales of up to 512 are
numbers in bfloat16 then, and products of numbers and scales from 1 / 65,536 on are exact in float16, too."""

INPUT_EXPONENT = tl.constexpr(96)
"""For few rows, inputs are multiplied with this power of two, and results with what is missing: products are not
denormal then, and inputs of up to ``2 ** 31`` are numbers."""


class MicroscaledLayout(NamedTuple):
    """What is compiled in of a weight."""

    codes: int
    """Codes of a word."""
    run: int
    """Inputs of a run; a span has one run for each plane."""
    code_exponent: int
    """``CODE_EXPONENTS`` of these."""
    has_exponents: bool
    """Whether scales are exponents, else e4m3."""
    halves: int
    """Scales of a span."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: CodedWeight) -> tuple:
    """Return words and how many a row has, the scales of a span as one number, and factors, if there are any."""
    scales = weight.scales if _scales_per_span(weight) == 1 else weight.scales.view(torch.int16)
    return weight.words, weight.words.shape[-1], scales, weight.factors


def _scales_per_span(weight: CodedWeight) -> int:
    return 1 if weight.format.bits == 4 and weight.scales.dtype == torch.uint8 else 2


def layout(weight: CodedWeight) -> MicroscaledLayout:
    bits, run = weight.format.bits, RUNS[weight.format.bits]
    has_exponents = weight.scales.dtype == torch.uint8
    return MicroscaledLayout(32 // bits, run, CODE_EXPONENTS[bits], has_exponents, _scales_per_span(weight))


@triton.jit
def _power_of_2(EXPONENT: tl.constexpr):
    """Return ``2.0 ** EXPONENT``."""
    return tl.full([], (EXPONENT + 127) << 23, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _scales_of_spans(packed, LAYOUT: tl.constexpr):
    """Return the scales of the first and of the second half of spans, in float32."""
    if LAYOUT.halves == 1:
        scale = (packed.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        return scale, scale
    elif LAYOUT.has_exponents:
        bits = packed.to(tl.int32)
        low, high = (bits & 0xFF) << 23, (bits & 0xFF00) << 15
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low, high = packed & 0xFF, (packed >> 8) & 0xFF
        scale = low.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return scale, high.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


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
        pairs = ((words << 2) & (PAIR & ~0x01000100)) | ((words >> 6) & 0x01000100)
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
def _scales_of_planes(packed_NL, IS_FIRST: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the scales of the first or second half of the planes, ``[N, K]``, times ``2 ** SCALE_EXPONENT``."""
    N: tl.constexpr = packed_NL.shape[0]
    SPANS: tl.constexpr = BLOCK_INPUTS // (LAYOUT.run * LAYOUT.codes // 2)
    if LAYOUT.halves == 1:
        # By way of float32: if integers are extended, the compiler moves tiles through shared memory.
        scale_NS = (packed_NL.to(tl.float32).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scale_NS = (scale_NS * _power_of_2(SCALE_EXPONENT)).to(tl.bfloat16)
    elif LAYOUT.has_exponents:
        bits_NL = ((packed_NL << 7) if IS_FIRST else (packed_NL >> 1)) & 0x7F807F80
        scale_NS = join_halves(bits_NL, tl.bfloat16) * _power_of_2(SCALE_EXPONENT).to(tl.bfloat16)
    else:
        # Bits of e4m3 are those of a number in bfloat16 whose exponent is 120 too small.
        bits_NL = ((packed_NL << 4) if IS_FIRST else (packed_NL >> 4)) & 0x07F007F0
        power = _power_of_2((SCALE_EXPONENT + 120) // 2).to(tl.bfloat16)
        scale_NS = join_halves(bits_NL, tl.bfloat16) * power * power
    return tl.reshape(tl.broadcast_to(scale_NS[:, :, None], [N, SPANS, LAYOUT.run]), [N, SPANS * LAYOUT.run])


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
    BLOCK_WORDS: tl.constexpr = BLOCK_INPUTS // LAYOUT.codes
    PLANES: tl.constexpr = LAYOUT.codes // 2
    read_N = tl.cast(matrix, tl.int64) * (NUM_PARTS * N) + tl.minimum(col_N, N - 1)
    up_N = read_N + N
    word_W = tl.arange(0, BLOCK_WORDS)
    input_K = tl.arange(0, 2 * BLOCK_WORDS)
    input_K = input_K // LAYOUT.run * (LAYOUT.run * PLANES) + input_K % LAYOUT.run
    x_KM_ptr = x_ptr + (read_M.to(tl.int64) * stride_x)[None, :] + input_K[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    NUM_PACKED: tl.constexpr = BLOCK_INPUTS // (LAYOUT.run * PLANES) // LAYOUT.halves
    if LAYOUT.halves > 1:
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.int32))
    packed_L = tl.arange(0, NUM_PACKED)
    packed_NL_ptr = scale_ptr + (read_N * (num_words // BLOCK_WORDS * NUM_PACKED))[:, None] + packed_L[None, :]
    up_packed_NL_ptr = scale_ptr + (up_N * (num_words // BLOCK_WORDS * NUM_PACKED))[:, None] + packed_L[None, :]
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(first, end):
        words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
        packed_NL = tl.load(packed_NL_ptr + block * NUM_PACKED)
        if IS_GATED:
            up_NW = tl.load(up_NW_ptr + block * BLOCK_WORDS)
            up_packed_NL = tl.load(up_packed_NL_ptr + block * NUM_PACKED)
        for plane in tl.static_range(PLANES):
            start = block * BLOCK_INPUTS + plane * LAYOUT.run
            if IS_EVEN:
                x_KM = tl.load(x_KM_ptr + start)
            else:
                x_KM = tl.load(x_KM_ptr + start, mask=(start + input_K < K)[:, None], other=0.0)
            scale_NK = _scales_of_planes(packed_NL, plane < PLANES // 2, LAYOUT)
            code_NK = _unpack_plane(words_NW, scale_NK, plane, DTYPE, LAYOUT)
            acc_NM = tl.dot(code_NK, x_KM, acc_NM, input_precision="ieee")
            if IS_GATED:
                up_scale_NK = _scales_of_planes(up_packed_NL, plane < PLANES // 2, LAYOUT)
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
    weight_ptr, num_words, scale_ptr, factor_ptr = weight
    N: tl.constexpr = read_N.shape[0]
    BLOCK_WORDS: tl.constexpr = BLOCK_INPUTS // LAYOUT.codes
    SPANS: tl.constexpr = BLOCK_INPUTS // (LAYOUT.run * LAYOUT.codes // 2)
    word_W = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    span_S = block * SPANS + tl.arange(0, SPANS)
    words_NW = tl.load(weight_ptr + (read_N * num_words)[:, None] + word_W[None, :])
    num_spans = num_words // BLOCK_WORDS * SPANS
    packed_NS = tl.load(scale_ptr + (read_N * num_spans)[:, None] + span_S[None, :])
    first_NS, second_NS = _scales_of_spans(packed_NS, LAYOUT)
    if factor_ptr is not None:
        factor_N1 = tl.load(factor_ptr + read_N)[:, None]
        first_NS *= factor_N1
        second_NS *= factor_N1
    first_NSR = _dequantize_plane(words_NW, first_NS, 0, LAYOUT)
    if LAYOUT.codes == 4:
        second_NSR = _dequantize_plane(words_NW, second_NS, 1, LAYOUT)
        number_NSPR = tl.permute(tl.join(first_NSR, second_NSR), [0, 1, 3, 2])
    else:
        second_NSR = _dequantize_plane(words_NW, first_NS, 1, LAYOUT)
        third_NSR = _dequantize_plane(words_NW, second_NS, 2, LAYOUT)
        fourth_NSR = _dequantize_plane(words_NW, second_NS, 3, LAYOUT)
        number_NSRPP = tl.join(tl.join(first_NSR, third_NSR), tl.join(second_NSR, fourth_NSR))
        number_NSPR = tl.permute(number_NSRPP, [0, 1, 3, 4, 2])
    return tl.reshape(number_NSPR, [N, BLOCK_INPUTS])


@triton.jit
def _dequantize_plane(words_NW, scale_NS, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers of a plane."""
    even_NW, odd_NW = _unpack_numbers(words_NW, PLANE, LAYOUT)
    number_NSR = tl.reshape(tl.join(even_NW, odd_NW), [scale_NS.shape[0], scale_NS.shape[1], LAYOUT.run])
    return number_NSR * _power_of_2(LAYOUT.code_exponent) * scale_NS[:, :, None]


@triton.jit
def _load_pieces(weight, row_CN, is_1N, start, LAYOUT: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, W]``, and their scales, ``[J, C, N]``."""
    weight_ptr, num_words, scale_ptr, _ = weight
    PIECE_INPUTS: tl.constexpr = PIECE_WORDS * LAYOUT.codes
    SPAN_PIECES: tl.constexpr = LAYOUT.run // PLANE_INPUTS
    num_pieces = num_words // PIECE_WORDS
    piece_J = start // PIECE_INPUTS + tl.arange(0, BLOCK_K // PIECE_INPUTS)
    span_J = piece_J // SPAN_PIECES
    word_JW = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNW = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JW[:, None, None, :]
    scale_JCN_ptr = scale_ptr + (row_CN * (num_pieces // SPAN_PIECES))[None, :, :] + span_J[:, None, None]
    if IS_EVEN:
        words_JCNW = tl.load(ptr_JCNW, eviction_policy="evict_first")
        scales_JCN = tl.load(scale_JCN_ptr)
    else:
        is_JCN = is_1N[None, :, :] & (piece_J < num_pieces)[:, None, None]
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
    """Load as ``operand_triton.py`` says: words of pieces and their scales."""
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    row_N = first_N + tl.arange(0, BLOCK_N)
    is_1N = (row_N < N)[None, :]
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    words_JCNW, scales_JCN = _load_pieces(weight, row_CN, is_1N, start, LAYOUT, IS_EVEN, BLOCK_K)
    up_JCNW, up_scales_JCN = words_JCNW, scales_JCN
    if IS_GATED:
        up_JCNW, up_scales_JCN = _load_pieces(weight, row_CN + N, is_1N, start, LAYOUT, IS_EVEN, BLOCK_K)
    return words_JCNW, scales_JCN, up_JCNW, up_scales_JCN


@triton.jit
def _add_plane(acc_JMNW, words_JCNW, even_JMW, odd_JMW, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Add the products with the codes of a plane."""
    even_JCNW, odd_JCNW = _unpack_numbers(words_JCNW, PLANE, LAYOUT)
    acc_JMNW += even_JCNW * even_JMW[:, :, None, :]
    return acc_JMNW + odd_JCNW * odd_JMW[:, :, None, :]


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
    words_JCNW, scales_JCN, up_JCNW, up_scales_JCN = loaded
    x_ptr, _, stride_x, _ = x
    _, _, _, factor_ptr = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    PIECE_INPUTS: tl.constexpr = PIECE_WORDS * LAYOUT.codes
    SPAN_PIECES: tl.constexpr = LAYOUT.run // PLANE_INPUTS
    HALVES: tl.constexpr = LAYOUT.halves
    HALF_PLANES: tl.constexpr = LAYOUT.codes // 2 // HALVES
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
    scales, up_scales = _scales_of_spans(scales_JCN, LAYOUT), _scales_of_spans(up_scales_JCN, LAYOUT)
    out_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    for half in tl.static_range(HALVES):
        acc_JMNW = tl.zeros([J, M, BLOCK_N, PIECE_WORDS], dtype=tl.float32)
        acc_up_JMNW = tl.zeros([J, M, BLOCK_N, PIECE_WORDS], dtype=tl.float32)
        for plane in tl.static_range(half * HALF_PLANES, (half + 1) * HALF_PLANES):
            is_JMI = is_row_M[None, :, None]
            if not IS_EVEN:
                is_JMI = is_JMI & (col_JI + plane * LAYOUT.run < K)[:, None, :]
            x_JMI = tl.load(x_JMI_ptr + plane * LAYOUT.run, mask=is_JMI, other=0.0).to(tl.float32) * power
            even_JMW, odd_JMW = tl.split(tl.reshape(x_JMI, [J, M, PIECE_WORDS, 2]))
            acc_JMNW = _add_plane(acc_JMNW, words_JCNW, even_JMW, odd_JMW, plane, LAYOUT)
            if IS_GATED:
                acc_up_JMNW = _add_plane(acc_up_JMNW, up_JCNW, even_JMW, odd_JMW, plane, LAYOUT)
        out_JMN += tl.sum(acc_JMNW, axis=3) * scales[half]
        if IS_GATED:
            out_up_JMN += tl.sum(acc_up_JMNW, axis=3) * up_scales[half]
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
)
