"""Mamba-2 in Triton: a token per sequence by one kernel, prompts by the chunks of ``head_decay_triton.py``.

Decode: a program owns ``BLOCK_V`` value channels of one head of one sequence. It reads its ``[K, BLOCK_V]`` tile of the
state once, before the launch ahead of it has ended, and writes it once. No sequence's ``src`` may be another one's
``dst``; ``src`` may be shared, and may equal the same sequence's ``dst``.

Shape suffixes: as in ``mamba2.py`` and ``head_decay_triton.py``.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.chunkwise import MIN_LOG_DECAY
from strandline.kernels.head_decay_triton import (
    FEW_PROGRAMS,
    Launch,
    Prepared,
    advance,
    choose_launch,
    empty_rows,
    scores_of,
    store_rows,
)
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.state_triton import LOG2_E, at_least, at_most, load_state, softplus, store_state


class DecodeLaunch(NamedTuple):
    """How the decode kernel is launched."""

    block_v: int
    num_warps: int


FEW = DecodeLaunch(block_v=16, num_warps=1)
"""For batches that do not fill the GPU; one warp ends the sums over K in shuffles, with no barrier."""

FEW_SEQUENCES = 8

MANY = DecodeLaunch(block_v=64, num_warps=4)
"""Rows of a tile are 256 bytes."""


def mamba2_prefill(
    x_THV: Tensor,
    B_TGK: Tensor,
    C_TGK: Tensor,
    dt_TH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """Run the layer over the new tokens of N sequences; return ``out_THV`` in the dtype of ``x_THV``.

    As :func:`strandline.kernels.mamba2.mamba2_prefill`. The last dimension of every tensor must be contiguous, and each
    slot's ``[H, K, V]``. No ``src`` may be the ``dst`` of another sequence, nor a cut's slot.
    """
    inputs = (x_THV, B_TGK, C_TGK, dt_TH, A_log_H, D_H, dt_bias_H, dt_limit)
    return _prefill(*inputs, state_SHKV, src_N, dst_N, chunks, choose_launch(len(src_N), *x_THV.shape[1:]))


def mamba2_prefill_invariant(
    x_THV: Tensor,
    B_TGK: Tensor,
    C_TGK: Tensor,
    dt_TH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
) -> Tensor:
    """As :func:`mamba2_prefill`, with one launch, whatever other sequences there are."""
    inputs = (x_THV, B_TGK, C_TGK, dt_TH, A_log_H, D_H, dt_bias_H, dt_limit)
    return _prefill(*inputs, state_SHKV, src_N, dst_N, chunks, FEW_PROGRAMS)


def _prefill(
    x_THV: Tensor,
    B_TGK: Tensor,
    C_TGK: Tensor,
    dt_TH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
    launch: Launch,
) -> Tensor:
    num_heads, num_chunks = x_THV.shape[1], len(chunks.starts)
    rows_CHXL = empty_rows(num_heads, chunks, x_THV)
    _rows_kernel[(num_heads, num_chunks)](
        dt_TH, A_log_H, dt_bias_H, rows_CHXL, chunks.starts_C, chunks.lengths_C, dt_TH.stride(0), *dt_limit,
        H=num_heads, L=CHUNK_TOKENS, MIN_LOG_DECAY=MIN_LOG_DECAY, num_warps=1,
    )  # fmt: skip
    prepared = Prepared(scores_of(C_TGK, B_TGK, chunks), rows_CHXL)
    return advance(C_TGK, B_TGK, x_THV, prepared, D_H, state_SHKV, src_N, dst_N, chunks, launch)


@triton.jit(
    do_not_specialize=["stride_dt", "dt_min", "dt_max"],
    do_not_specialize_on_alignment=["dt_ptr", "starts_ptr", "lengths_ptr"],
)
def _rows_kernel(
    dt_ptr,
    A_log_ptr,
    dt_bias_ptr,
    rows_ptr,
    starts_ptr,
    lengths_ptr,
    stride_dt,
    dt_min,
    dt_max,
    H: tl.constexpr,
    L: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
):
    """Compute the time steps of one head in one chunk, and the decays that they cause."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(starts_ptr + chunk)
    length = tl.load(lengths_ptr + chunk).to(tl.int32)
    # A CUDA graph's grid is sized for the largest number of chunks; the surplus programs return.
    if length == 0:
        return
    row_L = tl.arange(0, L)
    is_token_L = row_L < length
    dt_L = tl.load(dt_ptr + (start + row_L) * stride_dt + head, mask=is_token_L, other=0.0).to(tl.float32)
    step_L, log_decay_L = _time_step(dt_L, A_log_ptr + head, dt_bias_ptr + head, dt_min, dt_max, MIN_LOG_DECAY)
    log2_decay_L = tl.where(is_token_L, log_decay_L * LOG2_E, 0.0)
    store_rows(rows_ptr, chunk * H + head, log2_decay_L, tl.where(is_token_L, step_L, 0.0), row_L, L)


