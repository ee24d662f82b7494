"""Gated DeltaNet over the new tokens of many sequences, in Triton: two kernels around a chunk's 64 x 64 matrices.

With the raw keys ``k``, queries ``q`` and the state ``S`` before a chunk, and every scale a number per token::

    e = v - read * (k S);  out = query * (q S) + attend e;  S <- decay * S + write^T e

``attend = (decays * q k^T) X`` and ``write = (to_end * X)^T k``, where ``X = (I + A)^-1 diag(beta)`` is the UT
transform. None of them depends on the state: the first kernel computes them for all chunks at once. The second runs
through the chunks of a sequence, a block of value columns per program, with the state in float32 registers; between
one state and the next stand two matrix products. l2-normalisation is in the scales: the matrix units see raw inputs.

In bfloat16 the operands of matrix products are rounded to bfloat16 (the state too, where it is one), sums are
float32. In float32 everything is.

Invariants: a cut's state is stored from the registers that carry it on. Rows past a chunk's end are neither read
nor written. No ``src`` may equal the ``dst`` of another sequence, nor a cut's slot: programs run in any order.

Source: Yang et al., "Gated Delta Networks", section 3.3; the inverse is built from its halves, as in ``gdn.py``.

Shape suffixes: as in ``gdn.py``, and L rows of a padded chunk (64), B diagonal blocks of D rows (16), W value columns
of a program.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.gdn import L2_NORM_EPS, MIN_LOG_DECAY
from strandline.kernels.platform import is_deterministic


class Launch(NamedTuple):
    """How a kernel is launched."""

    num_warps: int
    num_stages: int


PREPARE = Launch(num_warps=4, num_stages=1)
"""One warpgroup per 64 x 64 matrix; three or four programs share a multiprocessor and hide each other's latency."""

ADVANCE = Launch(num_warps=4, num_stages=3)
"""Keys, queries and both matrices of a chunk take 56 KB in bfloat16: three chunks in flight fill a multiprocessor."""

ADVANCE_COLUMNS = 32
"""Value columns of a program while there are few sequences: 4 programs a head, 128 in all, one per multiprocessor."""

ADVANCE_COLUMNS_MANY = 64
"""The same once there are enough sequences: keys and matrices are read by fewer programs."""

MANY_PROGRAMS = 256
"""Programs of ``ADVANCE_COLUMNS_MANY`` columns from which that is taken: about two per multiprocessor of an H200."""

INVERSE_PRECISION = "tf32"
"""Of the products that build the inverse, which is rounded to bfloat16 (8 bits; tf32 has 11) right after."""

INVERSE_IN_PARTS = False
"""Whether the last two steps to the inverse multiply blocks of 32 rows: fewer products, but more of them in a row."""

FLOAT32_PRECISION = "tf32x3"
"""Of all products where the inputs are float32: three products of tf32 parts keep 21 bits. As plain float32 products
on matrices of this size, kernels compile for minutes and spill thousands of registers."""

SPLIT_BELOW_PROGRAMS = 528
"""With fewer (chunk, key head) pairs than four per multiprocessor, each value head gets a program of its own."""


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))``, exact to float32 where it is small: the hardware's ``log`` is not, near 1."""
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    zz = z * z
    tail = 1.0 / 9 + zz * (1.0 / 11 + zz * (1.0 / 13 + zz * (1.0 / 15 + zz * (1.0 / 17))))
    series = 1.0 + zz * (1.0 / 3 + zz * (1.0 / 5 + zz * (1.0 / 7 + zz * tail)))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def _inverse_unit_lower(system_LL, L: tl.constexpr, PRECISION: tl.constexpr):
    """Invert ``I + system``, strictly lower triangular: diagonal blocks of 2, 4, 8, 16 rows at once, then 32, 64.

    With ``X`` the inverse of the diagonal blocks of n rows and ``Q`` what the blocks of 2n rows have besides, the
    inverse of the latter is ``X - X Q X``.
    """
    NUM_BLOCKS: tl.constexpr = L // 16
    block = tl.arange(0, NUM_BLOCKS)
    is_diagonal_BDBD = block[:, None, None, None] == block[None, None, :, None]
    system_BDD = tl.sum(tl.where(is_diagonal_BDBD, tl.reshape(system_LL, (NUM_BLOCKS, 16, NUM_BLOCKS, 16)), 0.0), 2)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    inverse_BDD = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system_BDD, 0.0)
    for level in tl.static_range(1, 4):
        is_new = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        left_BDD = tl.dot(inverse_BDD, tl.where(is_new, system_BDD, 0.0), input_precision=PRECISION)
        inverse_BDD -= tl.dot(left_BDD, inverse_BDD, input_precision=PRECISION)
    inverse_LL = tl.reshape(tl.where(is_diagonal_BDBD, inverse_BDD[:, :, None, :], 0.0), (L, L))
    row = tl.arange(0, L)[:, None]
    column = tl.arange(0, L)[None, :]
    for level in tl.static_range(4, 6):
        is_new = ((row >> (level + 1)) == (column >> (level + 1))) & ((row >> level) != (column >> level))
        left_LL = tl.dot(inverse_LL, tl.where(is_new, system_LL, 0.0), input_precision=PRECISION)
        inverse_LL -= tl.dot(left_LL, inverse_LL, input_precision=PRECISION)
    return inverse_LL


