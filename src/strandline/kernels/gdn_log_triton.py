"""The Triton twins of ``gdn_log.py``: decode steps of Gated DeltaNet of which most do not write the state.

As in ``gdn_decode_triton.py`` a program owns ``BLOCK_V`` value channels of one head of one sequence, and keeps its tile
of the state in registers. It writes the tile where the step folds, else the channels' share of the token's log entry.
Several programs read a log's keys and decays, and one of them writes them: to a place that no other one reads, since a
step that folds appends nothing. Places past a log's end are never read.

Shape suffixes as in ``kernels/gdn_log.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import LogBatch, LogMemory
from strandline.kernels.gdn import L2_NORM_EPS, MIN_LOG_DECAY
from strandline.kernels.gdn_decode_triton import Launch, log_decay_of
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

FEW = Launch(block_v=16, num_warps=1)
"""For batches that do not fill the GPU."""

FEW_SEQUENCES = 4

MANY = Launch(block_v=32, num_warps=1)
"""One warp: no barrier, in a kernel that is more sums than loads. On an H200, 8.9, 15.9, 50.4 and 176 µs for 8, 16, 64
and 256 sequences, a mean over logs of any length, where the state written in every step takes 11.2, 20.8, 72.2 and 273.
Other tiles: ``docs/decisions/0008-log-of-decoded-tokens.md``."""


def gdn_decode_logged(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    a_NH: Tensor,
    b_NH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    memory: LogMemory,
    logs: LogBatch,
) -> Tensor:
    """As ``gdn_log.gdn_decode_logged``, and strides as in ``gdn_decode_triton.gdn_decode``; logs are contiguous."""
    num_sequences, num_heads, value_dim = v_NHV.shape
    num_key_heads, key_dim = k_NGK.shape[1:]
    out_NHV = torch.empty((num_sequences, num_heads, value_dim), dtype=q_NGK.dtype, device=q_NGK.device)
    launch = FEW if num_sequences <= FEW_SEQUENCES else MANY
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _decode_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        q_NGK,
        k_NGK,
        v_NHV,
        a_NH,
        b_NH,
        A_log_H,
        dt_bias_H,
        state_SHKV,
        src_N,
        dst_N,
        memory.key_JGLK,
        memory.value_JHLV,
        memory.decay_JHL,
        logs.log_N,
        logs.len_N,
        out_NHV,
        q_NGK.stride(0),
        q_NGK.stride(1),
        k_NGK.stride(0),
        k_NGK.stride(1),
        v_NHV.stride(0),
        v_NHV.stride(1),
        a_NH.stride(0),
        b_NH.stride(0),
        state_SHKV.stride(0),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        L=memory.decay_JHL.shape[2],
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        SCALE=key_dim**-0.5,
        EPS=L2_NORM_EPS,
        MIN_LOG_DECAY=MIN_LOG_DECAY,
        num_warps=launch.num_warps,
        **overlap_options(q_NGK),
    )
    return out_NHV


def gdn_fold(state_RSHKV: Tensor, memory: LogMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
    """As ``gdn_log.gdn_fold``: one launch."""
    num_layers, _, num_heads, key_dim, value_dim = state_RSHKV.shape
    num_logs, num_key_heads, num_places = memory.key_JGLK.shape[1:4]
    block_v = min(MANY.block_v, next_power_of_2(value_dim))
    _fold_kernel[(cdiv(value_dim, block_v), num_heads * len(slot_N), num_layers)](
        state_RSHKV,
        memory.key_JGLK,
        memory.value_JHLV,
        memory.decay_JHL,
        slot_N,
        log_N,
        len_N,
        num_logs,
        state_RSHKV.stride(0),
        state_RSHKV.stride(1),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        L=num_places,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=MANY.num_warps,
    )


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr", "log_ptr", "len_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    log_ptr,
    len_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    a_row_stride,
    b_row_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    key_head = head // (H // G)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    tile_KV = row_K[:, None] * V + column_V[None, :]
    tile_ptr = state_ptr + head * (K * V) + first_column

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    log = tl.load(log_ptr + sequence)
    length = tl.load(len_ptr + sequence)
    state_KV = tl.load(tile_ptr + src * slot_stride + tile_KV, mask=is_tile_KV & (src != 0), other=0.0).to(tl.float32)
    keys_ptr += (log * G + key_head) * (L * K)
    values_ptr += (log * H + head) * (L * V) + first_column
    decays_ptr += (log * H + head) * L
    place_L = tl.arange(0, L)
    is_logged_L = place_L < length
    logged_LK = tl.load(
        keys_ptr + place_L[:, None] * K + row_K[None, :], mask=is_logged_L[:, None] & is_row_K[None, :], other=0.0
    )
    logged_LV = tl.load(
        values_ptr + place_L[:, None] * V + column_V[None, :],
        mask=is_logged_L[:, None] & is_column_V[None, :],
        other=0.0,
    )
    # The kernel before makes q, k and v; states and logs are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_K = tl.load(q_ptr + sequence * q_row_stride + key_head * q_head_stride + row_K, mask=is_row_K, other=0.0)
    k_K = tl.load(k_ptr + sequence * k_row_stride + key_head * k_head_stride + row_K, mask=is_row_K, other=0.0)
    v_ptrs = v_ptr + sequence * v_row_stride + head * v_head_stride + first_column + column_V
    v_V = tl.load(v_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + sequence * a_row_stride + head).to(tl.float32)
    b = tl.load(b_ptr + sequence * b_row_stride + head).to(tl.float32)
    log_decay = log_decay_of(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head), MIN_LOG_DECAY)
    beta = 1.0 / (1.0 + tl.exp(-b))

    q_K = q_K.to(tl.float32)
    k_K = k_K.to(tl.float32)
    q_K *= SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
    k_K *= 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)

    weight_L, carried = _weights(decays_ptr, length, log_decay, L)
    # The state arrives last; what the log has to say is ready by then.
    from_log_V = tl.sum((tl.sum(logged_LK * k_K[None, :], 1) * weight_L)[:, None] * logged_LV, 0)
    read_log_V = tl.sum((tl.sum(logged_LK * q_K[None, :], 1) * weight_L)[:, None] * logged_LV, 0)
    predicted_V = tl.sum(state_KV * k_K[:, None], 0) * carried + from_log_V
    read_V = tl.sum(state_KV * q_K[:, None], 0) * carried + read_log_V
    written_V = beta * (v_V - predicted_V)
    out_V = read_V + tl.sum(q_K * k_K, 0) * written_V
    out_ptrs = out_ptr + (sequence * H + head) * V + first_column + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)

    if (src != dst) | (length == L) | (log == 0):
        key_ptrs_K, value_ptrs_V = keys_ptr + row_K, values_ptr + column_V
        state_KV = _add_logged(
            state_KV * carried, key_ptrs_K, is_row_K, K, value_ptrs_V, is_column_V, V, weight_L, length
        )
        state_KV += k_K[:, None] * written_V[None, :]
        state_ptrs = tile_ptr + dst * slot_stride + tile_KV
        tl.store(state_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (dst != 0))
    else:
        is_kept = dst != 0
        is_first = is_kept & (first_column == 0)
        tl.store(values_ptr + length * V + column_V, written_V, mask=is_column_V & is_kept)
        tl.store(keys_ptr + length * K + row_K, k_K, mask=is_row_K & is_first & (head % (H // G) == 0))
        tl.store(decays_ptr + length, log_decay, mask=is_first)


@triton.jit(do_not_specialize=["num_logs"], do_not_specialize_on_alignment=["slot_ptr", "log_ptr", "len_ptr"])
def _fold_kernel(
    state_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    slot_ptr,
    log_ptr,
    len_ptr,
    num_logs,
    layer_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    first_column = tl.program_id(0) * BLOCK_V
    head = (tl.program_id(1) % H).to(tl.int64)
    sequence = tl.program_id(1) // H
    layer = tl.program_id(2).to(tl.int64)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    slot = tl.load(slot_ptr + sequence)
    log = layer * num_logs + tl.load(log_ptr + sequence)
    length = tl.load(len_ptr + sequence)
    keys_ptr += (log * G + head // (H // G)) * (L * K)
    values_ptr += (log * H + head) * (L * V) + first_column
    weight_L, carried = _weights(decays_ptr + (log * H + head) * L, length, 0.0, L)
    state_ptrs = state_ptr + layer * layer_stride + slot * slot_stride + head * (K * V) + first_column
    state_ptrs += row_K[:, None] * V + column_V[None, :]
    state_KV = tl.load(state_ptrs, mask=is_tile_KV, other=0.0).to(tl.float32) * carried
    key_ptrs_K, value_ptrs_V = keys_ptr + row_K, values_ptr + column_V
    state_KV = _add_logged(state_KV, key_ptrs_K, is_row_K, K, value_ptrs_V, is_column_V, V, weight_L, length)
    tl.store(state_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV)


@triton.jit
def _weights(decays_ptr, length, log_decay, L: tl.constexpr):
    """Return what is left of each logged write and of the committed state, after one more decay."""
    place_L = tl.arange(0, L)
    decay_L = tl.load(decays_ptr + place_L, mask=place_L < length, other=0.0)
    is_later_LL = place_L[None, :] > place_L[:, None]
    # Added, never subtracted: a weak decay beside a strong one would be lost.
    after_L = tl.sum(tl.where(is_later_LL, decay_L[None, :], 0.0), 1)
    return tl.exp(after_L + log_decay), tl.exp(tl.sum(decay_L, 0) + log_decay)


@triton.jit
def _add_logged(
    state_KV, key_ptrs_K, is_row_K, K: tl.constexpr, value_ptrs_V, is_column_V, V: tl.constexpr, weight_L, length
):
    """Add a log to a state, token by token: it is read from the cache, and takes no registers but for one token."""
    place_L = tl.arange(0, weight_L.shape[0])
    for i in range(length):
        key_K = tl.load(key_ptrs_K + i * K, mask=is_row_K, other=0.0)
        value_V = tl.load(value_ptrs_V + i * V, mask=is_column_V, other=0.0)
        value_V *= tl.sum(tl.where(place_L == i, weight_L, 0.0), 0)
        state_KV += key_K[:, None] * value_V[None, :]
    return state_KV
