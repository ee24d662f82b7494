"""Weights in 4 bits in kernels.

A plane is 32 neighbouring inputs of a block: the codes of all its numbers at one position of their two halves. In tiles
one mask leaves the two codes of a number, which are denormal numbers in bfloat16. They are multiplied with a power of
two, and the zero point is subtracted. The result is exact, and is what a register of a tensor core's operand holds.

For few rows of x, a thread loads four numbers of a row, a piece. Every code becomes a float32 number without a
conversion: its bits are put into the mantissa of 128. The excess of such a sum depends on the inputs alone; it is
subtracted once for all of the weight's rows.

Shape suffixes: as in ``dense_triton.py``; W numbers of a block or of a piece, J pieces, P inputs of a piece in a plane;
in tiles K inputs of a plane.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl

from strandline.kernels.gemm.formats import coded, four_bit
from strandline.kernels.gemm.formats.launches import MANY
from strandline.kernels.gemm.formats.operand_triton import DeviceFunctions, RowFunctions
from strandline.kernels.gemm.weights import CodedWeight

BLOCK_INPUTS = tl.constexpr(coded.BLOCK_INPUTS)
BLOCK_WORDS = tl.constexpr(four_bit.BLOCK_WORDS)
ZERO = tl.constexpr(four_bit.SYMMETRIC_ZERO)

PLANE_INPUTS = tl.constexpr(2 * four_bit.BLOCK_WORDS)
"""Codes at one position of both halves of a block's numbers."""

PIECE_WORDS = tl.constexpr(4)
PIECE_INPUTS = tl.constexpr(4 * four_bit.CODES_PER_WORD)

LARGEST_EXPONENT = tl.constexpr(127)
"""Exponent of the largest power of two in bfloat16."""

UNIT = tl.constexpr(64.0)
"""Bits of a code are a bfloat16 number ``2 ** -133`` times as large. Times the largest power of two, they lack this."""

MAGIC = 0x43000000
"""128 in float32. As an argument of kernels, not a constant: the compiler then sets and masks bits at once."""


class FourBitLayout(NamedTuple):
    """What is compiled in of a weight in 4 bits."""

    group: int
    """Inputs that share a scale."""

    def fit_rows(self, block_n: int) -> int:
        """Return how many rows of a matrix a program may take, at most this number."""
        return block_n


def data(weight: CodedWeight) -> tuple:
    """Return words, which are contiguous, and how many a row has, scales, zeros, their strides, and ``MAGIC``."""
    return weight.words, weight.words.shape[-1], weight.scales, weight.zeros, *weight.scales.stride()[-2:], MAGIC


def layout(weight: CodedWeight) -> FourBitLayout:
    return FourBitLayout(weight.group)


@triton.jit
def join_halves(pair_NW, DTYPE: tl.constexpr):
    """Return the bits of numbers, two to each of 32 bits, in 16 bits of a dtype, ``[N, 2 W]``."""
    low_NW = pair_NW.to(tl.int16).to(DTYPE, bitcast=True)
    high_NW = (pair_NW >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low_NW, high_NW), [pair_NW.shape[0], 2 * pair_NW.shape[1]])


