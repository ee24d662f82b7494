"""Gated DeltaNet over the new tokens of many sequences, in Triton: two kernels around a chunk's 64 x 64 matrices.

With the raw keys ``k``, queries ``q`` and the state ``S`` before a chunk, and every scale a number per token::

    e = v - read * (k S);  out = query * (q S) + attend e;  S <- decay * S + write^T e

``attend = (decays * q k^T) X`` and ``write = (to_end * X)^T k``, where ``X = (I + A)^-1 diag(beta)`` is the UT
transform. None of them depends on the state: the kernel of this module computes them for all chunks at once. That of
``delta_rule_triton.py`` carries the states through the chunks. l2-normalisation is in the scales: the matrix units see
raw inputs.

In bfloat16 the operands of matrix products are rounded to bfloat16, those of the inverse to float16: none of its
entries exceeds ``max_beta``, for it is built of contractions. Sums are float32. In float32 everything is.

Invariants: those of ``delta_rule_triton.py``. One variant of the kernel is compiled per dtype and layer shape.

Source: Yang et al., "Gated Delta Networks", section 3.3; the inverse is built from its halves, as in ``gdn.py``.

Shape suffixes: as in ``gdn.py``, and C chunks, L rows of a padded chunk (64), X scales per row (read,
query).
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.gpu import gpu_of
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.delta_rule_triton import (
    FEW_PROGRAMS,
    Prepared,
    advance,
    aligned,
    choose_launch,
)
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_short_triton import gdn_prefill_short
from strandline.kernels.recurrences.rerun import of_step
from strandline.kernels.sizes import next_power_of_2, strides
from strandline.kernels.state_triton import FLOAT32_PRECISION, LOG2_E, fast_exp2, softplus

PREPARE_WARPS = 4
"""One warpgroup per 64 x 64 matrix."""

PREPARE_REGISTERS: int | None = 168
"""Per thread: three programs share a multiprocessor then and hide each other's waits, and few registers spill.
8,192 tokens of 32 heads on an H200: 165 µs without a limit, 149 with this, 185 with 128. No limit where registers hold
all operands of matrix products."""


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
    tile = (chunk * H + head).to(tl.int64)
    write_ptrs = write_ptr + tile * (L * BLOCK_K) + (row[:, None] * BLOCK_K + column[None, :])
    tl.store(write_ptrs, write_LK.to(k_LK.dtype))

    # The queries' product comes this late for the registers: the inverse needs them all.
    queries_LL = tl.dot(q_LK, tl.trans(k_LK), input_precision=PRECISION)
    weights_LL = queries_LL * decays_LL * q_factor[:, None]
    attend_LL = tl.dot(weights_LL.to(k_LK.dtype), solve_LL.to(k_LK.dtype), input_precision=PRECISION)
    tl.store(attend_ptr + tile * (L * L) + (row[:, None] * L + row[None, :]), attend_LL.to(k_LK.dtype))
    from_start = tl.exp2(high)
    scale_ptrs = scales_ptr + tile * (2 * L) + row
    tl.store(scale_ptrs, from_start * k_factor)
    tl.store(scale_ptrs + L, from_start * q_factor)
    tl.store(decay_ptr + tile, tl.exp2(total.to(tl.float32)))


def gdn_prefill(
    inputs: GatedDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    rerun: RerunBatch | None = None,
    out_THV: Tensor | None = None,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``q_TGK``.

    As ``gdn.gdn_prefill``. The last dimension of q, k and v must be contiguous, and each slot's
    ``[H, K, V]``. Copies q, k or v whose rows or heads do not start at multiples of 16 bytes.
    """
    is_fixed = launches is Launches.FIXED
    if chunks.is_short and not is_fixed:
        out = gdn_prefill_short(inputs, state_SHKV, slots, chunks, rerun)
        return out if out_THV is None else out_THV.copy_(out)
    launch = FEW_PROGRAMS if is_fixed else choose_launch(chunks, *inputs.v_THV.shape[1:])
    qkv = aligned(inputs.q_TGK), aligned(inputs.k_TGK), aligned(inputs.v_THV)
    prepared = prepare(GatedDeltaInputs(*qkv, *inputs[3:]), chunks)
    return of_step(rerun, advance(qkv, prepared, state_SHKV, slots, chunks, launch, out_THV))


def prepare(inputs: GatedDeltaInputs, chunks: ChunkTable) -> Prepared:
    """Compute the matrices of all chunks."""
    q_TGK, k_TGK, _, a_TH, b_TH, A_log_H, dt_bias_H, max_beta = inputs
    _, num_key_heads, key_dim = k_TGK.shape
    num_heads, num_chunks = a_TH.shape[1], len(chunks.starts)
    block_k = max(16, next_power_of_2(key_dim))
    dtype, device = q_TGK.dtype, q_TGK.device
    is_float32 = dtype == torch.float32
    is_unlimited = is_float32 or gpu_of(device).multiplies_from_registers
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
        *strides(q_TGK, k_TGK),
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
        maxnreg=None if is_unlimited else PREPARE_REGISTERS,
    )
    return prepared
