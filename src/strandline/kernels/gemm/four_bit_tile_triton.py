"""How kernels unpack weights in 4 bits.

In tiles, bits ``[4 j, 4 j + 4)`` of a block's sixteen numbers are the codes of sixteen neighbouring inputs, a plane.
They are put into the mantissa of 128 in bfloat16, two planes at once, and the zero point is subtracted. The result is
exact.

Shape suffixes: M rows of x, N outputs, K inputs, W numbers of a block.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from strandline.kernels.gemm import weights

BLOCK_INPUTS = tl.constexpr(weights.BLOCK_INPUTS)
BLOCK_WORDS = tl.constexpr(weights.BLOCK_WORDS)
ZERO = tl.constexpr(weights.SYMMETRIC_ZERO)


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
