"""One token of Gated DeltaNet per sequence as one Triton kernel: gates, normalisation, delta rule, slots and logs.

A program owns ``BLOCK_V`` value channels of one head of one sequence: it reads its ``[K, BLOCK_V]`` tile of the state
once, before the launch ahead of it has ended, and keeps it in registers. Columns of a state do not depend on each
other, so no program reads data that another one writes, as long as no sequence's ``src`` is another sequence's ``dst``:
callers ensure this (the torch version copies such a source first). ``src`` may be shared, and may equal the same
sequence's ``dst``.

Without logs, the tile is written in every step. With logs (``gdn_log.py``), a program writes the tile if the plan
folds, and otherwise its channels of the token's log entry. Several programs read a log's keys and decays; one of them
writes the new ones, to an entry that no other program reads, since a step that folds appends nothing.

Both reductions over K read the old state: with ``e = beta (v - decay S^T k)`` the output is
``decay S^T q + (k . q) e``, which saves a second pass over the new state before the output is known.

In deterministic engines, launch parameters do not depend on the batch, so neither do a sequence's bits. Otherwise there
are two sets of launch parameters, each compiled once per dtype and layer shape, with different orders of sums over K.

Shape suffixes as in ``kernels/recurrences/gdn_log.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.decode_launches import (
    HEADS,
    HEADS_WITH_LOG,
    DecodeLaunch,
    choose_decode,
    fit_registers,
)
from strandline.kernels.recurrences.gdn import L2_NORM_EPS, GatedDeltaInputs
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.recurrences.gdn_log_triton import add_logged, load_logged, weights_of_logged
from strandline.kernels.sizes import cdiv, next_power_of_2, strides


def gdn_decode(
    inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be
    another sequence's ``dst``.
    """
    launch = choose_decode(HEADS, len(inputs.q_TGK), launches)
    return _decode(inputs, state_SHKV, slots, (None,) * 6, 0, launch)


