"""Decode of Mamba-2 with the log of ``gdn_log.py``, in Triton.

Per head, with the weight ``w`` and the log decay ``g`` of the new token, and of each logged one its key ``k_i``, its
written value ``w_i v_i`` and the sum ``g_i`` of the log decays after it, the new token's included::

    out = exp(g_0) S^T q + sum_i exp(g_i) (k_i . q) w_i v_i + (k . q) w v + skip v

``g_0`` is the sum of all of them. A program owns ``BLOCK_V`` value channels of a head. It reads its tile of the state
before the launch ahead of it has ended, and writes it where the plan folds; otherwise it writes its channels of the
token's log entry, and one program of a group writes the key. Programs that walk through the heads of a group, and read
tiles ahead, take longer (``docs/decisions/0008-log-of-decoded-tokens.md``).

Invariants: no program reads a log entry that another one writes, as a step that folds appends nothing; entries past a
log's end are not read. No sequence's ``src`` may be another sequence's ``dst``.

Shape suffixes: as in ``head_decay_triton.py``; L entries of a log.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.decode_launches import HEADS_WITH_LOG, choose_decode, fit_registers
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.recurrences.gdn_log_triton import add_logged, load_logged, weights_of_logged
from strandline.kernels.recurrences.head_decay_triton import HeadDecayInputs, gate
from strandline.kernels.sizes import cdiv, next_power_of_2, strides
from strandline.kernels.state_triton import load_state, store_state


def decode_logged(
    inputs: HeadDecayInputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``v_NHV``.

    The last dimension of every tensor must be contiguous, each slot's ``[H, K, V]`` and each log.
    """
    q_NGK, k_NGK, v_NHV, gates, skip_H = inputs
    num_sequences, num_heads, value_dim = v_NHV.shape
    _, num_groups, key_dim = k_NGK.shape
    launch = fit_registers(choose_decode(HEADS_WITH_LOG, num_sequences), key_dim)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    out_NHV = torch.empty(v_NHV.shape, dtype=v_NHV.dtype, device=v_NHV.device)
    _decode_logged_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        q_NGK, k_NGK, v_NHV, *gates.arguments, skip_H, state_SHKV, *slots,
        memory.key_JGLK, memory.value_JHLV, memory.decay_JHL, logs.log_N, logs.len_N, logs.num_folded_N, out_NHV,
        *strides(q_NGK, k_NGK, v_NHV), state_SHKV.stride(0),
        HAS_STEPS=gates.dt_TH is not None, HAS_SKIP=skip_H is not None,
        G=num_groups, H=num_heads, K=key_dim, V=value_dim, L=memory.decay_JHL.shape[2],
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=block_v, MIN_LOG_DECAY=MIN_LOG_DECAY,
        num_warps=launch.num_warps, **overlap_options(v_NHV),
    )  # fmt: skip
    return out_NHV


