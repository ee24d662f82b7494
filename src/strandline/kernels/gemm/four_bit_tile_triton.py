"""How kernels unpack weights in 4 bits.

A thread of a matrix-vector product loads four numbers of a row, a piece. Every code becomes a float32 number without a
conversion: its bits are put into the mantissa of 128. Codes of lower bits count a sixteenth there, and are multiplied
with sixteen times the input. The excess of such a sum depends on the inputs alone; it is subtracted once for all of the
weight's rows.

In tiles, bits ``[4 j, 4 j + 4)`` of a block's sixteen numbers are the codes of sixteen neighbouring inputs, a plane.
They are put into the mantissa of 128 in bfloat16, two planes at once, and the zero point is subtracted. The result is
exact.

Shape suffixes: M rows of x, C as many or 1, N outputs, K inputs, W numbers of a block or of a piece, J pieces.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from strandline.kernels.gemm import weights

BLOCK_INPUTS = tl.constexpr(weights.BLOCK_INPUTS)
BLOCK_WORDS = tl.constexpr(weights.BLOCK_WORDS)
ZERO = tl.constexpr(weights.SYMMETRIC_ZERO)

PIECE_WORDS = tl.constexpr(4)
PIECE_INPUTS = tl.constexpr(4 * weights.CODES_PER_WORD)

MAGIC = 0x43000000
"""128 in float32. As an argument of kernels, not a constant: the compiler then sets and masks bits at once."""


@triton.jit
def load_words(weight_ptr, row_CN, is_CN, piece_J, num_words, IS_EVEN: tl.constexpr):
    """Load pieces of rows, ``[J, C, N, W]``, bytes that are read once and need not stay in the cache."""
    word_JW = piece_J[:, None] * PIECE_WORDS + tl.arange(0, PIECE_WORDS)[None, :]
    ptr_JCNW = weight_ptr + (row_CN * num_words)[None, :, :, None] + word_JW[:, None, None, :]
    if IS_EVEN:
        words_JCNW = tl.load(ptr_JCNW, eviction_policy="evict_first")
    else:
        mask_JCNW = is_CN[None, :, :, None] & (word_JW < num_words)[:, None, None, :]
        words_JCNW = tl.load(ptr_JCNW, mask=mask_JCNW, other=0, eviction_policy="evict_first")
    return words_JCNW


@triton.jit
def plane_columns(piece_J, PLANE: tl.constexpr):
    """Return the inputs of pieces' codes of a plane, ``[J, W]``."""
    col_J = piece_J // 4 * BLOCK_INPUTS + piece_J % 4 * PIECE_WORDS + PLANE * BLOCK_WORDS
    return col_J[:, None] + tl.arange(0, PIECE_WORDS)[None, :]


@triton.jit
def load_plane(x_ptr, row_M, piece_J, PLANE: tl.constexpr, M, K, stride_x, IS_EVEN: tl.constexpr):
    """Load the inputs that pieces' codes of a plane are multiplied with, ``[J, M, W]``, in float32."""
    col_JW = plane_columns(piece_J, PLANE)
    mask_JMW = (row_M < M)[None, :, None]
    if not IS_EVEN:
        mask_JMW = mask_JMW & (col_JW < K)[:, None, :]
    ptr_JMW = x_ptr + (row_M.to(tl.int64) * stride_x)[None, :, None] + col_JW[:, None, :]
    return tl.load(ptr_JMW, mask=mask_JMW, other=0.0).to(tl.float32)


@triton.jit
def add_planes(acc_JMNW, words_JCNW, low_JMW, high_JMW, PAIR: tl.constexpr, magic):
    """Add the products with the codes of planes ``2 PAIR`` and ``2 PAIR + 1``, an excess of 2048 and 128 inputs.

    All rows of x are multiplied with the same words, or each with words of its own.
    """
    SHIFT: tl.constexpr = 8 * PAIR - 12
    words_JCNW = words_JCNW >> SHIFT if SHIFT > 0 else words_JCNW << -SHIFT
    low_JCNW = ((words_JCNW & 0xF000) | magic).to(tl.float32, bitcast=True)
    high_JCNW = ((words_JCNW & 0xF0000) | magic).to(tl.float32, bitcast=True)
    acc_JMNW += high_JCNW * high_JMW[:, :, None, :]
    return acc_JMNW + low_JCNW * (low_JMW * 16.0)[:, :, None, :]


