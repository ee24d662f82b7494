"""The real-gated linear recurrent unit in Triton: a program walks through a segment with the states of some channels.

The gates of some tokens are loaded ahead of the walk, which is in the tokens' order; ``segments_triton.py`` says how
long sequences are divided. The decay of a segment is the product of its tokens'.

Invariants: channels do not depend on each other, so no program reads what another one writes, as long as no sequence's
``src`` is the ``dst`` of another one, or a cut's slot. Of rows past a chunk's end nothing reaches a state. In one
segment, how tokens are spread over chunks and steps changes no bit.

Shape suffixes: as in ``rglru.py``, and J segments of a sequence.
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
from strandline.kernels.recurrences.rglru import DECAY_SCALE, GatedUnitInputs
from strandline.kernels.recurrences.segments_triton import Division, chunks_of_segment, divide, runs
from strandline.kernels.sizes import NUM_SMS, cdiv, strides
from strandline.kernels.state_triton import load_state, softplus, store_state


class Launch(NamedTuple):
    """How a kernel is launched."""

    block_v: int
    num_warps: int
    rows: int
    """Tokens, or segments, that are loaded ahead: loads under way at once hide the memory's latency."""


LAUNCH = Launch(block_v=128, num_warps=2, rows=8)

DIVISION = Division(wanted_programs=12 * NUM_SMS, min_chunks=2, max_segments=32)
"""About as many programs as multiprocessors hold at once, with the registers that the kernel takes."""


def rglru_prefill(
    inputs: GatedUnitInputs,
    state_SV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """As ``rglru.rglru_prefill``; the last dimension of every tensor must be contiguous."""
    x_TV, i_TV, r_TV, first_T1, _ = inputs
    num_sequences, num_channels = chunks.num_sequences, x_TV.shape[1]
    num_programs = num_sequences * cdiv(num_channels, LAUNCH.block_v)
    num_segments = divide(DIVISION, num_programs, num_sequences, len(chunks.starts), launches)
    out_TV = torch.empty(x_TV.shape, dtype=x_TV.dtype, device=x_TV.device)
    partial_NJV = decay_NJV = None
    if num_segments > 1:
        shape = num_sequences, num_segments, num_channels
        partial_NJV, decay_NJV = (torch.empty(shape, dtype=torch.float32, device=x_TV.device) for _ in range(2))
    for num_parts, constants in runs(num_segments):
        _walk_kernel[(cdiv(num_channels, LAUNCH.block_v), num_sequences * num_parts)](
            *inputs, out_TV, state_SV, partial_NJV, decay_NJV, *slots,
            chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C, num_segments,
            *strides(x_TV, i_TV, r_TV, first_T1), state_SV.stride(0),
            **constants, V=num_channels, BLOCK_V=LAUNCH.block_v, ROWS=LAUNCH.rows,
            DECAY_SCALE=DECAY_SCALE, num_warps=LAUNCH.num_warps,
        )  # fmt: skip
    return out_TV


def rglru_decode(inputs: GatedUnitInputs, state_SV: Tensor, slots: Slots) -> Tensor:
    """As ``rglru.rglru_decode``; the last dimension of every tensor must be contiguous."""
    x_NV, i_NV, r_NV, first_N1, _ = inputs
    out_NV = torch.empty(x_NV.shape, dtype=x_NV.dtype, device=x_NV.device)
    _decode_kernel[(cdiv(x_NV.shape[1], LAUNCH.block_v), len(x_NV))](
        *inputs, out_NV, state_SV, *slots, *strides(x_NV, i_NV, r_NV, first_N1), state_SV.stride(0),
        V=x_NV.shape[1], BLOCK_V=LAUNCH.block_v, DECAY_SCALE=DECAY_SCALE, num_warps=LAUNCH.num_warps,
    )  # fmt: skip
    return out_NV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["stride_first", "num_segments"],
    do_not_specialize_on_alignment=[
        "first_ptr", "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
    ],
)  # fmt: skip
def _walk_kernel(
    x_ptr,
    i_ptr,
    r_ptr,
    first_ptr,
    rate_ptr,
    out_ptr,
    state_ptr,
    partial_ptr,
    decay_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    num_segments,
    stride_x,
    stride_i,
    stride_r,
    stride_first,
    slot_stride,
    IS_PARTIAL: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    DECAY_SCALE: tl.constexpr,
):
    """Walk through one segment with ``BLOCK_V`` channels.

    Of a divided sequence, ``partial`` has the initial state, then the states after every segment but the last as from
    zeros, and ``decay`` that of each of those: the partial run writes both.
    """
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    num_parts = num_segments - 1 if IS_PARTIAL else num_segments
    sequence = (tl.program_id(1) // num_parts).to(tl.int64)
    segment = tl.program_id(1) % num_parts
    is_V = channel_V < V
    rate_V = _decay_rates(rate_ptr, channel_V, is_V, DECAY_SCALE)
    first, end = chunks_of_segment(first_chunks_ptr, lengths_ptr, sequence, segment, num_segments, IS_DIVIDED)
    if IS_DIVIDED:
        partial_ptr += sequence * num_segments * V
        decay_ptr += sequence * num_segments * V
    if IS_PARTIAL:
        if segment == 0:
            before_V = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, channel_V, is_V)
            tl.store(partial_ptr + channel_V, before_V, mask=is_V)
        state_V = tl.zeros([BLOCK_V], tl.float32)
    elif IS_DIVIDED:
        state_V = tl.load(partial_ptr + channel_V, mask=is_V, other=0.0)
        for before in range(1, segment + 1, ROWS):
            partials = ()
            decays = ()
            for ahead in tl.static_range(ROWS):
                is_before_V = is_V & (before + ahead <= segment)
                offset_V = (before + ahead) * V + channel_V
                partials += (tl.load(partial_ptr + offset_V, mask=is_before_V, other=0.0),)
                decays += (tl.load(decay_ptr + offset_V, mask=is_before_V, other=1.0),)
            for ahead in tl.static_range(ROWS):
                state_V = decays[ahead] * state_V + partials[ahead]
    else:
        state_V = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, channel_V, is_V)

    left_V = tl.full([BLOCK_V], 1.0, tl.float32)
    # The next chunk's length is known a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0).to(tl.int32)
    for chunk in range(first, end):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0).to(tl.int32)
        cut_slot = tl.load(cut_slots_ptr + chunk)
        for row in range(0, length, ROWS):
            x = ()
            i = ()
            r = ()
            firsts = ()
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_token = row + ahead < length
                x += (tl.load(x_ptr + token * stride_x + channel_V, mask=is_V & is_token, other=0.0),)
                i += (tl.load(i_ptr + token * stride_i + channel_V, mask=is_V & is_token, other=0.0),)
                r += (tl.load(r_ptr + token * stride_r + channel_V, mask=is_V & is_token, other=0.0),)
                firsts += (tl.load(first_ptr + token * stride_first, mask=is_token, other=0.0),)
            for ahead in tl.static_range(ROWS):
                is_token = row + ahead < length
                decay_V, written_V = _gates(x[ahead], i[ahead], r[ahead], firsts[ahead], rate_V)
                state_V = tl.where(is_token, decay_V * state_V + written_V, state_V)
                if IS_PARTIAL:
                    left_V = tl.where(is_token, decay_V * left_V, left_V)
                else:
                    out_ptrs = out_ptr + (start + row + ahead) * V + channel_V
                    tl.store(out_ptrs, state_V.to(out_ptr.dtype.element_ty), mask=is_V & is_token)
        if not IS_PARTIAL:
            store_state(state_ptr, cut_slot, slot_stride, channel_V, is_V, state_V)
        start += length
        length = next_length

    if IS_PARTIAL:
        offset_V = (segment + 1) * V + channel_V
        tl.store(partial_ptr + offset_V, state_V, mask=is_V)
        tl.store(decay_ptr + offset_V, left_V, mask=is_V)
    elif segment == num_parts - 1:
        store_state(state_ptr, tl.load(dst_ptr + sequence), slot_stride, channel_V, is_V, state_V)