@triton.jit
def _advance(
    state_KV,
    q_K,
    k_K,
    own_score,
    score_L,
    v_ptr,
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    dt_min,
    dt_max,
    dt_factor,
    skip_ptr,
    state_ptr,
    dst,
    slot_stride,
    key_ptrs_K,
    values_ptr,
    decays_ptr,
    log,
    length,
    out_ptr,
    head,
    first_column,
    is_row_K,
    HAS_STEPS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    IS_FOLDED: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
):
    """Advance a head of a sequence, whose state's tile has been read; fold its log, or append the token."""
    row_K = tl.arange(0, state_KV.shape[0])
    column_V = first_column + tl.arange(0, state_KV.shape[1])
    is_column_V = column_V < V
    v_V = tl.load(v_ptr + column_V, mask=is_column_V, other=0.0).to(tl.float32)
    value_ptrs_V = values_ptr + (log * H + head) * (L * V) + column_V
    logged_LV = load_logged(value_ptrs_V, is_column_V, V, length, L)
    decays_ptr += (log * H + head) * L
    dt = 0.0
    if HAS_STEPS:
        dt = tl.load(dt_ptr + head).to(tl.float32)
    weight, log_decay = gate(dt, rate_ptr, dt_bias_ptr, head, dt_min, dt_max, dt_factor, HAS_STEPS, MIN_LOG_DECAY)
    weight_L, carried = weights_of_logged(decays_ptr, length, log_decay, L)
    written_V = weight * v_V
    out_V = tl.sum((score_L * weight_L)[:, None] * logged_LV, 0) + own_score * written_V
    if HAS_SKIP:
        out_V += tl.load(skip_ptr + head).to(tl.float32) * v_V
    out_V += tl.sum(state_KV * q_K[:, None], 0) * carried
    tl.store(out_ptr + head * V + column_V, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
    if IS_FOLDED:
        state_KV *= carried
        state_KV = add_logged(state_KV, key_ptrs_K, is_row_K, K, value_ptrs_V, is_column_V, V, weight_L, length)
        state_KV += k_K[:, None] * written_V[None, :]
        offset_KV = head * (K * V) + row_K[:, None] * V + column_V[None, :]
        store_state(state_ptr, dst, slot_stride, offset_KV, is_row_K[:, None] & is_column_V[None, :], state_KV)
    elif dst != 0:
        is_first = first_column == 0
        tl.store(value_ptrs_V + length * V, written_V, mask=is_column_V)
        tl.store(key_ptrs_K + length * K, k_K, mask=is_row_K & is_first & (head % (H // G) == 0))
        tl.store(decays_ptr + length, log_decay, mask=is_first)


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["stride_dt", "dt_min", "dt_max", "dt_factor"],
    do_not_specialize_on_alignment=["dt_ptr", "src_ptr", "dst_ptr", "log_ptr", "len_ptr", "num_folded_ptr"],
)
def _decode_logged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    stride_dt,
    dt_min,
    dt_max,
    dt_factor,
    skip_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    log_ptr,
    len_ptr,
    num_folded_ptr,
    out_ptr,
    q_row_stride,
    q_group_stride,
    k_row_stride,
    k_group_stride,
    v_row_stride,
    v_head_stride,
    slot_stride,
    HAS_STEPS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Advance ``BLOCK_V`` value channels of a head of a sequence by a token."""
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    group = head // (H // G)
    row_K = tl.arange(0, BLOCK_K)
    column_V = first_column + tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_tile_KV = is_row_K[:, None] & (column_V < V)[None, :]
    tile_KV = row_K[:, None] * V + column_V[None, :]

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    log = tl.load(log_ptr + sequence)
    length = tl.load(len_ptr + sequence)
    num_folded = tl.load(num_folded_ptr + sequence)
    state_KV = load_state(state_ptr, src, slot_stride, head * (K * V) + tile_KV, is_tile_KV)
    key_ptrs_K = keys_ptr + (log * G + group) * (L * K) + row_K
    logged_LK = load_logged(key_ptrs_K, is_row_K, K, length, L)
    # The kernel before makes the inputs; states and logs are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_ptrs = q_ptr + sequence * q_row_stride + group * q_group_stride + row_K
    q_K = tl.load(q_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    k_ptrs = k_ptr + sequence * k_row_stride + group * k_group_stride + row_K
    k_K = tl.load(k_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    own_score = tl.sum(q_K * k_K, 0)
    score_L = tl.sum(logged_LK * q_K[None, :], 1)
    v_ptr += sequence * v_row_stride + head * v_head_stride
    if HAS_STEPS:
        dt_ptr += sequence * stride_dt
    out_ptr += sequence * (H * V)
    # Apart from here on: a tile that is not folded takes no registers once it has been summed.
    if num_folded != 0:
        _advance(
            state_KV, q_K, k_K, own_score, score_L, v_ptr, dt_ptr, rate_ptr, dt_bias_ptr, dt_min, dt_max, dt_factor,
            skip_ptr, state_ptr, dst, slot_stride, key_ptrs_K, values_ptr, decays_ptr, log, length, out_ptr, head,
            first_column, is_row_K, HAS_STEPS, HAS_SKIP, G, H, K, V, L, True, MIN_LOG_DECAY,
        )  # fmt: skip
    else:
        _advance(
            state_KV, q_K, k_K, own_score, score_L, v_ptr, dt_ptr, rate_ptr, dt_bias_ptr, dt_min, dt_max, dt_factor,
            skip_ptr, state_ptr, dst, slot_stride, key_ptrs_K, values_ptr, decays_ptr, log, length, out_ptr, head,
            first_column, is_row_K, HAS_STEPS, HAS_SKIP, G, H, K, V, L, False, MIN_LOG_DECAY,
        )  # fmt: skip
