"""The real-gated linear recurrent unit in Triton: a program walks through a sequence with the states of some channels.

A decode is a walk of one token. The gates of ``ROWS`` tokens are loaded ahead of the walk, which is in the tokens'
order: how these are spread over chunks and steps changes no bit.

Invariants: channels do not depend on each other, so no program reads what another one writes, as long as no sequence's
``src`` is the ``dst`` of another one, or a cut's slot. Of rows past a chunk's end nothing reaches a state.

Shape suffixes: as in ``rglru.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.rglru import DECAY_SCALE
from strandline.kernels.sizes import cdiv
from strandline.kernels.state_triton import load_state, softplus, store_state

BLOCK_V, NUM_WARPS = 64, 2
"""A channel per thread."""

ROWS = 32
"""Loads under way at once hide the memory's latency."""


def rglru_prefill(
    x_TV: Tensor,
    i_TV: Tensor,
    r_TV: Tensor,
    first_T1: Tensor,
    rate_V: Tensor,
    state_SV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`strandline.kernels.rglru.rglru_prefill`; the last dimension of every tensor must be contiguous."""
    inputs, slots = (x_TV, i_TV, r_TV, first_T1, rate_V), (state_SV, src_N, dst_N)
    table = (chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C)
    return _walk(inputs, slots, table, ROWS)


def rglru_decode(
    x_NV: Tensor,
    i_NV: Tensor,
    r_NV: Tensor,
    first_N1: Tensor,
    rate_V: Tensor,
    state_SV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`strandline.kernels.rglru.rglru_decode`; the last dimension of every tensor must be contiguous."""
    return _walk((x_NV, i_NV, r_NV, first_N1, rate_V), (state_SV, src_N, dst_N), None, 1)


def _walk(
    inputs: tuple[Tensor, ...], slots: tuple[Tensor, ...], table: tuple[Tensor, ...] | None, num_rows: int
) -> Tensor:
    """Walk through the tokens of every sequence; without a table, each has one."""
    x_TV, i_TV, r_TV, first_T1, _ = inputs
    state_SV, src_N, _ = slots
    out_TV = torch.empty(x_TV.shape, dtype=x_TV.dtype, device=x_TV.device)
    _walk_kernel[(cdiv(x_TV.shape[1], BLOCK_V), len(src_N))](
        *inputs, out_TV, *slots, *(table or (None,) * 4),
        x_TV.stride(0), i_TV.stride(0), r_TV.stride(0), first_T1.stride(0), state_SV.stride(0),
        HAS_TABLE=table is not None, V=x_TV.shape[1], BLOCK_V=BLOCK_V, ROWS=num_rows, DECAY_SCALE=DECAY_SCALE,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_TV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["stride_first"],
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
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    stride_x,
    stride_i,
    stride_r,
    stride_first,
    slot_stride,
    HAS_TABLE: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    DECAY_SCALE: tl.constexpr,
):
    """Walk through one sequence with ``BLOCK_V`` channels."""
    channel_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    sequence = tl.program_id(1).to(tl.int64)
    is_channel_V = channel_V < V
    state_V = load_state(state_ptr, tl.load(src_ptr + sequence), slot_stride, channel_V, is_channel_V)
    rate_V = -DECAY_SCALE * softplus(tl.load(rate_ptr + channel_V, mask=is_channel_V, other=0.0).to(tl.float32))
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
            i = ()
            r = ()
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_loaded_V = is_channel_V & (row + ahead < length)
                x += (tl.load(x_ptr + token * stride_x + channel_V, mask=is_loaded_V, other=0.0),)
                i += (tl.load(i_ptr + token * stride_i + channel_V, mask=is_loaded_V, other=0.0),)
                r += (tl.load(r_ptr + token * stride_r + channel_V, mask=is_loaded_V, other=0.0),)
            for ahead in tl.static_range(ROWS):
                token = start + row + ahead
                is_token = row + ahead < length
                is_first = tl.load(first_ptr + token * stride_first, mask=is_token, other=0.0).to(tl.float32) > 0.5
                log_decay_V = rate_V * tl.sigmoid(r[ahead].to(tl.float32))
                scale_V = tl.where(is_first, 1.0, tl.sqrt(-_expm1(2.0 * log_decay_V)))
                written_V = scale_V * tl.sigmoid(i[ahead].to(tl.float32)) * x[ahead].to(tl.float32)
                state_V = tl.where(is_token, tl.exp(log_decay_V) * state_V + written_V, state_V)
                out_V = state_V.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + token * V + channel_V, out_V, mask=is_channel_V & is_token)
        if HAS_TABLE:
            store_state(state_ptr, tl.load(cut_slots_ptr + chunk), slot_stride, channel_V, is_channel_V, state_V)
        chunk += 1
    store_state(state_ptr, tl.load(dst_ptr + sequence), slot_stride, channel_V, is_channel_V, state_V)


@triton.jit
def _expm1(x):
    """Return ``exp(x) - 1`` where x is at most 0; near 0 by its series, where the difference would vanish."""
    series = 1.0 + x * (1.0 / 4 + x * (1.0 / 20 + x * (1.0 / 120 + x * (1.0 / 840))))
    near = x * (1.0 + x * (0.5 + x * (1.0 / 6) * series))
    return tl.where(x > -0.3, near, tl.exp(x) - 1.0)
