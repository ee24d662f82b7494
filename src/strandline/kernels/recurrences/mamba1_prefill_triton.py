"""Mamba's prefill in Triton: a program walks through a segment of a sequence with the states of some channels.

A thread holds all of a channel's state: nothing of a token is computed twice, and its output is summed without an
exchange between threads. The walk is in the tokens' order; ``segments_triton.py`` says how long sequences are divided.

Invariants: channels do not depend on each other. No sequence's ``src`` may be the ``dst`` of another one, or a cut's
slot. Of rows past a chunk's end nothing reaches a state. In one segment, the partition into chunks changes no bit.

Shape suffixes: as in ``mamba1.py``, and C chunks, J segments of a sequence.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Launches
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs
from strandline.kernels.recurrences.segments_triton import Division, chunks_of_segment, divide, runs
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2, strides
from strandline.kernels.state_triton import LOG2_E, fast_exp2, load_state, softplus, store_state


class Launch(NamedTuple):
    """How the kernel is launched."""

    num_warps: int
    """With a channel per thread."""
    rows: int
    """Tokens that are loaded ahead of the walk: loads under way at once hide the memory's latency."""


LAUNCH = Launch(num_warps=1, rows=4)

DIVISION = Division(wanted_programs=12 * NUM_SMS, min_chunks=2, max_segments=16)
"""About as many programs as multiprocessors hold at once, with the registers that the kernel takes."""

WIDENED_TOKENS = 1024
"""From this many on, ``B`` and ``C`` are converted to float32 first, which every thread would do again otherwise."""