@triton.jit(do_not_specialize=["stride_first"], do_not_specialize_on_alignment=["first_ptr", "src_ptr", "dst_ptr"])
def _decode_kernel(
    x_ptr,
    i_ptr,
    r_ptr,
    first_ptr,
    rate_ptr,
    out_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    stride_x,
    stride_i,
    stride_r,
    stride_first,
    slot_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY_SCALE: tl.constexpr,
):
    """Advance ``BLOCK_V`` channels of a sequence by a token."""
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1).to(tl.int64)
    is_V = channel_V < V
    state_V = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, channel_V, is_V)
    x_V = tl.load(x_ptr + sequence * stride_x + channel_V, mask=is_V, other=0.0)
    i_V = tl.load(i_ptr + sequence * stride_i + channel_V, mask=is_V, other=0.0)
    r_V = tl.load(r_ptr + sequence * stride_r + channel_V, mask=is_V, other=0.0)
    rate_V = _decay_rates(rate_ptr, channel_V, is_V, DECAY_SCALE)
    decay_V, written_V = _gates(x_V, i_V, r_V, tl.load(first_ptr + sequence * stride_first), rate_V)
    state_V = decay_V * state_V + written_V
    tl.store(out_ptr + sequence * V + channel_V, state_V.to(out_ptr.dtype.element_ty), mask=is_V)
    store_state(state_ptr, tl.load(dst_ptr + sequence), slot_stride, channel_V, is_V, state_V)


@triton.jit
def _decay_rates(rate_ptr, channel_V, is_V, DECAY_SCALE: tl.constexpr):
    """Return the log decays of channels whose gates are open."""
    return -DECAY_SCALE * softplus(tl.load(rate_ptr + channel_V, mask=is_V, other=0.0).to(tl.float32))


@triton.jit
def _gates(x_V, i_V, r_V, first, rate_V):
    """Return the decay of a token, and what it writes."""
    log_decay_V = rate_V * tl.sigmoid(r_V.to(tl.float32))
    decay_V = tl.exp(log_decay_V)
    # 1 - a^2 is exp(x) - 1 with the sign changed; near 0 by its series, where the difference would vanish.
    x = 2.0 * log_decay_V
    series = 1.0 + x * (1.0 / 4 + x * (1.0 / 20 + x * (1.0 / 120 + x * (1.0 / 840))))
    near = x * (1.0 + x * (0.5 + x * (1.0 / 6) * series))
    scale_V = tl.sqrt(tl.where(x > -0.3, -near, 1.0 - decay_V * decay_V))
    scale_V = tl.where(first.to(tl.float32) > 0.5, 1.0, scale_V)
    return decay_V, scale_V * tl.sigmoid(i_V.to(tl.float32)) * x_V.to(tl.float32)
