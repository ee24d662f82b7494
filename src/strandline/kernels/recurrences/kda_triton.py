"""Kimi Delta Attention in Triton: a token per sequence by one kernel, prompts by two.

Prompts: with the scaled queries and keys of a chunk, each decayed from the chunk's start, and the state ``S`` before::

    e = v - k S;  out = q S + attend e;  S <- diag(decay) S + write^T e

Matrices that do not depend on the state are computed for all chunks at once: ``attend = (q k^T * decays) X`` and
``write = X^T k``, where ``X = (I + A)^-1 diag(beta)``. Then the kernel of ``delta_rule_triton.py`` carries the states
on.

Decays differ from channel to channel, so those between two tokens are not a factor of the tokens' product, but parts of
its two factors, to and from the middle of the chunk. Where 32 tokens decay so much that this product might overflow,
there are three: of a block of ``2 b`` tokens, the product of second half and first has two factors of at most 1, one
with the decays from the middle, the other with those to it. Two such products of the whole chunk, for ``b`` of 32 and
16, and one with the decays to and from the middles of blocks of 16 tokens make up all pairs. Where 8 tokens decay so
much that the last might overflow, there are six, for ``b`` from 1 to 32, and the diagonal.

In bfloat16 the operands of matrix products are rounded to bfloat16, those of the inverse to float16, and sums are
float32. Log decays are summed in float32: between two tokens of a chunk, they are off by one part in 2 ** 23 of what
the chunk has decayed by.

Decode: a program owns ``BLOCK_V`` value channels of one head of one sequence: it reads its ``[K, BLOCK_V]`` tile of the
state once, before the launch ahead of it has ended, and writes it once.

Invariants: those of ``delta_rule_triton.py``; nor may a decode's ``src`` be another sequence's ``dst``.

Shape suffixes: as in ``kda.py`` and ``gdn_prefill_triton.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.decode_launches import HEADS, choose_decode
from strandline.kernels.recurrences.delta_rule_triton import (
    FEW_PROGRAMS,
    Prepared,
    advance,
    aligned,
    choose_launch,
)
from strandline.kernels.recurrences.gdn import L2_NORM_EPS
from strandline.kernels.recurrences.gdn_prefill_triton import inverse_unit_lower
from strandline.kernels.recurrences.kda import KimiDeltaInputs
from strandline.kernels.sizes import cdiv, next_power_of_2, strides
from strandline.kernels.state_triton import (
    FLOAT32_PRECISION,
    LOG2_E,
    at_least,
    fast_exp2,
    load_state,
    softplus,
    store_state,
)

MIN_LOG2_DECAY = tl.constexpr(-160.0)
"""A token's decay that leaves nothing of a float32 state. Less would make the sums of a chunk less accurate."""

MAX_CHANGE = tl.constexpr(60.0)
"""Most log2 decay from a block's middle: products of two such factors, and their sums, are finite in float32."""

PREPARE_WARPS = 4
"""One warpgroup per 64 x 64 matrix."""

PREPARE_REGISTERS: int | None = None
"""Per thread; None: no limit. With 168, three programs share a multiprocessor, but 456 bytes a thread are spilled: a
layer takes 1,238 µs instead of 987 for 8,192 tokens on an H100."""

SLICE = 32
"""Channels of a chunk that are prepared together: tiles of all would not fit into registers. There are two
slices at least: compiled for one, by Triton 3.6 for Hopper, ``write`` is wrong in bfloat16."""


