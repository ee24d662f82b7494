"""Gated DeltaNet over the new tokens of many sequences, in Triton: two kernels around a chunk's 64 x 64 matrices.

With the raw keys ``k``, queries ``q`` and the state ``S`` before a chunk, and every scale a number per token::

    e = v - read * (k S);  out = query * (q S) + attend e;  S <- decay * S + write^T e

``attend = (decays * q k^T) X`` and ``write = (to_end * X)^T k``, where ``X = (I + A)^-1 diag(beta)`` is the UT
transform. None of them depends on the state: the first kernel computes them for all chunks at once. The second runs
through the chunks of a sequence, a block of value columns per program, with the state in float32 registers.
l2-normalisation is in the scales: the matrix units see raw inputs.

The second kernel keeps everything that depends on the state transposed, values by keys: then the state and the errors
are left operands, which the matrix units take from the registers that they left them in, and the right operands are
tiles as they lie in memory. Nothing on the way from one state to the next passes through shared memory.

In bfloat16 the operands of matrix products are rounded to bfloat16 (the state too, where it is one), those of the
inverse to float16: none of its entries exceeds ``max_beta``, for it is built of contractions. Sums are float32. In
float32 everything is.

Invariants: a cut's state is stored from the registers that carry it on. Rows past a chunk's end, which belong to other
chunks, affect no output and no state, and are not written. No ``src`` may equal the ``dst`` of another sequence, nor a
cut's slot: programs run in any order.

One variant of each kernel is compiled per dtype and layer shape (and of the second, one for few
sequences and one for many): numbers of tokens, chunks and sequences, and where slot tables start, ask for no other.

Source: Yang et al., "Gated Delta Networks", section 3.3; the inverse is built from its halves, as in ``gdn.py``.

Shape suffixes: as in ``gdn.py``, and C chunks, L rows of a padded chunk (64), W value columns of a
program, X scales per row (read, query), D channels of a head of any kind.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import ReplayBatch
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.chunkwise import MIN_LOG_DECAY
from strandline.kernels.gdn import L2_NORM_EPS
from strandline.kernels.gdn_short_triton import gdn_prefill_short
from strandline.kernels.replay import of_step
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2
from strandline.kernels.state_triton import FLOAT32_PRECISION, LOG2_E, fast_exp2, softplus, without_empty

PREPARE_WARPS = 4
"""One warpgroup per 64 x 64 matrix."""

PREPARE_REGISTERS: int | None = 168
"""Per thread: three programs share a multiprocessor then and hide each other's waits, and few registers spill.
8,192 tokens of 32 heads on an H200: 165 µs without a limit, 149 with this, 185 with 128."""


class Advance(NamedTuple):
    """Launch parameters of the second kernel."""

    columns: int
    """Value columns of a program; the matrix units take 64 rows, here columns, per four warps."""
    num_warps: int
    num_stages: int


FEW_PROGRAMS = Advance(columns=64, num_warps=4, num_stages=3)
"""Up to one program per multiprocessor: 214 µs for one sequence of 8,192 tokens, where 128 columns take 338."""

MANY_PROGRAMS = Advance(columns=128, num_warps=8, num_stages=3)
"""Beyond: keys and matrices are read once per head. 117 µs for 8 sequences of 1,024 tokens, where 64 columns take 149.
Three chunks in flight fill a multiprocessor; with two, 137."""


@triton.jit
def _join_blocks(inverse_LL, system_LL, level: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverse of the diagonal blocks of ``2 ** level`` rows, return that of the blocks twice as large.

    With ``X`` the former and ``-Q`` what the larger blocks have besides, it is ``X + X Q X``. Q is not cut out of the
    system: the whole is multiplied, and the result cut.
    """
    row = tl.arange(0, L)[:, None]
    column = tl.arange(0, L)[None, :]
    operand_LL = inverse_LL.to(system_LL.dtype)
    left_LL = tl.dot(operand_LL, system_LL, input_precision=PRECISION).to(system_LL.dtype)
    change_LL = tl.dot(left_LL, operand_LL, input_precision=PRECISION)
    return tl.where(((row ^ column) >> level) == 1, change_LL, inverse_LL)


