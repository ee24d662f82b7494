"""Mamba's decode in Triton, with and without a log, and folds.

A program advances some channels of a sequence by a token, after those that are logged, in the tokens' order: what is
logged and what is folded changes no bit. It reads states and logs before the launch ahead of it has ended.

Invariants: channels do not depend on each other. Several programs read a log's ``B``, and one of them writes it: to a
entry that no other one reads, since a step that folds appends nothing. No sequence's ``src`` may be the ``dst`` of
another one. Of entries past a log's end, nothing reaches a state.

Shape suffixes: as in ``mamba1_log.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.decode_launches import CHANNELS, DecodeLaunch, choose_decode
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs
from strandline.kernels.recurrences.mamba1_log import LogMemory
from strandline.kernels.sizes import cdiv, next_power_of_2, strides
from strandline.kernels.state_triton import LOG2_E, fast_exp2, load_state, softplus, store_state


def mamba1_decode(
    inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """As ``mamba1.mamba1_decode``; the last dimension of every tensor must be contiguous."""
    return _decode(inputs, state_SVK, slots, None, None, choose_decode(CHANNELS, len(slots.src_N), launches))


def mamba1_decode_logged(
    inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots, memory: LogMemory, logs: LogBatch
) -> Tensor:
    """As :func:`strandline.kernels.recurrences.mamba1_log.mamba1_decode_logged`; logs are contiguous."""
    return _decode(inputs, state_SVK, slots, memory, logs, choose_decode(CHANNELS, len(slots.src_N)))


def _decode(
    inputs: Mamba1Inputs,
    state_SVK: Tensor,
    slots: Slots,
    memory: LogMemory | None,
    logs: LogBatch | None,
    launch: DecodeLaunch,
) -> Tensor:
    x_NV, z_NV, B_NK, C_NK, dt_NV, *_ = inputs
    num_sequences, (num_channels, state_dim) = len(slots.src_N), state_SVK.shape[1:]
    tensors, size = (None,) * 6, 0
    if memory is not None and logs is not None:
        tensors = (memory.step_JLV, memory.input_JLV, memory.B_JLK, logs.log_N, logs.len_N, logs.num_folded_N)
        size = memory.B_JLK.shape[1]
    out_NV = torch.empty(x_NV.shape, dtype=x_NV.dtype, device=x_NV.device)
    _decode_kernel[(cdiv(num_channels, launch.block_v), num_sequences)](
        *inputs, out_NV, state_SVK, *slots, *tensors, *strides(x_NV, z_NV, B_NK, C_NK, dt_NV), state_SVK.stride(0),
        L=size, V=num_channels, K=state_dim, BLOCK_V=launch.block_v, BLOCK_K=next_power_of_2(state_dim),
        num_warps=launch.num_warps, **overlap_options(x_NV),
    )  # fmt: skip
    return out_NV


def mamba1_fold(
    state_RSVK: Tensor, memory: LogMemory, A_log_RVK: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor
) -> None:
    """As :func:`strandline.kernels.recurrences.mamba1_log.mamba1_fold`; each layer's logs are contiguous."""
    num_layers, _, num_channels, state_dim = state_RSVK.shape
    launch = choose_decode(CHANNELS, len(slot_N) * num_layers)
    _fold_kernel[(cdiv(num_channels, launch.block_v), len(slot_N), num_layers)](
        state_RSVK, memory.step_JLV, memory.input_JLV, memory.B_JLK, A_log_RVK, slot_N, log_N, len_N,
        state_RSVK.stride(0), state_RSVK.stride(1), memory.step_JLV.stride(0), memory.input_JLV.stride(0),
        memory.B_JLK.stride(0), A_log_RVK.stride(0),
        L=memory.B_JLK.shape[2], V=num_channels, K=state_dim, BLOCK_V=launch.block_v,
        BLOCK_K=next_power_of_2(state_dim), num_warps=launch.num_warps,
    )  # fmt: skip


@triton.jit
def _rates(A_log_ptr, offset_VK, is_VK):
    """Return what the log2 decay is of a time step of 1."""
    return -tl.exp(tl.load(A_log_ptr + offset_VK, mask=is_VK, other=0.0).to(tl.float32)) * LOG2_E


@triton.jit
def _advance(state_VK, step_V, input_V, B_K, rate_VK):
    """Return the state after one token."""
    return fast_exp2(step_V[:, None] * rate_VK) * state_VK + input_V[:, None] * B_K[None, :]


@triton.jit
def _walk_log(state_VK, rate_VK, steps_ptr, inputs_ptr, Bs_ptr, log, length, channel_V, state_K, is_V, is_K, L, V, K):
    """Return the state after the tokens of a log."""
    for index in range(length):
        entry = log * L + index
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
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr", "log_ptr", "len_ptr", "num_folded_ptr"])
def _decode_kernel(
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
    OVERLAPS: tl.constexpr,
):
    """Advance ``BLOCK_V`` channels of a sequence by a token, after those of its log; append the token, or fold all.

    Without a log, ``L`` is 0 and the state is written.
    """
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1).to(tl.int64)
    state_K = tl.arange(0, BLOCK_K)
    is_V = channel_V < V
    is_K = state_K < K
    is_VK = is_V[:, None] & is_K[None, :]
    offset_VK = channel_V[:, None] * K + state_K[None, :]
    dst = tl.load(dst_ptr + sequence)
    state_VK = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, offset_VK, is_VK)
    rate_VK = _rates(A_log_ptr, offset_VK, is_VK)
    D_V = tl.load(D_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    dt_bias_V = tl.load(dt_bias_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    if L > 0:
        log = tl.load(log_ptr + sequence)
        length = tl.load(len_ptr + sequence)
        num_folded = tl.load(num_folded_ptr + sequence)
        state_VK = _walk_log(
            state_VK, rate_VK, steps_ptr, inputs_ptr, Bs_ptr, log, length, channel_V, state_K, is_V, is_K, L, V, K
        )
    # The kernel before makes the inputs; states and logs are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_V = tl.load(x_ptr + sequence * x_stride + channel_V, mask=is_V, other=0.0).to(tl.float32)
    z_V = tl.load(z_ptr + sequence * z_stride + channel_V, mask=is_V, other=0.0)
    dt_V = tl.load(dt_ptr + sequence * dt_stride + channel_V, mask=is_V, other=0.0).to(tl.float32)
    B_K = tl.load(B_ptr + sequence * B_stride + state_K, mask=is_K, other=0.0).to(tl.float32)
    C_K = tl.load(C_ptr + sequence * C_stride + state_K, mask=is_K, other=0.0)
    step_V = softplus(dt_V + dt_bias_V)
    input_V = step_V * x_V
    state_VK = _advance(state_VK, step_V, input_V, B_K, rate_VK)
    out_V = _read(state_VK, C_K, x_V, z_V, D_V)
    tl.store(out_ptr + sequence * V + channel_V, out_V.to(out_ptr.dtype.element_ty), mask=is_V)
    if L == 0 or num_folded != 0:
        store_state(state_ptr, dst, slot_stride, offset_VK, is_VK, state_VK)
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
    offset_VK = channel_V[:, None] * K + state_K[None, :]
    state_ptr += layer * state_layer_stride
    slot = tl.load(slot_ptr + sequence)
    state_VK = load_state(state_ptr, slot, slot_stride, offset_VK, is_VK)
    rate_VK = _rates(A_log_ptr + layer * A_log_layer_stride, offset_VK, is_VK)
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
    store_state(state_ptr, slot, slot_stride, offset_VK, is_VK, state_VK)