def kda_prefill(
    inputs: KimiDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_THK``.

    As ``kda.kda_prefill``. The last dimension of every tensor must be contiguous, and each
    slot's ``[H, K, V]``. No ``src`` may be the ``dst`` of another sequence, nor a cut's slot.
    """
    q_THK, k_THK, v_THV, f_THK, b_TH, A_log_H, dt_bias_HK, lower_bound = inputs
    launch = FEW_PROGRAMS if launches is Launches.FIXED else choose_launch(chunks, *v_THV.shape[1:])
    num_tokens, num_heads, key_dim = q_THK.shape
    num_chunks, dtype, device = len(chunks.starts), q_THK.dtype, q_THK.device
    block_k = max(2 * SLICE, next_power_of_2(key_dim))
    is_float32 = dtype == torch.float32
    # Rows that no chunk has are read with their neighbours', and left out: their memory may hold anything.
    scaled_q_THK, scaled_k_THK = (
        torch.empty(num_tokens, num_heads, block_k, dtype=dtype, device=device) for _ in range(2)
    )
    prepared = Prepared(
        torch.empty(num_chunks, num_heads, CHUNK_TOKENS, CHUNK_TOKENS, dtype=dtype, device=device),
        torch.empty(num_chunks, num_heads, CHUNK_TOKENS, block_k, dtype=dtype, device=device),
        None,
        torch.empty(num_chunks, num_heads, block_k, dtype=torch.float32, device=device),
    )
    _prepare_kernel[(num_heads, num_chunks)](
        q_THK, k_THK, f_THK, b_TH, A_log_H, dt_bias_HK, scaled_q_THK, scaled_k_THK,
        prepared.attend_CHLL, prepared.write_CHLK, prepared.decay, chunks.starts_C, chunks.lengths_C,
        *strides(q_THK, k_THK, f_THK, b_TH),
        LOWER_BOUND=lower_bound, H=num_heads, K=key_dim, BLOCK_K=block_k, BLOCK_S=SLICE, L=CHUNK_TOKENS,
        EPS=L2_NORM_EPS, PRECISION=FLOAT32_PRECISION,
        INVERSE=tl.float32 if is_float32 else tl.float16, num_warps=PREPARE_WARPS, num_stages=1,
        maxnreg=None if is_float32 else PREPARE_REGISTERS,
    )  # fmt: skip
    qkv = scaled_q_THK[..., :key_dim], scaled_k_THK[..., :key_dim], aligned(v_THV)
    return advance(qkv, prepared, state_SHKV, slots, chunks, launch)


@triton.jit
def _row_of(x_LK, row, row_L):
    """Return one row of a tile."""
    return tl.sum(tl.where((row_L == row)[:, None], x_LK, 0.0), 0)


@triton.jit
def _log2_decay(x, rate, LOWER_BOUND: tl.constexpr):
    """Return log2 decays, given what makes them: a projection and its bias, added up."""
    if LOWER_BOUND is None:
        log2_decay = at_least(-(rate * LOG2_E) * softplus(x), MIN_LOG2_DECAY)
    else:
        log2_decay = (LOWER_BOUND * LOG2_E) * tl.sigmoid(rate * x)
    return log2_decay


@triton.jit
def _sum_log2_decays(f_LK, bias_K, rate, is_token_LK, LOWER_BOUND: tl.constexpr):
    """Return the sums of some channels' log2 decays from the chunk's start; where there is no token, the last one's."""
    log2_decay_LK = _log2_decay(f_LK.to(tl.float32) + bias_K[None, :], rate, LOWER_BOUND)
    return tl.cumsum(tl.where(is_token_LK, log2_decay_LK, 0.0), 0)


@triton.jit
def _middles(x_LK, row_L, level, L: tl.constexpr, K: tl.constexpr):
    """Return, for every row, the last row of the first half of its block of ``2 ** (level + 1)`` rows."""
    middle_L = ((row_L >> (level + 1)) << (level + 1)) + ((1 << level) - 1)
    return tl.gather(x_LK, tl.broadcast_to(middle_L[:, None], [L, K]), 0)


@triton.jit
def _add_halves(
    keys_LL,
    queries_LL,
    q_LK,
    k_LK,
    sum_LK,
    row_L,
    level,
    L: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the decayed products of the second halves of blocks of ``2 ** (level + 1)`` rows and the first ones."""
    middle_LK = _middles(sum_LK, row_L, level, L, K)
    is_second_LK = ((row_L >> level) & 1 == 1)[:, None]
    factor_LK = fast_exp2(tl.where(is_second_LK, sum_LK - middle_LK, middle_LK - sum_LK))
    decayed_k_LK = (k_LK.to(tl.float32) * factor_LK).to(k_LK.dtype)
    decayed_q_LK = (q_LK.to(tl.float32) * factor_LK).to(k_LK.dtype)
    is_across_LL = (((row_L[:, None] ^ row_L[None, :]) >> level) == 1) & (row_L[:, None] > row_L[None, :])
    across_LL = tl.dot(decayed_k_LK, tl.trans(decayed_k_LK), input_precision=PRECISION)
    keys_LL += tl.where(is_across_LL, across_LL, 0.0)
    across_LL = tl.dot(decayed_q_LK, tl.trans(decayed_k_LK), input_precision=PRECISION)
    return keys_LL, queries_LL + tl.where(is_across_LL, across_LL, 0.0)


@triton.jit
def _add_blocks(keys_LL, queries_LL, q_LK, k_LK, change_LK, row_L, level: tl.constexpr, PRECISION: tl.constexpr):
    """Add the products of all pairs in blocks of ``2 ** level`` rows, decayed from the middle and to it."""
    factor_LK = fast_exp2(change_LK)
    decayed_q_LK = (q_LK.to(tl.float32) * factor_LK).to(k_LK.dtype)
    decayed_k_LK = (k_LK.to(tl.float32) * factor_LK).to(k_LK.dtype)
    grown_k_LK = (k_LK.to(tl.float32) * fast_exp2(-change_LK)).to(k_LK.dtype)
    is_block_LL = ((row_L[:, None] ^ row_L[None, :]) >> level) == 0
    inner_LL = tl.dot(decayed_k_LK, tl.trans(grown_k_LK), input_precision=PRECISION)
    keys_LL += tl.where(is_block_LL & (row_L[:, None] > row_L[None, :]), inner_LL, 0.0)
    inner_LL = tl.dot(decayed_q_LK, tl.trans(grown_k_LK), input_precision=PRECISION)
    queries_LL += tl.where(is_block_LL & (row_L[:, None] >= row_L[None, :]), inner_LL, 0.0)
    return keys_LL, queries_LL


@triton.jit
def _add_products(
    keys_LL, queries_LL, q_LK, k_LK, sum_LK, row_L, L: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the decayed products of keys, below the diagonal, and of queries and keys, on it and below.

    Compiled by Triton 3.6 with one branch for blocks of both sizes, the kernel reads outside its memory.
    """
    change_LK = sum_LK - _row_of(sum_LK, L // 2 - 1, row_L)[None, :]
    if tl.max(tl.max(tl.abs(change_LK), 1), 0) <= MAX_CHANGE:
        keys_LL, queries_LL = _add_blocks(keys_LL, queries_LL, q_LK, k_LK, change_LK, row_L, 6, PRECISION)
    else:
        first_level = 0
        # Blocks of 16 tokens, level 3 and below.
        change_LK = sum_LK - _middles(sum_LK, row_L, 3, L, K)
        if tl.max(tl.max(tl.abs(change_LK), 1), 0) <= MAX_CHANGE:
            first_level = 4
            keys_LL, queries_LL = _add_blocks(keys_LL, queries_LL, q_LK, k_LK, change_LK, row_L, 4, PRECISION)
        else:
            product_L = tl.sum(q_LK.to(tl.float32) * k_LK.to(tl.float32), 1)
            queries_LL += tl.where(row_L[:, None] == row_L[None, :], product_L[:, None], 0.0)
        for level in tl.range(first_level, 6, num_stages=1):
            keys_LL, queries_LL = _add_halves(keys_LL, queries_LL, q_LK, k_LK, sum_LK, row_L, level, L, K, PRECISION)
    return keys_LL, queries_LL


@triton.jit(do_not_specialize=["stride_bt"], do_not_specialize_on_alignment=["b_ptr", "starts_ptr", "lengths_ptr"])
def _prepare_kernel(
    q_ptr,
    k_ptr,
    f_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    scaled_q_ptr,
    scaled_k_ptr,
    attend_ptr,
    write_ptr,
    decay_ptr,
    starts_ptr,
    lengths_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_ft,
    stride_fh,
    stride_bt,
    LOWER_BOUND: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Compute what one chunk needs of one head. Norms are in the scales: the matrix units see raw inputs, decayed."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(starts_ptr + chunk)
    length = tl.load(lengths_ptr + chunk).to(tl.int32)
    # A CUDA graph's grid is sized for the largest number of chunks; the surplus programs return.
    if length == 0:
        return
    row_L = tl.arange(0, L)
    is_token_L = row_L < length
    q_ptr += start * stride_qt + head * stride_qh
    k_ptr += start * stride_kt + head * stride_kh
    f_ptr += start * stride_ft + head * stride_fh
    dt_bias_ptr += head * K
    scaled_q_ptr += (start * H + head) * BLOCK_K
    scaled_k_ptr += (start * H + head) * BLOCK_K
    tile = (chunk * H + head).to(tl.int64)
    write_ptr += tile * (L * BLOCK_K)
    dtype = scaled_q_ptr.dtype.element_ty
    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))

    q_square_L = tl.zeros([L], tl.float32)
    k_square_L = tl.zeros([L], tl.float32)
    for first in tl.range(0, BLOCK_K, BLOCK_S, num_stages=1):
        key_K = first + tl.arange(0, BLOCK_S)
        is_key_LK = is_token_L[:, None] & (key_K < K)[None, :]
        q_LK = tl.load(q_ptr + row_L[:, None] * stride_qt + key_K[None, :], mask=is_key_LK, other=0.0).to(tl.float32)
        k_LK = tl.load(k_ptr + row_L[:, None] * stride_kt + key_K[None, :], mask=is_key_LK, other=0.0).to(tl.float32)
        q_square_L += tl.sum(q_LK * q_LK, 1)
        k_square_L += tl.sum(k_LK * k_LK, 1)
    q_factor_L = tl.rsqrt(q_square_L + EPS) * (K**-0.5)
    k_factor_L = tl.rsqrt(k_square_L + EPS)

    keys_LL = tl.zeros([L, L], tl.float32)
    queries_LL = tl.zeros([L, L], tl.float32)
    for first in tl.range(0, BLOCK_K, BLOCK_S, num_stages=1):
        key_K = first + tl.arange(0, BLOCK_S)
        is_key_LK = is_token_L[:, None] & (key_K < K)[None, :]
        f_LK = tl.load(f_ptr + row_L[:, None] * stride_ft + key_K[None, :], mask=is_key_LK, other=0.0)
        q_LK = tl.load(q_ptr + row_L[:, None] * stride_qt + key_K[None, :], mask=is_key_LK, other=0.0)
        k_LK = tl.load(k_ptr + row_L[:, None] * stride_kt + key_K[None, :], mask=is_key_LK, other=0.0)
        bias_K = tl.load(dt_bias_ptr + key_K, mask=key_K < K, other=0.0).to(tl.float32)
        sum_LK = _sum_log2_decays(f_LK, bias_K, rate, is_token_L[:, None], LOWER_BOUND)
        last_K = _row_of(sum_LK, L - 1, row_L)
        tl.store(decay_ptr + tile * BLOCK_K + key_K, tl.exp2(last_K))
        from_start_LK = fast_exp2(sum_LK)
        scaled_LK = row_L[:, None] * (H * BLOCK_K) + key_K[None, :]
        scaled_q_LK = (q_LK.to(tl.float32) * q_factor_L[:, None] * from_start_LK).to(dtype)
        scaled_k_LK = (k_LK.to(tl.float32) * k_factor_L[:, None] * from_start_LK).to(dtype)
        tl.store(scaled_q_ptr + scaled_LK, scaled_q_LK, mask=is_token_L[:, None])
        tl.store(scaled_k_ptr + scaled_LK, scaled_k_LK, mask=is_token_L[:, None])
        # Until the system is solved, the keys decayed to the chunk's end wait where its result will be.
        ending_LK = (k_LK.to(tl.float32) * fast_exp2(last_K[None, :] - sum_LK)).to(dtype)
        tl.store(write_ptr + row_L[:, None] * BLOCK_K + key_K[None, :], ending_LK)
        keys_LL, queries_LL = _add_products(keys_LL, queries_LL, q_LK, k_LK, sum_LK, row_L, L, BLOCK_S, PRECISION)

    beta_L = tl.sigmoid(tl.load(b_ptr + (start + row_L) * stride_bt + head, mask=is_token_L, other=0.0).to(tl.float32))
    beta_L = tl.where(is_token_L, beta_L, 0.0)
    weights_LL = (queries_LL * q_factor_L[:, None] * k_factor_L[None, :]).to(dtype)
    minus_system_LL = keys_LL * (-k_factor_L * beta_L)[:, None] * k_factor_L[None, :]
    solve_LL = inverse_unit_lower(minus_system_LL, L, INVERSE, PRECISION) * beta_L[None, :]
    attend_LL = tl.dot(weights_LL, solve_LL.to(dtype), input_precision=PRECISION)
    tl.store(attend_ptr + tile * (L * L) + (row_L[:, None] * L + row_L[None, :]), attend_LL.to(dtype))
    ending_LL = tl.trans((solve_LL * k_factor_L[:, None]).to(dtype))
    tl.debug_barrier()
    for first in tl.range(0, BLOCK_K, BLOCK_S, num_stages=1):
        write_ptrs = write_ptr + row_L[:, None] * BLOCK_K + (first + tl.arange(0, BLOCK_S))[None, :]
        write_LK = tl.dot(ending_LL, tl.load(write_ptrs), input_precision=PRECISION).to(dtype)
        tl.debug_barrier()
        tl.store(write_ptrs, write_LK)


def kda_decode(
    inputs: KimiDeltaInputs, state_SHKV: Tensor, slots: Slots, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NHK``.

    The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be
    another sequence's ``dst``.
    """
    *tensors, lower_bound = inputs
    q_NHK, k_NHK, v_NHV, f_NHK, b_NH, *_ = tensors
    launch = choose_decode(HEADS, len(q_NHK), launches)
    num_sequences, num_heads, value_dim = v_NHV.shape
    key_dim = k_NHK.shape[2]
    out_NHV = torch.empty(v_NHV.shape, dtype=q_NHK.dtype, device=q_NHK.device)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _decode_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        *tensors, state_SHKV, *slots, out_NHV, *strides(q_NHK, k_NHK, v_NHV, f_NHK, b_NH), state_SHKV.stride(0),
        LOWER_BOUND=lower_bound, H=num_heads, K=key_dim, V=value_dim, BLOCK_K=next_power_of_2(key_dim), BLOCK_V=block_v,
        SCALE=key_dim**-0.5, EPS=L2_NORM_EPS, num_warps=launch.num_warps, **overlap_options(q_NHK),
    )  # fmt: skip
    return out_NHV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    f_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    f_row_stride,
    f_head_stride,
    b_row_stride,
    slot_stride,
    LOWER_BOUND: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Advance ``BLOCK_V`` value channels of a head of a sequence by a token."""
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    row_K = tl.arange(0, BLOCK_K)
    column_V = first_column + tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    tile_KV = head * (K * V) + row_K[:, None] * V + column_V[None, :]

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    state_KV = load_state(state_ptr, src, slot_stride, tile_KV, is_tile_KV)
    # The kernel before makes the inputs; states are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_ptrs = q_ptr + sequence * q_row_stride + head * q_head_stride + row_K
    k_ptrs = k_ptr + sequence * k_row_stride + head * k_head_stride + row_K
    f_ptrs = f_ptr + sequence * f_row_stride + head * f_head_stride + row_K
    q_K = tl.load(q_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    k_K = tl.load(k_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    f_K = tl.load(f_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    v_ptrs = v_ptr + sequence * v_row_stride + head * v_head_stride + column_V
    v_V = tl.load(v_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b_ptr + sequence * b_row_stride + head).to(tl.float32))
    bias_K = tl.load(dt_bias_ptr + head * K + row_K, mask=is_row_K, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    decay_K = tl.exp2(_log2_decay(f_K + bias_K, rate, LOWER_BOUND))
    q_K *= SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
    k_K *= 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)

    state_KV *= decay_K[:, None]
    written_V = beta * (v_V - tl.sum(state_KV * k_K[:, None], 0))
    out_V = tl.sum(state_KV * q_K[:, None], 0) + tl.sum(q_K * k_K, 0) * written_V
    out_ptrs = out_ptr + (sequence * H + head) * V + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
    state_KV += k_K[:, None] * written_V[None, :]
    store_state(state_ptr, dst, slot_stride, tile_KV, is_tile_KV, state_KV)