@triton.jit
def scaled_sums(
    acc_JMNW,
    low_JMW,
    high_JMW,
    scale_ptr,
    zero_ptr,
    row_CN,
    is_CN,
    group_J,
    num_groups,
    stride_sn,
    stride_sx,
    IS_EVEN: tl.constexpr,
):
    """Return the products of one group of every piece, ``[J, M, N]``.

    Args:
        acc_JMNW: sums of ``add_planes``; ``low_JMW`` and ``high_JMW`` are those of the inputs.
    """
    offset_JCN = (row_CN * stride_sn)[None, :, :] + (group_J * stride_sx)[:, None, None]
    if IS_EVEN:
        scale_JCN = tl.load(scale_ptr + offset_JCN).to(tl.float32)
    else:
        mask_JCN = is_CN[None, :, :] & (group_J < num_groups)[:, None, None]
        scale_JCN = tl.load(scale_ptr + offset_JCN, mask=mask_JCN, other=0.0).to(tl.float32)
    if zero_ptr is None:
        extra_JM = tl.sum(low_JMW * (2048.0 + ZERO) + high_JMW * (128.0 + ZERO), axis=2)
        sum_JMN = tl.sum(acc_JMNW, axis=3) - extra_JM[:, :, None]
    else:
        if IS_EVEN:
            zero_JCN = tl.load(zero_ptr + offset_JCN).to(tl.float32)
        else:
            zero_JCN = tl.load(zero_ptr + offset_JCN, mask=mask_JCN, other=0).to(tl.float32)
        extra_JM = tl.sum(low_JMW * 2048.0 + high_JMW * 128.0, axis=2)
        input_JM = tl.sum(low_JMW + high_JMW, axis=2)
        sum_JMN = tl.sum(acc_JMNW, axis=3) - extra_JM[:, :, None] - zero_JCN * input_JM[:, :, None]
    return sum_JMN * scale_JCN