@triton.jit
def inverse_unit_lower(minus_system_LL, L: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Invert ``I - minus_system``, strictly lower triangular, from its halves."""
    row = tl.arange(0, L)[:, None]
    column = tl.arange(0, L)[None, :]
    inverse_LL = tl.where(row == column, 1.0, tl.where((row ^ column) == 1, minus_system_LL, 0.0))
    system_LL = minus_system_LL.to(OPERAND)
    for level in tl.static_range(1, 6):
        inverse_LL = _join_blocks(inverse_LL, system_LL, level, L, PRECISION)
    return inverse_LL


@triton.jit(
    do_not_specialize=["stride_at", "stride_bt"],
    do_not_specialize_on_alignment=["a_ptr", "b_ptr", "starts_ptr", "lengths_ptr"],
)
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
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG: tl.constexpr,
    MAX_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Compute the matrices of one chunk and value head."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    key_head = head // HEADS_PER_KEY
    start = tl.load(starts_ptr + chunk)
    length = tl.load(lengths_ptr + chunk).to(tl.int32)
    # A CUDA graph's grid is sized for the largest number of chunks; the surplus programs return.
    if length == 0:
        return
    row = tl.arange(0, L)
    column = tl.arange(0, BLOCK_K)
    is_token = row < length
    is_key = is_token[:, None] & (column < K)[None, :]
    a_ptrs = a_ptr + start * stride_at + head * stride_ah + row * stride_at
    b_ptrs = b_ptr + start * stride_bt + head * stride_bh + row * stride_bt
    a = tl.load(a_ptrs, mask=is_token, other=0.0).to(tl.float32)
    b = tl.load(b_ptrs, mask=is_token, other=0.0).to(tl.float32)
    k_ptrs = k_ptr + start * stride_kt + key_head * stride_kg + (row[:, None] * stride_kt + column[None, :])
    q_ptrs = q_ptr + start * stride_qt + key_head * stride_qg + (row[:, None] * stride_qt + column[None, :])
    k_LK = tl.load(k_ptrs, mask=is_key, other=0.0)
    q_LK = tl.load(q_ptrs, mask=is_key, other=0.0)

    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    log_decay = -rate * softplus(a + tl.load(dt_bias_ptr + head).to(tl.float32))
    log_decay = tl.maximum(log_decay, MIN_LOG, propagate_nan=tl.PropagateNan.ALL)
    log_decay = tl.where(is_token, log_decay, 0.0) * LOG2_E
    beta = tl.where(is_token, MAX_BETA * tl.sigmoid(b), 0.0)
    # A difference of large sums must keep the small decays that came after a strong one. So the sums are
    # float64, but no matrix is: the high halves' difference is exact where the exponential is not 0.
    sum_L = tl.cumsum(log_decay.to(tl.float64), 0)
    total = tl.sum(log_decay.to(tl.float64), 0)
    high = sum_L.to(tl.float32)
    low = (sum_L - high.to(tl.float64)).to(tl.float32)

    k_factor = tl.rsqrt(tl.sum(k_LK.to(tl.float32) * k_LK.to(tl.float32), 1) + EPS)
    q_factor = tl.rsqrt(tl.sum(q_LK.to(tl.float32) * q_LK.to(tl.float32), 1) + EPS) * (K**-0.5)
    keys_LL = tl.dot(k_LK, tl.trans(k_LK), input_precision=PRECISION)
    is_before = row[:, None] > row[None, :]
    is_not_after = row[:, None] >= row[None, :]
    difference_LL = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decays_LL = fast_exp2(tl.where(is_not_after, difference_LL, float("-inf"))) * k_factor[None, :]
    minus_system_LL = tl.where(is_before, keys_LL * decays_LL * (-k_factor * beta)[:, None], 0.0)
    inverse_LL = inverse_unit_lower(minus_system_LL, L, INVERSE, PRECISION)
    solve_LL = inverse_LL * beta[None, :]
    to_end = tl.exp2((total - sum_L).to(tl.float32))
    ending_LL = solve_LL * (to_end * k_factor)[:, None]
    write_LK = tl.dot(tl.trans(ending_LL.to(k_LK.dtype)), k_LK, input_precision=PRECISION)
    place = (chunk * H + head).to(tl.int64)
    write_ptrs = write_ptr + place * (L * BLOCK_K) + (row[:, None] * BLOCK_K + column[None, :])
    tl.store(write_ptrs, write_LK.to(k_LK.dtype))

    # The queries' product comes this late for the registers: the inverse needs them all.
    queries_LL = tl.dot(q_LK, tl.trans(k_LK), input_precision=PRECISION)
    weights_LL = queries_LL * decays_LL * q_factor[:, None]
    attend_LL = tl.dot(weights_LL.to(k_LK.dtype), solve_LL.to(k_LK.dtype), input_precision=PRECISION)
    tl.store(attend_ptr + place * (L * L) + (row[:, None] * L + row[None, :]), attend_LL.to(k_LK.dtype))
    from_start = tl.exp2(high)
    scale_ptrs = scales_ptr + place * (2 * L) + row
    tl.store(scale_ptrs, from_start * k_factor)
    tl.store(scale_ptrs + L, from_start * q_factor)
    tl.store(decay_ptr + place, tl.exp2(total.to(tl.float32)))


@triton.jit(
    do_not_specialize=["num_tokens", "num_chunks"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr", "first_chunks_ptr"
    ],
)  # fmt: skip
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
    num_chunks,
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
    BLOCK_W: tl.constexpr,
    L: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Carry ``BLOCK_W`` columns of one head's state through the chunks of one sequence.

    Without scales, these are in the keys and queries, and decays are a number per key channel.
    """
    first_value = tl.program_id(0) * BLOCK_W
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // HEADS_PER_KEY
    row = tl.arange(0, L)
    key = tl.arange(0, BLOCK_K)
    value = first_value + tl.arange(0, BLOCK_W)
    is_value = value < V
    is_state_KW = (key < K)[:, None] & is_value[None, :]
    in_slot_KW = head * (K * V) + key[:, None] * V + value[None, :]
    q_tiles = tl.make_tensor_descriptor(
        q_ptr, [num_tokens, H // HEADS_PER_KEY * stride_qg], [stride_qt, 1], [L, BLOCK_K]
    )
    k_tiles = tl.make_tensor_descriptor(
        k_ptr, [num_tokens, H // HEADS_PER_KEY * stride_kg], [stride_kt, 1], [L, BLOCK_K]
    )
    v_tiles = tl.make_tensor_descriptor(v_ptr, [num_tokens, H * stride_vh], [stride_vt, 1], [L, BLOCK_W])
    attend_tiles = tl.make_tensor_descriptor(attend_ptr, [num_chunks * (H * L), L], [L, 1], [L, L])
    write_tiles = tl.make_tensor_descriptor(write_ptr, [num_chunks * (H * L), BLOCK_K], [BLOCK_K, 1], [L, BLOCK_K])

    src = tl.load(src_ptr + sequence).to(tl.int64)
    state_KW = tl.load(state_ptr + src * stride_ss + in_slot_KW, mask=is_state_KW & (src != 0), other=0.0)
    state_WK = tl.trans(state_KW.to(tl.float32))
    first = tl.load(first_chunks_ptr + sequence).to(tl.int32)
    end = without_empty(first, tl.load(first_chunks_ptr + sequence + 1).to(tl.int32), lengths_ptr)
    # The next chunk's location is loaded a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0).to(tl.int32)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0).to(tl.int32)
    for chunk in tl.range(first, end, num_stages=NUM_STAGES):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0).to(tl.int32)
        if HAS_SCALES:
            decay = tl.load(decay_ptr + chunk * H + head)
        else:
            decay = tl.load(decay_ptr + (chunk * H + head).to(tl.int64) * BLOCK_K + key)[None, :]
        cut_slot = tl.load(cut_slots_ptr + chunk)
        is_token = row < length
        place = chunk * H + head
        k_LK = k_tiles.load([start, key_head * stride_kg])
        q_LK = q_tiles.load([start, key_head * stride_qg])
        v_LW = v_tiles.load([start, head * stride_vh + first_value])
        write_LK = write_tiles.load([place * L, 0])
        attend_LL = attend_tiles.load([place * L, 0])
        if HAS_SCALES:
            scale_ptrs = scales_ptr + place.to(tl.int64) * (2 * L) + row
            read_scale = tl.load(scale_ptrs)[None, :]
            query_scale = tl.load(scale_ptrs + L)[None, :]
        else:
            read_scale = 1.0
            query_scale = 1.0

        operand_WK = state_WK.to(k_LK.dtype)
        read_WL = tl.dot(operand_WK, tl.trans(k_LK), input_precision=PRECISION)
        error_WL = tl.trans(v_LW).to(tl.float32) - read_WL * read_scale
        error_WL = tl.where(is_token[None, :], error_WL, 0.0).to(k_LK.dtype)
        state_WK = tl.dot(error_WL, write_LK, acc=state_WK * decay, input_precision=PRECISION)
        out_WL = tl.dot(operand_WK, tl.trans(q_LK), input_precision=PRECISION) * query_scale
        out_WL = tl.dot(error_WL, tl.trans(attend_LL), acc=out_WL, input_precision=PRECISION)
        out_ptrs = out_ptr + (start.to(tl.int64) * (H * V) + head * V) + (row[:, None] * (H * V) + value[None, :])
        out_LW = tl.trans(out_WL.to(out_ptr.dtype.element_ty))
        tl.store(out_ptrs, out_LW, mask=is_token[:, None] & is_value[None, :])
        if cut_slot != 0:
            cut_KW = tl.trans(state_WK).to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + cut_slot.to(tl.int64) * stride_ss + in_slot_KW, cut_KW, mask=is_state_KW)
        start += length
        length = next_length

    dst = tl.load(dst_ptr + sequence).to(tl.int64)
    if dst != 0:
        last_KW = tl.trans(state_WK).to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + dst * stride_ss + in_slot_KW, last_KW, mask=is_state_KW)