def gdn_decode_logged(
    inputs: GatedDeltaInputs, state_SHKV: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """As ``gdn_log.gdn_decode_logged``, and strides as in :func:`gdn_decode`; logs are contiguous."""
    launch = choose_decode(HEADS_WITH_LOG, len(inputs.q_TGK))
    log = (memory.key_JGLK, memory.value_JHLV, memory.decay_JHL, logs.log_N, logs.len_N, logs.num_folded_N)
    return _decode(inputs, state_SHKV, slots, log, memory.decay_JHL.shape[2], launch)


def _decode(
    inputs: GatedDeltaInputs,
    state_SHKV: Tensor,
    slots: Slots,
    log: tuple[Tensor | None, ...],
    num_entries: int,
    launch: DecodeLaunch,
) -> Tensor:
    """Launch the kernel; with no entries in a log, without logs."""
    *tensors, max_beta = inputs
    q_NGK, k_NGK, v_NHV, a_NH, b_NH, _, _ = tensors
    num_sequences, num_heads, value_dim = v_NHV.shape
    num_key_heads, key_dim = k_NGK.shape[1:]
    out_NHV = torch.empty((num_sequences, num_heads, value_dim), dtype=q_NGK.dtype, device=q_NGK.device)
    launch = fit_registers(launch, key_dim)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _decode_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        *tensors,
        state_SHKV,
        *slots,
        *log,
        out_NHV,
        *strides(q_NGK, k_NGK, v_NHV, a_NH, b_NH),
        state_SHKV.stride(0),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        L=num_entries,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        SCALE=key_dim**-0.5,
        EPS=L2_NORM_EPS,
        MIN_LOG_DECAY=MIN_LOG_DECAY,
        MAX_BETA=max_beta,
        num_warps=launch.num_warps,
        **overlap_options(q_NGK),
    )
    return out_NHV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr", "log_ptr", "len_ptr", "num_folded_ptr"])
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
    num_folded_ptr,
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
    MAX_BETA: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Advance ``BLOCK_V`` value channels of a head of a sequence by a token; without logs where L is 0."""
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    key_head = head // (H // G)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    # A program's offset stays in the scalar part of each address: the rest are constants in the instructions.
    tile_KV = row_K[:, None] * V + column_V[None, :]
    tile_ptr = state_ptr + head * (K * V) + first_column

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    if L > 0:
        log = tl.load(log_ptr + sequence)
        length = tl.load(len_ptr + sequence)
        num_folded = tl.load(num_folded_ptr + sequence)
    state_KV = tl.load(tile_ptr + src * slot_stride + tile_KV, mask=is_tile_KV & (src != 0), other=0.0).to(tl.float32)
    if L > 0:
        key_ptrs_K = keys_ptr + (log * G + key_head) * (L * K) + row_K
        value_ptrs_V = values_ptr + (log * H + head) * (L * V) + first_column + column_V
        decays_ptr += (log * H + head) * L
        logged_LK = load_logged(key_ptrs_K, is_row_K, K, length, L)
        logged_LV = load_logged(value_ptrs_V, is_column_V, V, length, L)
    # The previous kernel writes q, k and v; states and logs are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_K = tl.load(q_ptr + sequence * q_row_stride + key_head * q_head_stride + row_K, mask=is_row_K, other=0.0)
    k_K = tl.load(k_ptr + sequence * k_row_stride + key_head * k_head_stride + row_K, mask=is_row_K, other=0.0)
    v_ptrs = v_ptr + sequence * v_row_stride + head * v_head_stride + first_column + column_V
    v_V = tl.load(v_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + sequence * a_row_stride + head).to(tl.float32)
    b = tl.load(b_ptr + sequence * b_row_stride + head).to(tl.float32)
    log_decay = _log_decay_of(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head), MIN_LOG_DECAY)
    beta = MAX_BETA / (1.0 + tl.exp(-b))

    q_K = q_K.to(tl.float32)
    k_K = k_K.to(tl.float32)
    q_K *= SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
    k_K *= 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)

    # The state arrives last; the log's contribution is ready by then.
    if L > 0:
        weight_L, carried = weights_of_logged(decays_ptr, length, log_decay, L)
        predicted_log_V = tl.sum((tl.sum(logged_LK * k_K[None, :], 1) * weight_L)[:, None] * logged_LV, 0)
        read_log_V = tl.sum((tl.sum(logged_LK * q_K[None, :], 1) * weight_L)[:, None] * logged_LV, 0)
    else:
        carried = tl.exp(log_decay)
        predicted_log_V = 0.0
        read_log_V = 0.0
    predicted_V = tl.sum(state_KV * k_K[:, None], 0) * carried + predicted_log_V
    read_V = tl.sum(state_KV * q_K[:, None], 0) * carried + read_log_V
    written_V = beta * (v_V - predicted_V)
    out_V = read_V + tl.sum(q_K * k_K, 0) * written_V
    out_ptrs = out_ptr + (sequence * H + head) * V + first_column + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)

    if L == 0 or (num_folded != 0):
        state_KV *= carried
        if L > 0:
            state_KV = add_logged(state_KV, key_ptrs_K, is_row_K, K, value_ptrs_V, is_column_V, V, weight_L, length)
        state_KV += k_K[:, None] * written_V[None, :]
        state_ptrs = tile_ptr + dst * slot_stride + tile_KV
        tl.store(state_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (dst != 0))
    else:
        is_first = (dst != 0) & (first_column == 0)
        tl.store(value_ptrs_V + length * V, written_V, mask=is_column_V & (dst != 0))
        tl.store(key_ptrs_K + length * K, k_K, mask=is_row_K & is_first & (head % (H // G) == 0))
        tl.store(decays_ptr + length, log_decay, mask=is_first)


@triton.jit
def _log_decay_of(a, A_log, dt_bias, MIN_LOG_DECAY: tl.constexpr):
    """Return the log decay of a head's state, a finite number."""
    log_decay = -tl.exp(A_log.to(tl.float32)) * _softplus(a + dt_bias.to(tl.float32))
    # A comparison rather than a maximum, which would not propagate NaN.
    return tl.where(log_decay < MIN_LOG_DECAY, MIN_LOG_DECAY, log_decay)


@triton.jit
def _softplus(x):
    """Return ``log(1 + exp(x))``; of a small ``exp(x)``, which the sum would round away, the first terms."""
    e = tl.exp(x)
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(e < 1e-2, small, tl.log(1.0 + e)))