@triton.jit
def multiply_pieces(
    words_JCNW,
    up_JCNW,
    x_ptr,
    row_M,
    piece_J,
    M,
    K,
    stride_x,
    scale_ptr,
    zero_ptr,
    row_CN,
    up_CN,
    is_CN,
    num_groups,
    stride_sn,
    stride_sx,
    magic,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the products of rows of x with pieces of a weight's rows, ``[J, M, N]``, and with others of ``up_JCNW``.

    Args:
        row_CN: rows of the weight, counted from the pointers on, ``C`` 1 or as many as rows of x.
        up_CN: those of ``up_JCNW``; both are used with a gate alone.
    """
    PAIRS: tl.constexpr = GROUP // (2 * BLOCK_WORDS)
    GROUPS: tl.constexpr = BLOCK_INPUTS // GROUP
    J: tl.constexpr = words_JCNW.shape[0]
    NUM_M: tl.constexpr = row_M.shape[0]
    N: tl.constexpr = words_JCNW.shape[2]
    out_JMN = tl.zeros([J, NUM_M, N], dtype=tl.float32)
    out_up_JMN = tl.zeros([J, NUM_M, N], dtype=tl.float32)
    for group in tl.static_range(GROUPS):
        acc_JMNW = tl.zeros([J, NUM_M, N, PIECE_WORDS], dtype=tl.float32)
        acc_up_JMNW = tl.zeros([J, NUM_M, N, PIECE_WORDS], dtype=tl.float32)
        sum_low_JMW = tl.zeros([J, NUM_M, PIECE_WORDS], dtype=tl.float32)
        sum_high_JMW = tl.zeros([J, NUM_M, PIECE_WORDS], dtype=tl.float32)
        for pair in tl.static_range(group * PAIRS, (group + 1) * PAIRS):
            low_JMW = load_plane(x_ptr, row_M, piece_J, 2 * pair, M, K, stride_x, IS_EVEN)
            high_JMW = load_plane(x_ptr, row_M, piece_J, 2 * pair + 1, M, K, stride_x, IS_EVEN)
            sum_low_JMW += low_JMW
            sum_high_JMW += high_JMW
            acc_JMNW = add_planes(acc_JMNW, words_JCNW, low_JMW, high_JMW, pair, magic)
            if IS_GATED:
                acc_up_JMNW = add_planes(acc_up_JMNW, up_JCNW, low_JMW, high_JMW, pair, magic)
        group_J = piece_J // 4 * GROUPS + group
        sums = (sum_low_JMW, sum_high_JMW, scale_ptr, zero_ptr)
        sizes = (is_CN, group_J, num_groups, stride_sn, stride_sx)
        out_JMN += scaled_sums(acc_JMNW, *sums, row_CN, *sizes, IS_EVEN)
        if IS_GATED:
            out_up_JMN += scaled_sums(acc_up_JMNW, *sums, up_CN, *sizes, IS_EVEN)
    return out_JMN, out_up_JMN


@triton.jit
def unpack_plane(words_NW, zero_N, PLANE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of a plane less their zero points, ``[N, W]``; ``zero_N`` is 128 more than these."""
    pair_NW = ((words_NW >> (4 * (PLANE % 4))) & 0x000F000F) | 0x43004300
    if PLANE >= 4:
        pair_NW = pair_NW >> 16
    code_NW = pair_NW.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return (code_NW - zero_N[:, None]).to(DTYPE)


@triton.jit
def load_zeros(zero_ptr, offset_N):
    """Load 128 more than the zero points of a tile's rows, exact in bfloat16."""
    if zero_ptr is None:
        zero_N = tl.full(offset_N.shape, 128.0 + ZERO, tl.float32).to(tl.bfloat16)
    else:
        zero_N = (tl.load(zero_ptr + offset_N).to(tl.float32) + 128.0).to(tl.bfloat16)
    return zero_N


@triton.jit
def multiply_tile(
    x_M_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    read_N,
    up_N,
    first_block,
    end_block,
    K,
    num_words,
    stride_sn,
    stride_sx,
    DTYPE: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the products of rows of x over some blocks of inputs with rows of the weight, ``[N, M]``, and with others.

    The weight's numbers are the left operand of products on tensor cores, which may come from registers.

    Args:
        x_M_ptr: where rows of x begin.
        read_N: rows of the weight; none is behind the last one.
        up_N: the others, used with a gate alone.
    """
    GROUPS: tl.constexpr = BLOCK_INPUTS // GROUP
    PLANES: tl.constexpr = GROUP // BLOCK_WORDS
    word_W = tl.arange(0, BLOCK_WORDS)
    x_WM_ptr = x_M_ptr[None, :] + word_W[:, None]
    words_NW_ptr = weight_ptr + (read_N * num_words)[:, None] + word_W[None, :]
    up_NW_ptr = weight_ptr + (up_N * num_words)[:, None] + word_W[None, :]
    last_group = tl.cdiv(K, BLOCK_INPUTS) * GROUPS - 1
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first_ptr = scale_ptr + first_block * GROUPS * stride_sx
    scale_N = tl.load(first_ptr + read_N * stride_sn).to(tl.float32)
    if IS_GATED:
        up_scale_N = tl.load(first_ptr + up_N * stride_sn).to(tl.float32)
    for block in range(first_block, end_block):
        words_NW = tl.load(words_NW_ptr + block * BLOCK_WORDS)
        if IS_GATED:
            up_NW = tl.load(up_NW_ptr + block * BLOCK_WORDS)
        for group in tl.static_range(GROUPS):
            # The next group's scales are on their way while this one's numbers are multiplied.
            next_ptr = scale_ptr + tl.minimum(block * GROUPS + group + 1, last_group) * stride_sx
            next_scale_N = tl.load(next_ptr + read_N * stride_sn).to(tl.float32)
            offset = (block * GROUPS + group) * stride_sx
            zero_N = load_zeros(zero_ptr, read_N * stride_sn + offset)
            sum_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            if IS_GATED:
                next_up_scale_N = tl.load(next_ptr + up_N * stride_sn).to(tl.float32)
                up_zero_N = load_zeros(zero_ptr, up_N * stride_sn + offset)
                sum_up_NM = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for plane in tl.static_range(group * PLANES, (group + 1) * PLANES):
                start = block * BLOCK_INPUTS + plane * BLOCK_WORDS
                if IS_EVEN:
                    x_WM = tl.load(x_WM_ptr + start)
                else:
                    x_WM = tl.load(x_WM_ptr + start, mask=(start + word_W < K)[:, None], other=0.0)
                code_NW = unpack_plane(words_NW, zero_N, plane, DTYPE)
                sum_NM = tl.dot(code_NW, x_WM, sum_NM, input_precision="ieee")
                if IS_GATED:
                    up_code_NW = unpack_plane(up_NW, up_zero_N, plane, DTYPE)
                    sum_up_NM = tl.dot(up_code_NW, x_WM, sum_up_NM, input_precision="ieee")
            acc_NM += sum_NM * scale_N[:, None]
            scale_N = next_scale_N
            if IS_GATED:
                acc_up_NM += sum_up_NM * up_scale_N[:, None]
                up_scale_N = next_up_scale_N
    return acc_NM, acc_up_NM