@triton.jit
def _diagonal_blocks(x_BDD, B: tl.constexpr, D: tl.constexpr):
    """Return the two diagonal blocks of half the size of each matrix."""
    half = tl.arange(0, 2)
    is_diagonal = half[None, :, None, None, None] == half[None, None, None, :, None]
    x = tl.reshape(x_BDD, (B, 2, D // 2, 2, D // 2))
    return tl.reshape(tl.sum(tl.where(is_diagonal, x, 0.0), 3), (2 * B, D // 2, D // 2))


@triton.jit
def _block_diagonal(x_BDD, B: tl.constexpr, D: tl.constexpr):
    """Return the matrices whose diagonal blocks are each two of these, and zero elsewhere."""
    half = tl.arange(0, 2)
    is_diagonal = half[None, :, None, None, None] == half[None, None, None, :, None]
    x = tl.reshape(x_BDD, (B // 2, 2, D, 1, D))
    return tl.reshape(tl.where(is_diagonal, x, 0.0), (B // 2, 2 * D, 2 * D))


@triton.jit
def _join_blocks(inverse_BDD, system_BDD, D: tl.constexpr, level: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverse of the diagonal blocks of ``2 ** level`` rows, return that of the blocks twice as large.

    With ``X`` the former and ``Q`` what the larger blocks have besides, it is ``X - X Q X``.
    """
    i = tl.arange(0, D)[None, :, None]
    j = tl.arange(0, D)[None, None, :]
    is_new = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
    left_BDD = tl.dot(inverse_BDD, tl.where(is_new, system_BDD, 0.0), input_precision=PRECISION)
    return inverse_BDD - tl.dot(left_BDD, inverse_BDD, input_precision=PRECISION)


@triton.jit
def _inverse_in_parts(system_LL, PRECISION: tl.constexpr):
    """Invert ``I + system``, strictly lower triangular and of 64 rows, from diagonal blocks of 2, 4, ..., 32 rows."""
    system_2 = _diagonal_blocks(tl.reshape(system_LL, (1, 64, 64)), 1, 64)
    system_4 = _diagonal_blocks(system_2, 2, 32)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    inverse_4 = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system_4, 0.0)
    inverse_4 = _join_blocks(inverse_4, system_4, 16, 1, PRECISION)
    inverse_4 = _join_blocks(inverse_4, system_4, 16, 2, PRECISION)
    inverse_4 = _join_blocks(inverse_4, system_4, 16, 3, PRECISION)
    inverse_2 = _join_blocks(_block_diagonal(inverse_4, 4, 16), system_2, 32, 4, PRECISION)

    # The last two blocks by themselves: an eighth of the products of 64 rows.
    half = tl.arange(0, 2)
    is_corner = (half[:, None, None, None] == 1) & (half[None, None, :, None] == 0)
    corner = tl.sum(tl.sum(tl.where(is_corner, tl.reshape(system_LL, (2, 32, 2, 32)), 0.0), 2), 0)
    upper = tl.sum(tl.where(half[:, None, None] == 0, inverse_2, 0.0), 0)
    lower = tl.sum(tl.where(half[:, None, None] == 1, inverse_2, 0.0), 0)
    corner = tl.dot(tl.dot(lower, corner, input_precision=PRECISION), upper, input_precision=PRECISION)
    is_diagonal = half[:, None, None, None] == half[None, None, :, None]
    blocks = tl.where(is_diagonal, inverse_2[:, :, None, :], tl.where(is_corner, -corner[None, :, None, :], 0.0))
    return tl.reshape(blocks, (64, 64))


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    attend_ptr,
    write_ptr,
    scales_ptr,
    decay_ptr,
    starts_ptr,
    lengths_ptr,
    num_tokens,
    stride_qt,
    stride_qg,
    stride_kt,
    stride_kg,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    H: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Compute what one chunk needs of ``HEADS_PER_PROGRAM`` value heads that share a key head."""
    first_head = tl.program_id(0) * HEADS_PER_PROGRAM
    chunk = tl.program_id(1)
    key_head = first_head // HEADS_PER_KEY
    start = tl.load(starts_ptr + chunk)
    length = tl.load(lengths_ptr + chunk).to(tl.int32)
    row = tl.arange(0, L)
    column = tl.arange(0, BLOCK_K)
    is_token = row < length
    token = start + row
    is_key = is_token[:, None] & (column < K)[None, :]
    k_LK = tl.load(k_ptr + token[:, None] * stride_kt + key_head * stride_kg + column[None, :], mask=is_key, other=0.0)
    q_LK = tl.load(q_ptr + token[:, None] * stride_qt + key_head * stride_qg + column[None, :], mask=is_key, other=0.0)
    k_factor = tl.rsqrt(tl.sum(k_LK.to(tl.float32) * k_LK.to(tl.float32), 1) + EPS)
    q_factor = tl.rsqrt(tl.sum(q_LK.to(tl.float32) * q_LK.to(tl.float32), 1) + EPS) * (K**-0.5)
    keys_LL = tl.dot(k_LK, tl.trans(k_LK), input_precision=PRECISION) * k_factor[:, None] * k_factor[None, :]
    queries_LL = tl.dot(q_LK, tl.trans(k_LK), input_precision=PRECISION) * q_factor[:, None] * k_factor[None, :]
    is_before = row[:, None] > row[None, :]
    is_not_after = row[:, None] >= row[None, :]

    for i in tl.range(HEADS_PER_PROGRAM, num_stages=1):
        head = first_head + i
        a = tl.load(a_ptr + token * stride_at + head * stride_ah, mask=is_token, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * stride_bt + head * stride_bh, mask=is_token, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
        log_decay = -rate * _softplus(a + tl.load(dt_bias_ptr + head).to(tl.float32))
        log_decay = tl.maximum(log_decay, MIN_LOG, propagate_nan=tl.PropagateNan.ALL)
        log_decay = tl.where(is_token, log_decay, 0.0)
        beta = tl.where(is_token, tl.sigmoid(b), 0.0)

        # A difference of large sums must keep the small decays that came after a strong one. So the sums are
        # float64, but no matrix is: the high halves' difference is exact where the exponential is not 0.
        sum_L = tl.cumsum(log_decay.to(tl.float64), 0)
        total = tl.sum(log_decay.to(tl.float64), 0)
        high = sum_L.to(tl.float32)
        low = (sum_L - high.to(tl.float64)).to(tl.float32)
        difference_LL = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        decays_LL = tl.exp(tl.minimum(difference_LL, 0.0))
        from_start = tl.exp(high)
        to_end = tl.exp(tl.minimum((total - sum_L).to(tl.float32), 0.0))

        weights_LL = tl.where(is_not_after, queries_LL * decays_LL, 0.0).to(k_LK.dtype)
        system_LL = tl.where(is_before, keys_LL * decays_LL * beta[:, None], 0.0)
        inverse_LL = _inverse_in_parts(system_LL, INVERSE) if IN_PARTS else _inverse_unit_lower(system_LL, L, INVERSE)
        solve_LL = inverse_LL * beta[None, :]
        attend_LL = tl.dot(weights_LL, solve_LL.to(k_LK.dtype), input_precision=PRECISION)
        ending_LL = solve_LL * (to_end * k_factor)[:, None]
        write_LK = tl.dot(tl.trans(ending_LL.to(k_LK.dtype)), k_LK, input_precision=PRECISION)

        place = token * H + head
        tl.store(attend_ptr + place[:, None] * L + row[None, :], attend_LL.to(k_LK.dtype), mask=is_token[:, None])
        tl.store(write_ptr + place[:, None] * K + column[None, :], write_LK.to(k_LK.dtype), mask=is_key)
        scale = scales_ptr + head.to(tl.int64) * num_tokens + token
        tl.store(scale, from_start * k_factor, mask=is_token)
        tl.store(scale + H * num_tokens, from_start * q_factor, mask=is_token)
        tl.store(decay_ptr + chunk * H + head, tl.exp(total.to(tl.float32)))


@triton.jit(do_not_specialize=["num_tokens"])
def _advance_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    attend_ptr,
    write_ptr,
    scales_ptr,
    decay_ptr,
    out_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    first_chunks_ptr,
    num_tokens,
    stride_qt,
    stride_qg,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vh,
    stride_ss,
    H: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry ``BLOCK_V`` columns of one head's state through the chunks of one sequence."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // HEADS_PER_KEY
    row = tl.arange(0, L)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = key < K
    is_value = value < V
    is_state = is_key[:, None] & is_value[None, :]
    in_slot_KW = head * (K * V) + key[:, None] * V + value[None, :]
    q_head = q_ptr + key_head * stride_qg
    k_head = k_ptr + key_head * stride_kg
    v_head = v_ptr + head * stride_vh
    scale_head = scales_ptr + head.to(tl.int64) * num_tokens

    src = tl.load(src_ptr + sequence).to(tl.int64)
    state_KW = tl.load(state_ptr + src * stride_ss + in_slot_KW, mask=is_state & (src != 0), other=0.0).to(tl.float32)

    first = tl.load(first_chunks_ptr + sequence).to(tl.int32)
    end = tl.load(first_chunks_ptr + sequence + 1).to(tl.int32)
    # Where the next chunk lies is known a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0)
    for chunk in tl.range(first, end):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0)
        cut_slot = tl.load(cut_slots_ptr + chunk).to(tl.int64)
        decay = tl.load(decay_ptr + chunk * H + head)
        token = start + row
        is_token = row < length
        is_token_key = is_token[:, None] & is_key[None, :]
        is_token_value = is_token[:, None] & is_value[None, :]
        place = token * H + head
        query_scale = tl.load(scale_head + H * num_tokens + token, mask=is_token, other=0.0)
        k_LK = tl.load(k_head + token[:, None] * stride_kt + key[None, :], mask=is_token_key, other=0.0)
        q_LK = tl.load(q_head + token[:, None] * stride_qt + key[None, :], mask=is_token_key, other=0.0)
        v_LW = tl.load(v_head + token[:, None] * stride_vt + value[None, :], mask=is_token_value, other=0.0)
        read_scale = tl.load(scale_head + token, mask=is_token, other=0.0)
        write_LK = tl.load(write_ptr + place[:, None] * K + key[None, :], mask=is_token_key, other=0.0)
        attend_LL = tl.load(attend_ptr + place[:, None] * L + row[None, :], mask=is_token[:, None], other=0.0)

        operand_KW = state_KW.to(k_LK.dtype)
        read_LW = tl.dot(k_LK, operand_KW, input_precision=PRECISION)
        out_LW = tl.dot(q_LK, operand_KW, input_precision=PRECISION)
        error_LW = (v_LW.to(tl.float32) - read_LW * read_scale[:, None]).to(k_LK.dtype)
        state_KW = tl.dot(tl.trans(write_LK), error_LW, acc=state_KW * decay, input_precision=PRECISION)
        out_LW = tl.dot(attend_LL, error_LW, acc=out_LW * query_scale[:, None], input_precision=PRECISION)
        tl.store(
            out_ptr + place[:, None] * V + value[None, :], out_LW.to(out_ptr.dtype.element_ty), mask=is_token_value
        )
        if cut_slot != 0:
            tl.store(
                state_ptr + cut_slot * stride_ss + in_slot_KW, state_KW.to(state_ptr.dtype.element_ty), mask=is_state
            )
        start += length
        length = next_length

    dst = tl.load(dst_ptr + sequence).to(tl.int64)
    if dst != 0:
        tl.store(state_ptr + dst * stride_ss + in_slot_KW, state_KW.to(state_ptr.dtype.element_ty), mask=is_state)


class Prepared(NamedTuple):
    """What the first kernel hands to the second."""

    attend_THL: Tensor
    write_THK: Tensor
    scales_XHT: Tensor
    """float32; X: of what keys read from the state, of what queries read."""
    decay_CH: Tensor


def gdn_prefill(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_TGK``.

    As :func:`strandline.kernels.gdn.gdn_prefill`. The last dimension of q, k and v must be contiguous, and each slot's
    ``[H, K, V]``.
    """
    prepared = prepare(q_TGK, k_TGK, a_TH, b_TH, A_log_H, dt_bias_H, chunks)
    return advance(q_TGK, k_TGK, v_THV, prepared, state_SHKV, src_N, dst_N, chunks)


def prepare(
    q_TGK: Tensor,
    k_TGK: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    chunks: ChunkTable,
    launch: Launch = PREPARE,
    inverse_precision: str = INVERSE_PRECISION,
    is_inverse_in_parts: bool = INVERSE_IN_PARTS,
) -> Prepared:
    """Compute the matrices of all chunks."""
    num_tokens, num_key_heads, key_dim = k_TGK.shape
    num_heads = a_TH.shape[1]
    num_chunks = len(chunks.starts)
    heads_per_key = num_heads // num_key_heads
    # Deterministic, one kernel computes a chunk, whatever else there is.
    is_many = is_deterministic() or num_chunks * num_key_heads >= SPLIT_BELOW_PROGRAMS
    heads_per_program = heads_per_key if is_many else 1
    precision = _precision(q_TGK)
    device = q_TGK.device
    prepared = Prepared(
        torch.empty(num_tokens, num_heads, CHUNK_TOKENS, dtype=q_TGK.dtype, device=device),
        torch.empty(num_tokens, num_heads, key_dim, dtype=q_TGK.dtype, device=device),
        torch.empty(2, num_heads, num_tokens, dtype=torch.float32, device=device),
        torch.empty(num_chunks, num_heads, dtype=torch.float32, device=device),
    )
    _prepare_kernel[(num_heads // heads_per_program, num_chunks)](
        q_TGK,
        k_TGK,
        a_TH,
        b_TH,
        A_log_H,
        dt_bias_H,
        *prepared,
        chunks.starts_C,
        chunks.lengths_C,
        num_tokens,
        q_TGK.stride(0),
        q_TGK.stride(1),
        k_TGK.stride(0),
        k_TGK.stride(1),
        *a_TH.stride(),
        *b_TH.stride(),
        H=num_heads,
        HEADS_PER_KEY=heads_per_key,
        HEADS_PER_PROGRAM=heads_per_program,
        K=key_dim,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        L=CHUNK_TOKENS,
        EPS=L2_NORM_EPS,
        MIN_LOG=MIN_LOG_DECAY,
        PRECISION=precision,
        INVERSE=inverse_precision if q_TGK.dtype != torch.float32 else precision,
        IN_PARTS=is_inverse_in_parts,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return prepared


def advance(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    prepared: Prepared,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
    launch: Launch = ADVANCE,
    columns: int | None = None,
) -> Tensor:
    """Carry the states through the chunks; return ``out_THV``. ``columns``: of values in a program."""
    num_tokens, num_heads, value_dim = v_THV.shape
    _, num_key_heads, key_dim = k_TGK.shape
    if columns is None and is_deterministic():
        columns = ADVANCE_COLUMNS
    elif columns is None:
        programs = num_heads * chunks.num_sequences * triton.cdiv(value_dim, ADVANCE_COLUMNS_MANY)
        columns = ADVANCE_COLUMNS if programs < MANY_PROGRAMS else ADVANCE_COLUMNS_MANY
    block_v = min(columns, max(16, triton.next_power_of_2(value_dim)))
    out_THV = torch.empty(v_THV.shape, dtype=q_TGK.dtype, device=q_TGK.device)
    _advance_kernel[(triton.cdiv(value_dim, block_v), num_heads, chunks.num_sequences)](
        q_TGK,
        k_TGK,
        v_THV,
        *prepared,
        out_THV,
        state_SHKV,
        src_N,
        dst_N,
        chunks.starts_C,
        chunks.lengths_C,
        chunks.cut_slots_C,
        chunks.first_chunks_N1,
        num_tokens,
        q_TGK.stride(0),
        q_TGK.stride(1),
        k_TGK.stride(0),
        k_TGK.stride(1),
        v_THV.stride(0),
        v_THV.stride(1),
        state_SHKV.stride(0),
        H=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=block_v,
        L=CHUNK_TOKENS,
        PRECISION=_precision(q_TGK),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages if q_TGK.dtype != torch.float32 else 1,
    )
    return out_THV


def _precision(tensor: Tensor) -> str:
    """Return how operands are multiplied; narrower ones than float32 are exact in any mode."""
    return FLOAT32_PRECISION if tensor.dtype == torch.float32 else "tf32"
