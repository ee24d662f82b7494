"""Mamba in Triton: a program walks through a sequence, and through its log, with the states of some channels.

A decode is a walk of one token, behind those that are logged. Every walk is in the tokens' order: how these are spread
over chunks, steps and logs changes no bit.

Invariants: channels do not depend on each other. Several programs read a log's ``B``, and one of them writes it: to a
place that no other one reads, since a step that folds appends nothing. No sequence's ``src`` may be the ``dst`` of
another one, or a cut's slot. Of rows past a chunk's end, and of places past a log's, nothing reaches a state.

Shape suffixes: as in ``mamba1_log.py``, and T tokens.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import LogBatch
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.mamba1_log import LogMemory
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.state_triton import load_state, softplus, store_state

BLOCK_V, NUM_WARPS = 32, 2

ROWS = 8
"""Tokens that are loaded ahead of the walk: loads under way at once hide the memory's latency."""


def mamba1_prefill(
    x_TV: Tensor,
    z_TV: Tensor,
    B_TK: Tensor,
    C_TK: Tensor,
    dt_TV: Tensor,
    D_V: Tensor,
    dt_bias_V: Tensor,
    A_log_VK: Tensor,
    state_SVK: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`strandline.kernels.mamba1.mamba1_prefill`; the last dimension of every tensor must be contiguous."""
    inputs, slots = (x_TV, z_TV, B_TK, C_TK, dt_TV, D_V, dt_bias_V, A_log_VK), (state_SVK, src_N, dst_N)
    table = (chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C)
    return _walk(inputs, slots, table, ROWS)


def mamba1_decode(
    x_NV: Tensor,
    z_NV: Tensor,
    B_NK: Tensor,
    C_NK: Tensor,
    dt_NV: Tensor,
    D_V: Tensor,
    dt_bias_V: Tensor,
    A_log_VK: Tensor,
    state_SVK: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`strandline.kernels.mamba1.mamba1_decode`; the last dimension of every tensor must be contiguous."""
    inputs = (x_NV, z_NV, B_NK, C_NK, dt_NV, D_V, dt_bias_V, A_log_VK)
    return _walk(inputs, (state_SVK, src_N, dst_N), None, 1)


def _walk(
    inputs: tuple[Tensor, ...], slots: tuple[Tensor, ...], table: tuple[Tensor, ...] | None, num_rows: int
) -> Tensor:
    """Walk through the tokens of every sequence; without a table, each has one."""
    x_TV, z_TV, B_TK, C_TK, dt_TV, *_ = inputs
    state_SVK, src_N, _ = slots
    num_channels, state_dim = state_SVK.shape[1:]
    out_TV = torch.empty(x_TV.shape, dtype=x_TV.dtype, device=x_TV.device)
    _walk_kernel[(cdiv(num_channels, BLOCK_V), len(src_N))](
        *inputs, out_TV, *slots, *(table or (None,) * 4),
        x_TV.stride(0), z_TV.stride(0), B_TK.stride(0), C_TK.stride(0), dt_TV.stride(0), state_SVK.stride(0),
        HAS_TABLE=table is not None, V=num_channels, K=state_dim, BLOCK_V=BLOCK_V, BLOCK_K=next_power_of_2(state_dim),
        ROWS=num_rows, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_TV


def mamba1_decode_logged(
    x_NV: Tensor,
    z_NV: Tensor,
    B_NK: Tensor,
    C_NK: Tensor,
    dt_NV: Tensor,
    D_V: Tensor,
    dt_bias_V: Tensor,
    A_log_VK: Tensor,
    state_SVK: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    memory: LogMemory,
    logs: LogBatch,
) -> Tensor:
    """As :func:`strandline.kernels.mamba1_log.mamba1_decode_logged`; logs are contiguous."""
    num_sequences, num_channels = x_NV.shape
    state_dim = B_NK.shape[1]
    out_NV = torch.empty(x_NV.shape, dtype=x_NV.dtype, device=x_NV.device)
    _logged_kernel[(cdiv(num_channels, BLOCK_V), num_sequences)](
        x_NV, z_NV, B_NK, C_NK, dt_NV, D_V, dt_bias_V, A_log_VK, out_NV, state_SVK, src_N, dst_N,
        memory.step_JLV, memory.input_JLV, memory.B_JLK, logs.log_N, logs.len_N, logs.num_folded_N,
        x_NV.stride(0), z_NV.stride(0), B_NK.stride(0), C_NK.stride(0), dt_NV.stride(0), state_SVK.stride(0),
        L=memory.B_JLK.shape[1], V=num_channels, K=state_dim, BLOCK_V=BLOCK_V, BLOCK_K=next_power_of_2(state_dim),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_NV


def mamba1_fold(
    state_RSVK: Tensor, memory: LogMemory, A_log_RVK: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor
) -> None:
    """As :func:`strandline.kernels.mamba1_log.mamba1_fold`; each layer's logs are contiguous."""
    num_layers, _, num_channels, state_dim = state_RSVK.shape
    _fold_kernel[(cdiv(num_channels, BLOCK_V), len(slot_N), num_layers)](
        state_RSVK, memory.step_JLV, memory.input_JLV, memory.B_JLK, A_log_RVK, slot_N, log_N, len_N,
        state_RSVK.stride(0), state_RSVK.stride(1), memory.step_JLV.stride(0), memory.input_JLV.stride(0),
        memory.B_JLK.stride(0), A_log_RVK.stride(0),
        L=memory.B_JLK.shape[2], V=num_channels, K=state_dim, BLOCK_V=BLOCK_V, BLOCK_K=next_power_of_2(state_dim),
        num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _advance(state_VK, step_V, input_V, B_K, rate_VK):
    """Return the state after one token."""
    return tl.exp(step_V[:, None] * rate_VK) * state_VK + input_V[:, None] * B_K[None, :]


@triton.jit
def _walk_log(state_VK, rate_VK, steps_ptr, inputs_ptr, Bs_ptr, log, length, channel_V, state_K, is_V, is_K, L, V, K):
    """Return the state after the tokens of a log."""
    for place in range(length):
        entry = log * L + place
        step_V = tl.load(steps_ptr + entry * V + channel_V, mask=is_V, other=0.0)
        input_V = tl.load(inputs_ptr + entry * V + channel_V, mask=is_V, other=0.0)
        B_K = tl.load(Bs_ptr + entry * K + state_K, mask=is_K, other=0.0)
        state_VK = _advance(state_VK, step_V, input_V, B_K, rate_VK)
    return state_VK


@triton.jit
def _read(state_VK, C_K, x_V, z_V, D_V):
    """Return what a token reads of the state after it, gated."""
    z_V = z_V.to(tl.float32)
    return (tl.sum(state_VK * C_K[None, :].to(tl.float32), 1) + D_V * x_V) * (z_V * tl.sigmoid(z_V))


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize_on_alignment=[
        "B_ptr", "C_ptr", "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
    ],
)  # fmt: skip
def _walk_kernel(
    x_ptr,
    z_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    D_ptr,
    dt_bias_ptr,
    A_log_ptr,
    out_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    x_stride,
    z_stride,
    B_stride,
    C_stride,
    dt_stride,
    slot_stride,
    HAS_TABLE: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk through one sequence with the states of ``BLOCK_V`` channels."""
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1).to(tl.int64)
    state_K = tl.arange(0, BLOCK_K)
    is_V = channel_V < V
    is_K = state_K < K
    is_VK = is_V[:, None] & is_K[None, :]
    place_VK = channel_V[:, None] * K + state_K[None, :]
    state_VK = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, place_VK, is_VK)
    rate_VK = -tl.exp(tl.load(A_log_ptr + place_VK, mask=is_VK, other=0.0).to(tl.float32))
    D_V = tl.load(D_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    dt_bias_V = tl.load(dt_bias_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    chunk = 0
    end = 1
    if HAS_TABLE:
        chunk = tl.load(first_chunks_ptr + sequence).to(tl.int32)
        end = tl.load(first_chunks_ptr + sequence + 1).to(tl.int32)
    while chunk < end:
        start = sequence
        length = 1
        if HAS_TABLE:
            start = tl.load(starts_ptr + chunk)
            length = tl.load(lengths_ptr + chunk).to(tl.int32)
        for row in range(0, length, ROWS):
            x = ()
            z = ()
            dt = ()
            B = ()
            C = ()
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_token = row + ahead < length
                x += (tl.load(x_ptr + token * x_stride + channel_V, mask=is_V & is_token, other=0.0),)
                z += (tl.load(z_ptr + token * z_stride + channel_V, mask=is_V & is_token, other=0.0),)
                dt += (tl.load(dt_ptr + token * dt_stride + channel_V, mask=is_V & is_token, other=0.0),)
                B += (tl.load(B_ptr + token * B_stride + state_K, mask=is_K & is_token, other=0.0),)
                C += (tl.load(C_ptr + token * C_stride + state_K, mask=is_K & is_token, other=0.0),)
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_token = row + ahead < length
                x_V = x[ahead].to(tl.float32)
                step_V = softplus(dt[ahead].to(tl.float32) + dt_bias_V)
                after_VK = _advance(state_VK, step_V, step_V * x_V, B[ahead].to(tl.float32), rate_VK)
                state_VK = tl.where(is_token, after_VK, state_VK)
                out_V = _read(state_VK, C[ahead], x_V, z[ahead], D_V).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + token * V + channel_V, out_V, mask=is_V & is_token)
        if HAS_TABLE:
            store_state(state_ptr, tl.load(cut_slots_ptr + chunk), slot_stride, place_VK, is_VK, state_VK)
        chunk += 1
    store_state(state_ptr, tl.load(dst_ptr + sequence), slot_stride, place_VK, is_VK, state_VK)


@triton.jit(
    do_not_specialize_on_alignment=[
        "B_ptr", "C_ptr", "src_ptr", "dst_ptr", "log_ptr", "len_ptr", "num_folded_ptr"
    ],
)  # fmt: skip
def _logged_kernel(
    x_ptr,
    z_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    D_ptr,
    dt_bias_ptr,
    A_log_ptr,
    out_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    steps_ptr,
    inputs_ptr,
    Bs_ptr,
    log_ptr,
    len_ptr,
    num_folded_ptr,
    x_stride,
    z_stride,
    B_stride,
    C_stride,
    dt_stride,
    slot_stride,
    L: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Advance ``BLOCK_V`` channels of a sequence by a token, behind those of its log; append the token, or fold all."""
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1).to(tl.int64)
    state_K = tl.arange(0, BLOCK_K)
    is_V = channel_V < V
    is_K = state_K < K
    is_VK = is_V[:, None] & is_K[None, :]
    place_VK = channel_V[:, None] * K + state_K[None, :]
    dst = tl.load(dst_ptr + sequence)
    log = tl.load(log_ptr + sequence)
    length = tl.load(len_ptr + sequence)
    state_VK = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, place_VK, is_VK)
    rate_VK = -tl.exp(tl.load(A_log_ptr + place_VK, mask=is_VK, other=0.0).to(tl.float32))
    state_VK = _walk_log(
        state_VK, rate_VK, steps_ptr, inputs_ptr, Bs_ptr, log, length, channel_V, state_K, is_V, is_K, L, V, K
    )
    x_V = tl.load(x_ptr + sequence * x_stride + channel_V, mask=is_V, other=0.0).to(tl.float32)
    z_V = tl.load(z_ptr + sequence * z_stride + channel_V, mask=is_V, other=0.0)
    dt_V = tl.load(dt_ptr + sequence * dt_stride + channel_V, mask=is_V, other=0.0).to(tl.float32)
    B_K = tl.load(B_ptr + sequence * B_stride + state_K, mask=is_K, other=0.0).to(tl.float32)
    C_K = tl.load(C_ptr + sequence * C_stride + state_K, mask=is_K, other=0.0)
    D_V = tl.load(D_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    step_V = softplus(dt_V + tl.load(dt_bias_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32))
    input_V = step_V * x_V
    state_VK = _advance(state_VK, step_V, input_V, B_K, rate_VK)
    out_V = _read(state_VK, C_K, x_V, z_V, D_V)
    tl.store(out_ptr + sequence * V + channel_V, out_V.to(out_ptr.dtype.element_ty), mask=is_V)
    if tl.load(num_folded_ptr + sequence) != 0:
        store_state(state_ptr, dst, slot_stride, place_VK, is_VK, state_VK)
    elif dst != 0:
        entry = log * L + length
        tl.store(steps_ptr + entry * V + channel_V, step_V, mask=is_V)
        tl.store(inputs_ptr + entry * V + channel_V, input_V, mask=is_V)
        tl.store(Bs_ptr + entry * K + state_K, B_K, mask=is_K & (tl.program_id(0) == 0))


@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "log_ptr", "len_ptr"])
def _fold_kernel(
    state_ptr,
    steps_ptr,
    inputs_ptr,
    Bs_ptr,
    A_log_ptr,
    slot_ptr,
    log_ptr,
    len_ptr,
    state_layer_stride,
    slot_stride,
    steps_layer_stride,
    inputs_layer_stride,
    Bs_layer_stride,
    A_log_layer_stride,
    L: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Fold one log into ``BLOCK_V`` channels of one layer's state."""
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    state_K = tl.arange(0, BLOCK_K)
    is_V = channel_V < V
    is_K = state_K < K
    is_VK = is_V[:, None] & is_K[None, :]
    place_VK = channel_V[:, None] * K + state_K[None, :]
    state_ptr += layer * state_layer_stride
    slot = tl.load(slot_ptr + sequence)
    state_VK = load_state(state_ptr, slot, slot_stride, place_VK, is_VK)
    rate_ptrs = A_log_ptr + layer * A_log_layer_stride + place_VK
    rate_VK = -tl.exp(tl.load(rate_ptrs, mask=is_VK, other=0.0).to(tl.float32))
    state_VK = _walk_log(
        state_VK,
        rate_VK,
        steps_ptr + layer * steps_layer_stride,
        inputs_ptr + layer * inputs_layer_stride,
        Bs_ptr + layer * Bs_layer_stride,
        tl.load(log_ptr + sequence),
        tl.load(len_ptr + sequence),
        channel_V,
        state_K,
        is_V,
        is_K,
        L,
        V,
        K,
    )
    store_state(state_ptr, slot, slot_stride, place_VK, is_VK, state_VK)