def mamba1_prefill(
    inputs: Mamba1Inputs, state_SVK: Tensor, slots: Slots, chunks: ChunkTable, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """As ``mamba1.mamba1_prefill``; the last dimension of every tensor must be contiguous."""
    if launches is Launches.FIXED or len(inputs.x_TV) >= WIDENED_TOKENS:
        inputs = inputs._replace(B_TK=inputs.B_TK.float(), C_TK=inputs.C_TK.float())
    x_TV, z_TV, B_TK, C_TK, dt_TV, *_ = inputs
    num_sequences, (num_channels, state_dim) = chunks.num_sequences, state_SVK.shape[1:]
    num_programs = num_sequences * cdiv(num_channels, 32 * LAUNCH.num_warps)
    num_segments = divide(DIVISION, num_programs, num_sequences, len(chunks.starts), launches)
    out_TV = torch.empty(x_TV.shape, dtype=x_TV.dtype, device=x_TV.device)
    partial_NJKV = step_NJV = None
    if num_segments > 1:
        shape = num_sequences, num_segments
        partial_NJKV = torch.empty(*shape, state_dim, num_channels, dtype=torch.float32, device=x_TV.device)
        step_NJV = torch.empty(*shape, num_channels, dtype=torch.float32, device=x_TV.device)
    block_v = 32 * LAUNCH.num_warps
    for num_parts, constants in runs(num_segments):
        _walk_kernel[(cdiv(num_channels, block_v), num_sequences * num_parts)](
            *inputs, out_TV, state_SVK, partial_NJKV, step_NJV, *slots,
            chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C, num_segments,
            *strides(x_TV, z_TV, B_TK, C_TK, dt_TV), state_SVK.stride(0), 1,
            **constants, V=num_channels, K=state_dim, BLOCK_V=block_v,
            BLOCK_K=next_power_of_2(state_dim), ROWS=LAUNCH.rows, num_warps=LAUNCH.num_warps,
        )  # fmt: skip
    return out_TV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["num_segments", "element_stride"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
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
    partial_ptr,
    step_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    num_segments,
    x_stride,
    z_stride,
    B_stride,
    C_stride,
    dt_stride,
    slot_stride,
    element_stride,
    IS_PARTIAL: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk through one segment with the states of ``BLOCK_V`` channels.

    Of a divided sequence, ``partial`` has the initial state, then the states after every segment but the last as from
    zeros, and ``step`` the sums of the time steps in each of those: the partial run writes both.

    Args:
        element_stride: 1. Without knowing it, the compiler gives a channel to a thread, not parts of it to several.
    """
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    num_parts = num_segments - 1 if IS_PARTIAL else num_segments
    sequence = (tl.program_id(1) // num_parts).to(tl.int64)
    segment = tl.program_id(1) % num_parts
    state_K = tl.arange(0, BLOCK_K)
    is_V = channel_V < V
    is_K = state_K < K
    is_VK = is_V[:, None] & is_K[None, :]
    offset_VK = (channel_V[:, None] * K + state_K[None, :]) * element_stride
    in_partial_VK = (state_K[None, :] * V + channel_V[:, None]) * element_stride
    first, end = chunks_of_segment(first_chunks_ptr, lengths_ptr, sequence, segment, num_segments, IS_DIVIDED)
    rate_VK = -tl.exp(tl.load(A_log_ptr + offset_VK, mask=is_VK, other=0.0).to(tl.float32)) * LOG2_E
    dt_bias_V = tl.load(dt_bias_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    D_V = tl.load(D_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32)
    if IS_DIVIDED:
        partial_ptr += sequence * num_segments * (K * V)
        step_ptr += sequence * num_segments * V
    if IS_PARTIAL:
        if segment == 0:
            before_VK = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, offset_VK, is_VK)
            tl.store(partial_ptr + in_partial_VK, before_VK, mask=is_VK)
        state_VK = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    elif IS_DIVIDED:
        state_VK = tl.load(partial_ptr + in_partial_VK, mask=is_VK, other=0.0)
        for before in range(1, segment + 1):
            partial_VK = tl.load(partial_ptr + before * (K * V) + in_partial_VK, mask=is_VK, other=0.0)
            step_V = tl.load(step_ptr + before * V + channel_V, mask=is_V, other=0.0)
            state_VK = _advance(state_VK, step_V, rate_VK, partial_VK)
    else:
        state_VK = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, offset_VK, is_VK)

    sum_V = tl.zeros([BLOCK_V], tl.float32)
    # The next chunk's length is known a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0).to(tl.int32)
    for chunk in range(first, end):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0).to(tl.int32)
        cut_slot = tl.load(cut_slots_ptr + chunk)
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
                dt += (tl.load(dt_ptr + token * dt_stride + channel_V, mask=is_V & is_token, other=0.0),)
                B += (tl.load(B_ptr + token * B_stride + state_K, mask=is_K & is_token, other=0.0),)
                if not IS_PARTIAL:
                    z += (tl.load(z_ptr + token * z_stride + channel_V, mask=is_V & is_token, other=0.0),)
                    C += (tl.load(C_ptr + token * C_stride + state_K, mask=is_K & is_token, other=0.0),)
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_token = row + ahead < length
                x_V = x[ahead].to(tl.float32)
                # A step of zero length: rows past the end change no state.
                step_V = tl.where(is_token, softplus(dt[ahead].to(tl.float32) + dt_bias_V), 0.0)
                written_VK = (step_V * x_V)[:, None] * B[ahead].to(tl.float32)[None, :]
                state_VK = _advance(state_VK, step_V, rate_VK, written_VK)
                if IS_PARTIAL:
                    sum_V += step_V
                else:
                    z_V = z[ahead].to(tl.float32)
                    read_V = tl.sum(state_VK * C[ahead].to(tl.float32)[None, :], 1)
                    out_V = (read_V + D_V * x_V) * (z_V * tl.sigmoid(z_V))
                    out_ptrs = out_ptr + token * V + channel_V
                    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_V & is_token)
        if not IS_PARTIAL:
            store_state(state_ptr, cut_slot, slot_stride, offset_VK, is_VK, state_VK)
        start += length
        length = next_length

    if IS_PARTIAL:
        tl.store(partial_ptr + (segment + 1) * (K * V) + in_partial_VK, state_VK, mask=is_VK)
        tl.store(step_ptr + (segment + 1) * V + channel_V, sum_V, mask=is_V)
    elif segment == num_parts - 1:
        store_state(state_ptr, tl.load(dst_ptr + sequence), slot_stride, offset_VK, is_VK, state_VK)


@triton.jit
def _advance(state_VK, step_V, rate_VK, written_VK):
    """Return the state after time steps that write to it, given rates for powers of 2."""
    return fast_exp2(step_V[:, None] * rate_VK) * state_VK + written_VK