@triton.jit
def _unpack_plane(words_NW, zero_N, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of a plane less their zero points, ``[N, K]``, and divided by ``UNIT``, as ``zero_N`` are."""
    # Up to eight bits are a number proportional to them: every second plane is not shifted, but 16 times as large.
    SHIFT: tl.constexpr = 4 * (PLANE % 2)
    code_NK = join_halves((words_NW >> (4 * PLANE - SHIFT)) & (0x000F000F << SHIFT), tl.bfloat16)
    power = tl.full([], 2.0 ** (LARGEST_EXPONENT - SHIFT), tl.float32).to(tl.bfloat16)
    return (code_NK * power - zero_N[:, None]).to(DTYPE)


@triton.jit
def _load_zeros(zero_ptr, offset_N):
    """Load the zero points of a tile's rows, divided by ``UNIT``: exact in bfloat16."""
    if zero_ptr is None:
        zero_N = tl.full(offset_N.shape, ZERO / UNIT, tl.float32)
    else:
        zero_N = tl.load(zero_ptr + offset_N).to(tl.float32) * (1 / UNIT)
    return zero_N.to(tl.bfloat16)


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
    """Multiply as ``operand_triton.py`` says; ``BLOCK_K`` is a block.

    The weight's numbers are the left operand of products on tensor cores, which may come from registers.
    """
    x_ptr, _, stride_x, _ = x
    weight_ptr, num_words, scale_ptr, zero_ptr, stride_sn, stride_sx, _ = weight
    tl.static_assert(BLOCK_K == BLOCK_INPUTS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    GROUP: tl.constexpr = LAYOUT.group
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    read_N = tl.cast(matrix, tl.int64) * (NUM_PARTS * N) + tl.minimum(col_N, N - 1)
    up_N = read_N + N
    x_M_ptr = x_ptr + read_M.to(tl.int64) * stride_x
    GROUPS: tl.constexpr = BLOCK_INPUTS // GROUP
    PLANES: tl.constexpr = GROUP // PLANE_INPUTS
    word_W = tl.arange(0, BLOCK_WORDS)
    input_K = tl.arange(0, PLANE_INPUTS)
    x_KM_ptr = x_M_ptr[None, :] + input_K[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    last_group = tl.cdiv(K, BLOCK_INPUTS) * GROUPS - 1
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first_ptr = scale_ptr + first * GROUPS * stride_sx
    scale_N = tl.load(first_ptr + read_N * stride_sn).to(tl.float32)
    if IS_GATED:
        up_scale_N = tl.load(first_ptr + up_N * stride_sn).to(tl.float32)
    for block in range(first, end):
        words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
        if IS_GATED:
            up_NW = tl.load(up_NW_ptr + block * BLOCK_WORDS)
        for group in tl.static_range(GROUPS):
            # The next group's scales are on their way while this one's numbers are multiplied.
            next_ptr = scale_ptr + tl.minimum(block * GROUPS + group + 1, last_group) * stride_sx
            next_scale_N = tl.load(next_ptr + read_N * stride_sn).to(tl.float32)
            offset = (block * GROUPS + group) * stride_sx
            zero_N = _load_zeros(zero_ptr, read_N * stride_sn + offset)
            sum_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            if IS_GATED:
                next_up_scale_N = tl.load(next_ptr + up_N * stride_sn).to(tl.float32)
                up_zero_N = _load_zeros(zero_ptr, up_N * stride_sn + offset)
                sum_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for plane in tl.static_range(group * PLANES, (group + 1) * PLANES):
                start = block * BLOCK_INPUTS + plane * PLANE_INPUTS
                if IS_EVEN:
                    x_KM = tl.load(x_KM_ptr + start)
                else:
                    x_KM = tl.load(x_KM_ptr + start, mask=(start + input_K < K)[:, None], other=0.0)
                code_NK = _unpack_plane(words_NW, zero_N, plane, DTYPE)
                sum_NM = tl.dot(code_NK, x_KM, sum_NM, input_precision="ieee")
                if IS_GATED:
                    up_code_NK = _unpack_plane(up_NW, up_zero_N, plane, DTYPE)
                    sum_up_NM = tl.dot(up_code_NK, x_KM, sum_up_NM, input_precision="ieee")
            acc_NM += sum_NM * scale_N[:, None]
            scale_N = next_scale_N
            if IS_GATED:
                acc_up_NM += sum_up_NM * up_scale_N[:, None]
                up_scale_N = next_up_scale_N
    return tl.trans(acc_NM) * UNIT, tl.trans(acc_up_NM) * UNIT


@triton.jit
def _dequantize_plane(words_NW, weight, read_N, block, PLANE: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the numbers of a plane, ``[N, K]``."""
    _, _, scale_ptr, zero_ptr, stride_sn, stride_sx, _ = weight
    group = block * (BLOCK_INPUTS // LAYOUT.group) + PLANE * PLANE_INPUTS // LAYOUT.group
    offset_N = read_N * stride_sn + group * stride_sx
    scale_N = tl.load(scale_ptr + offset_N).to(tl.float32) * UNIT
    return _unpack_plane(words_NW, _load_zeros(zero_ptr, offset_N), PLANE, tl.float32) * scale_N[:, None]


@triton.jit
def dequantize(weight, read_N, block, LAYOUT: tl.constexpr):
    """Return as ``operand_triton.py`` says the numbers of a block."""
    words_NW_ptr = weight[0] + (read_N * weight[1])[:, None] + tl.arange(0, BLOCK_WORDS)[None, :]
    words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
    first = _dequantize_plane(words_NW, weight, read_N, block, 0, LAYOUT)
    second = _dequantize_plane(words_NW, weight, read_N, block, 1, LAYOUT)
    third = _dequantize_plane(words_NW, weight, read_N, block, 2, LAYOUT)
    fourth = _dequantize_plane(words_NW, weight, read_N, block, 3, LAYOUT)
    number_NKPP = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(number_NKPP, [0, 2, 3, 1]), [read_N.shape[0], BLOCK_INPUTS])


@triton.jit
def _load_words(weight_ptr, row_CN, is_1N, piece_J, num_words, IS_EVEN: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, W]``, bytes that are read once and need not stay in the cache."""
    word_JW = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNW = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JW[:, None, None, :]
    if IS_EVEN:
        words_JCNW = tl.load(ptr_JCNW, eviction_policy="evict_first")
    else:
        is_JCNW = is_1N[None, :, :, None] & (word_JW < num_words)[:, None, None, :]
        words_JCNW = tl.load(ptr_JCNW, mask=is_JCNW, other=0, eviction_policy="evict_first")
    return words_JCNW


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
    """Load as ``operand_triton.py`` says: words of pieces, ``[J, C, N, W]``."""
    weight_ptr, num_words, _, _, _, _, _ = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    row_N = first_N + tl.arange(0, BLOCK_N)
    is_1N = (row_N < N)[None, :]
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    piece_J = start // PIECE_INPUTS + tl.arange(0, BLOCK_K // PIECE_INPUTS)
    words_JCNW = _load_words(weight_ptr, row_CN, is_1N, piece_J, num_words, IS_EVEN)
    up_JCNW = words_JCNW
    if IS_GATED:
        up_JCNW = _load_words(weight_ptr, row_CN + N, is_1N, piece_J, num_words, IS_EVEN)
    return words_JCNW, up_JCNW


@triton.jit
def _read_plane(x, row_M, is_row_M, piece_J, PLANE: tl.constexpr, K, IS_EVEN: tl.constexpr):
    """Read the inputs of pieces' codes of a plane, even and odd ones, ``[J, M, W]``, in float32."""
    x_ptr, _, stride_x, _ = x
    col_J = piece_J // 4 * BLOCK_INPUTS + PLANE * PLANE_INPUTS + piece_J % 4 * (2 * PIECE_WORDS)
    col_JP = col_J[:, None] + tl.arange(0, 2 * PIECE_WORDS)[None, :]
    is_JMP = is_row_M[None, :, None]
    if not IS_EVEN:
        is_JMP = is_JMP & (col_JP < K)[:, None, :]
    x_JMP_ptr = x_ptr + (row_M.to(tl.int64) * stride_x)[None, :, None] + col_JP[:, None, :]
    x_JMP = tl.load(x_JMP_ptr, mask=is_JMP, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x_JMP, [piece_J.shape[0], row_M.shape[0], PIECE_WORDS, 2]))


@triton.jit
def _add_plane(acc_JMNW, words_JCNW, even_JMW, odd_JMW, PLANE: tl.constexpr, magic):
    """Add the products with the codes of a plane, and an excess of 128 times the inputs.

    All rows of x are multiplied with the same words, or each with words of its own.
    """
    even_JCNW = (((words_JCNW << (16 - 4 * PLANE)) & 0xF0000) | magic).to(tl.float32, bitcast=True)
    odd_JCNW = (((words_JCNW >> (4 * PLANE)) & 0xF0000) | magic).to(tl.float32, bitcast=True)
    acc_JMNW += even_JCNW * even_JMW[:, :, None, :]
    return acc_JMNW + odd_JCNW * odd_JMW[:, :, None, :]


@triton.jit
def _scaled_sums(
    acc_JMNW,
    input_JMW,
    scale_ptr,
    zero_ptr,
    row_CN,
    is_1N,
    group_J,
    num_groups,
    stride_sn,
    stride_sx,
    IS_EVEN: tl.constexpr,
):
    """Return the products of one group of every piece, ``[J, M, N]``.

    Args:
        acc_JMNW: sums of ``_add_plane``; ``input_JMW`` are those of the inputs.
    """
    offset_JCN = (row_CN * stride_sn)[None, :, :] + (group_J * stride_sx)[:, None, None]
    if IS_EVEN:
        scale_JCN = tl.load(scale_ptr + offset_JCN).to(tl.float32)
    else:
        is_JCN = is_1N[None, :, :] & (group_J < num_groups)[:, None, None]
        scale_JCN = tl.load(scale_ptr + offset_JCN, mask=is_JCN, other=0.0).to(tl.float32)
    input_JM1 = tl.sum(input_JMW, axis=2)[:, :, None]
    if zero_ptr is None:
        sum_JMN = tl.sum(acc_JMNW, axis=3) - input_JM1 * (128.0 + ZERO)
    else:
        if IS_EVEN:
            zero_JCN = tl.load(zero_ptr + offset_JCN).to(tl.float32)
        else:
            zero_JCN = tl.load(zero_ptr + offset_JCN, mask=is_JCN, other=0).to(tl.float32)
        sum_JMN = tl.sum(acc_JMNW, axis=3) - input_JM1 * (128.0 + zero_JCN)
    return sum_JMN * scale_JCN


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
    words_JCNW, up_JCNW = loaded
    _, num_words, scale_ptr, zero_ptr, stride_sn, stride_sx, magic = weight
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    PLANES: tl.constexpr = LAYOUT.group // PLANE_INPUTS
    GROUPS: tl.constexpr = BLOCK_INPUTS // LAYOUT.group
    J: tl.constexpr = BLOCK_K // PIECE_INPUTS
    M: tl.constexpr = row_M.shape[0]
    row_N = first_N + tl.arange(0, BLOCK_N)
    is_1N = (row_N < N)[None, :]
    row_CN = (matrix_C.to(tl.int64) * (NUM_PARTS * N))[:, None] + row_N[None, :]
    piece_J = start // PIECE_INPUTS + tl.arange(0, J)
    num_groups = num_words // BLOCK_WORDS * GROUPS
    out_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, M, BLOCK_N], dtype=tl.float32)
    for group in tl.static_range(GROUPS):
        acc_JMNW = tl.zeros([J, M, BLOCK_N, PIECE_WORDS], dtype=tl.float32)
        acc_up_JMNW = tl.zeros([J, M, BLOCK_N, PIECE_WORDS], dtype=tl.float32)
        input_JMW = tl.zeros([J, M, PIECE_WORDS], dtype=tl.float32)
        for plane in tl.static_range(group * PLANES, (group + 1) * PLANES):
            even_JMW, odd_JMW = _read_plane(x, row_M, is_row_M, piece_J, plane, K, IS_EVEN)
            input_JMW += even_JMW + odd_JMW
            acc_JMNW = _add_plane(acc_JMNW, words_JCNW, even_JMW, odd_JMW, plane, magic)
            if IS_GATED:
                acc_up_JMNW = _add_plane(acc_up_JMNW, up_JCNW, even_JMW, odd_JMW, plane, magic)
        group_J = piece_J // 4 * GROUPS + group
        sums = (input_JMW, scale_ptr, zero_ptr)
        sizes = (is_1N, group_J, num_groups, stride_sn, stride_sx)
        out_JMN += _scaled_sums(acc_JMNW, *sums, row_CN, *sizes, IS_EVEN)
        if IS_GATED:
            out_up_JMN += _scaled_sums(acc_up_JMNW, *sums, row_CN + N, *sizes, IS_EVEN)
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