@triton.jit
def _time_step(dt, A_log_ptr, dt_bias_ptr, dt_min, dt_max, MIN_LOG_DECAY: tl.constexpr):
    """Return the time step of a head and the log decay that it causes, a finite number."""
    step = at_most(at_least(softplus(dt + tl.load(dt_bias_ptr).to(tl.float32)), dt_min), dt_max)
    return step, at_least(-tl.exp(tl.load(A_log_ptr).to(tl.float32)) * step, MIN_LOG_DECAY)


def mamba2_decode(
    x_NHV: Tensor,
    B_NGK: Tensor,
    C_NGK: Tensor,
    dt_NH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``x_NHV``.

    The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be
    another sequence's ``dst``.
    """
    inputs = (x_NHV, B_NGK, C_NGK, dt_NH, A_log_H, D_H, dt_bias_H)
    return _decode(inputs, dt_limit, state_SHKV, src_N, dst_N, FEW if len(x_NHV) <= FEW_SEQUENCES else MANY)


def mamba2_decode_invariant(
    x_NHV: Tensor,
    B_NGK: Tensor,
    C_NGK: Tensor,
    dt_NH: Tensor,
    A_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """As :func:`mamba2_decode`, with one launch for any number of sequences."""
    inputs = (x_NHV, B_NGK, C_NGK, dt_NH, A_log_H, D_H, dt_bias_H)
    return _decode(inputs, dt_limit, state_SHKV, src_N, dst_N, MANY)


def _decode(
    inputs: tuple[Tensor, ...],
    dt_limit: tuple[float, float],
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    launch: DecodeLaunch,
) -> Tensor:
    x_NHV, B_NGK, C_NGK, dt_NH, *_ = inputs
    num_sequences, num_heads, head_dim = x_NHV.shape
    _, num_groups, state_dim = B_NGK.shape
    out_NHV = torch.empty(x_NHV.shape, dtype=x_NHV.dtype, device=x_NHV.device)
    block_v = min(launch.block_v, next_power_of_2(head_dim))
    _decode_kernel[(cdiv(head_dim, block_v), num_heads, num_sequences)](
        *inputs, state_SHKV, src_N, dst_N, out_NHV, *dt_limit,
        x_NHV.stride(0), x_NHV.stride(1), B_NGK.stride(0), B_NGK.stride(1), C_NGK.stride(0), C_NGK.stride(1),
        dt_NH.stride(0), state_SHKV.stride(0),
        G=num_groups, H=num_heads, K=state_dim, V=head_dim, BLOCK_K=next_power_of_2(state_dim), BLOCK_V=block_v,
        MIN_LOG_DECAY=MIN_LOG_DECAY, num_warps=launch.num_warps, **overlap_options(x_NHV),
    )  # fmt: skip
    return out_NHV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize=["dt_min", "dt_max"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _decode_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    A_log_ptr,
    D_ptr,
    dt_bias_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    out_ptr,
    dt_min,
    dt_max,
    x_row_stride,
    x_head_stride,
    B_row_stride,
    B_group_stride,
    C_row_stride,
    C_group_stride,
    dt_row_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
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
    is_column_V = column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    tile_KV = head * (K * V) + row_K[:, None] * V + column_V[None, :]

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    state_KV = load_state(state_ptr, src, slot_stride, tile_KV, is_tile_KV)
    # The kernel before makes the inputs; states are older.
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_ptrs = x_ptr + sequence * x_row_stride + head * x_head_stride + column_V
    x_V = tl.load(x_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    B_ptrs = B_ptr + sequence * B_row_stride + group * B_group_stride + row_K
    B_K = tl.load(B_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    C_ptrs = C_ptr + sequence * C_row_stride + group * C_group_stride + row_K
    C_K = tl.load(C_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + sequence * dt_row_stride + head).to(tl.float32)
    step, log_decay = _time_step(dt, A_log_ptr + head, dt_bias_ptr + head, dt_min, dt_max, MIN_LOG_DECAY)

    state_KV = state_KV * tl.exp(log_decay) + B_K[:, None] * (step * x_V)[None, :]
    out_V = tl.sum(state_KV * C_K[:, None], 0) + tl.load(D_ptr + head).to(tl.float32) * x_V
    out_ptrs = out_ptr + (sequence * H + head) * V + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
    store_state(state_ptr, dst, slot_stride, tile_KV, is_tile_KV, state_KV)