class Prepared(NamedTuple):
    """Results of the first kernel for the second. Keys are padded to a power of two."""

    attend_CHLL: Tensor
    write_CHLK: Tensor
    scales_CHXL: Tensor | None
    """float32; X: of what keys read from the state, of what queries read. None: these are scaled."""
    decay: Tensor
    """float32, of a chunk and head; or of each key channel, where there are no scales."""


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
    max_beta: int = 1,
    replay: ReplayBatch | None = None,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_TGK``.

    As :func:`strandline.kernels.gdn.gdn_prefill`. The last dimension of q, k and v must be contiguous, and each slot's
    ``[H, K, V]``. Copies q, k or v whose rows or heads do not start at multiples of 16 bytes.
    """
    inputs = (q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H)
    if chunks.is_short:
        return gdn_prefill_short(*inputs, state_SHKV, src_N, dst_N, chunks, max_beta, replay)
    launch = choose_launch(chunks, *v_THV.shape[1:])
    return of_step(replay, _prefill(*inputs, state_SHKV, src_N, dst_N, chunks, max_beta, launch))


def gdn_prefill_invariant(
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
    max_beta: int = 1,
    replay: ReplayBatch | None = None,
) -> Tensor:
    """As :func:`gdn_prefill`, with the same kernel for any number of other sequences."""
    inputs = (q_TGK, k_TGK, v_THV, a_TH, b_TH, A_log_H, dt_bias_H)
    return of_step(replay, _prefill(*inputs, state_SHKV, src_N, dst_N, chunks, max_beta, FEW_PROGRAMS))


def _prefill(
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
    max_beta: int,
    launch: Advance,
) -> Tensor:
    q_TGK, k_TGK, v_THV = aligned(q_TGK), aligned(k_TGK), aligned(v_THV)
    prepared = prepare(q_TGK, k_TGK, a_TH, b_TH, A_log_H, dt_bias_H, chunks, max_beta)
    return advance(q_TGK, k_TGK, v_THV, prepared, state_SHKV, src_N, dst_N, chunks, launch)


def prepare(
    q_TGK: Tensor,
    k_TGK: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    chunks: ChunkTable,
    max_beta: int = 1,
) -> Prepared:
    """Compute the matrices of all chunks."""
    _, num_key_heads, key_dim = k_TGK.shape
    num_heads, num_chunks = a_TH.shape[1], len(chunks.starts)
    block_k = max(16, next_power_of_2(key_dim))
    is_float32 = q_TGK.dtype == torch.float32
    dtype, device = q_TGK.dtype, q_TGK.device
    prepared = Prepared(
        torch.empty(num_chunks, num_heads, CHUNK_TOKENS, CHUNK_TOKENS, dtype=dtype, device=device),
        torch.empty(num_chunks, num_heads, CHUNK_TOKENS, block_k, dtype=dtype, device=device),
        torch.empty(num_chunks, num_heads, 2, CHUNK_TOKENS, dtype=torch.float32, device=device),
        torch.empty(num_chunks, num_heads, dtype=torch.float32, device=device),
    )
    _prepare_kernel[(num_heads, num_chunks)](
        q_TGK,
        k_TGK,
        a_TH,
        b_TH,
        A_log_H,
        dt_bias_H,
        *prepared,
        chunks.starts_C,
        chunks.lengths_C,
        q_TGK.stride(0),
        q_TGK.stride(1),
        k_TGK.stride(0),
        k_TGK.stride(1),
        *a_TH.stride(),
        *b_TH.stride(),
        H=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        K=key_dim,
        BLOCK_K=block_k,
        L=CHUNK_TOKENS,
        EPS=L2_NORM_EPS,
        MIN_LOG=MIN_LOG_DECAY,
        MAX_BETA=max_beta,
        PRECISION=FLOAT32_PRECISION,
        INVERSE=tl.float32 if is_float32 else tl.float16,
        num_warps=PREPARE_WARPS,
        num_stages=1,
        maxnreg=None if is_float32 else PREPARE_REGISTERS,
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
    launch: Advance,
) -> Tensor:
    """Carry the states through the chunks; return ``out_THV``."""
    num_tokens, num_heads, value_dim = v_THV.shape
    _, num_key_heads, key_dim = k_TGK.shape
    block_w = min(launch.columns, max(16, next_power_of_2(value_dim)))
    out_THV = torch.empty(v_THV.shape, dtype=q_TGK.dtype, device=q_TGK.device)
    # The tiles' descriptions are made by the kernel: on the host they would take longer than the launch.
    triton.set_allocator(_scratch)
    _advance_kernel[(cdiv(value_dim, block_w), num_heads, chunks.num_sequences)](
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
        len(chunks.starts),
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
        BLOCK_K=prepared.write_CHLK.shape[3],
        BLOCK_W=block_w,
        L=CHUNK_TOKENS,
        HAS_SCALES=prepared.scales_CHXL is not None,
        PRECISION=FLOAT32_PRECISION,
        NUM_STAGES=launch.num_stages if q_TGK.dtype != torch.float32 else 1,
        num_warps=launch.num_warps,
    )
    return out_THV


def choose_launch(chunks: ChunkTable, num_heads: int, value_dim: int) -> Advance:
    """Return the launch parameters that carry the states of all sequences' heads.

    A padded step most likely has few long sequences. Where it has many, they are short.
    """
    programs = chunks.num_sequences * num_heads * cdiv(value_dim, FEW_PROGRAMS.columns)
    return FEW_PROGRAMS if chunks.is_padded or programs <= NUM_SMS else MANY_PROGRAMS


def aligned(x_THD: Tensor) -> Tensor:
    """Return the tensor with rows and heads at multiples of 16 bytes, as the copies of tiles need them."""
    items = 16 // x_THD.element_size()
    stride_t, stride_h, _ = x_THD.stride()
    if stride_t % items == 0 and stride_h % items == 0 and x_THD.data_ptr() % 16 == 0:
        return x_THD
    num_tokens, num_heads, size = x_THD.shape
    padded_THD = x_THD.new_zeros(num_tokens, num_heads, -(-size // items) * items)
    padded_THD[:, :, :size] = x_THD
    return padded_THD[:, :, :size]


def _scratch(num_bytes: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for the descriptions of tiles; torch's is aligned to 512 bytes, and ordered with the stream."""
    return torch.empty(num_bytes, dtype=torch.int8, device="cuda")
