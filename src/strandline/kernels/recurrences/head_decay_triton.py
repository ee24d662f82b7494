"""Recurrences with one decay per head and token, in Triton: a token per sequence, and prompts by chunks.

Per head, with the weight ``w`` of a token::

    S <- exp(log_decay) S + k (w v)^T;  out = S^T q + skip v

Weights and log decays are made of time steps (``Gates``), or the weights are 1 and the log decays constant.

Of a chunk, whose tokens' decays from its start are ``d``, the state before it being ``S``::

    out = d (q S) + (q k^T * decays) w v + skip v;  S <- decay S + k^T (to_end w v)

A first kernel computes all chunks' decays and weights. Then a program runs through chunks of a sequence with some value
columns of a head's state in float32 registers: only the last of its four products waits for the state before.

Where sequences and heads are too few to fill the GPU, each sequence is divided into segments (``segments_triton.py``).

State, values and outputs are transposed, values by keys: then the state and the values are left operands, which the
matrix units take from registers, and the right operands are tiles as they lie in memory.

Decode: a program owns ``BLOCK_V`` value channels of one head of one sequence. It reads its ``[K, BLOCK_V]`` tile of the
state once, before the launch ahead of it has ended, and writes it once.

In bfloat16 the operands of matrix products are rounded to bfloat16, the state where it is one, too. Sums are float32.
In float32 everything is.

Invariants: a cut's state is stored from the registers that carry it on. Of rows past a chunk's end, which belong to
other chunks, nothing reaches an output or a state, and none is written. No ``src`` may equal the ``dst`` of another
sequence, nor a cut's slot: programs run in any order. How a sequence is computed does not depend on the others, but
for the number of segments, which is one where engines are deterministic.

Source: Dao and Gu, "Transformers are SSMs", section 6.

Shape suffixes: T tokens, N sequences, G groups of heads, H heads (a multiple of G), K key channels, V value channels,
S slots, C chunks, L rows of a padded chunk (64), W value columns of a program, X numbers per row, J segments of a
sequence.
"""
# mypy: ignore-errors

from math import inf
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.gpu import Gpu, gpu_of
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.chunkwise import MIN_LOG_DECAY
from strandline.kernels.recurrences.decode_launches import HEADS, choose_decode
from strandline.kernels.recurrences.segments_triton import Division, chunks_of_segment, divide, runs
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2, strides
from strandline.kernels.stages_triton import staged
from strandline.kernels.state_triton import (
    FLOAT32_PRECISION,
    LOG2_E,
    at_least,
    at_most,
    fast_exp2,
    load_state,
    softplus,
    store_state,
)


class Launch(NamedTuple):
    """How states are carried through chunks."""

    columns: int
    """Value columns of a program; the matrix units take 64 rows, here columns, per four warps."""
    num_warps: int
    num_stages: int


NARROW = Launch(columns=64, num_warps=4, num_stages=2)
"""For heads of up to 64 values."""

WIDE = Launch(columns=128, num_warps=8, num_stages=3)

LONG_KEYS = Launch(columns=64, num_warps=8, num_stages=2)
"""For keys of more than 128 channels."""

IN_REGISTERS = Launch(columns=32, num_warps=8, num_stages=2)
"""Where registers hold all operands of matrix products: those of 64 columns are spilled."""

DIVISION = Division(wanted_programs=4 * NUM_SMS, min_chunks=8, max_segments=16)


class Gates(NamedTuple):
    """What decays and weights are made of.

    With time steps: ``weight = clamp(softplus(dt_factor dt + dt_bias), *dt_limit)``, and ``log_decay = -exp(rate)
    weight``. Without: 1, and the rate.
    """

    rate_H: Tensor
    dt_TH: Tensor | None = None
    dt_bias_H: Tensor | None = None
    dt_limit: tuple[float, float] = (0.0, inf)
    dt_factor: float = 1.0

    @property
    def arguments(self) -> tuple[object, ...]:
        """Return what kernels take."""
        stride = 0 if self.dt_TH is None else self.dt_TH.stride(0)
        return (self.dt_TH, self.rate_H, self.dt_bias_H, stride, *self.dt_limit, self.dt_factor)


class HeadDecayInputs(NamedTuple):
    """Queries, keys and values of some tokens; what decays and weights are made of; and a factor of each value."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    gates: Gates
    skip_H: Tensor | None = None


def choose_launch(gpu: Gpu, key_dim: int, value_dim: int) -> Launch:
    """Return the launch for heads of a size."""
    if gpu.multiplies_from_registers:
        return IN_REGISTERS
    if key_dim > 128:
        return LONG_KEYS
    return NARROW if value_dim <= NARROW.columns else WIDE


@triton.jit
def gate(
    dt, rate_ptr, dt_bias_ptr, head, dt_min, dt_max, dt_factor, HAS_STEPS: tl.constexpr, MIN_LOG_DECAY: tl.constexpr
):
    """Return the weight and the log decay, a finite number, of raw time steps of a head."""
    rate = tl.load(rate_ptr + head).to(tl.float32)
    if HAS_STEPS:
        step = at_most(at_least(softplus(dt * dt_factor + tl.load(dt_bias_ptr + head).to(tl.float32)), dt_min), dt_max)
        return step, at_least(-tl.exp(rate) * step, MIN_LOG_DECAY)
    else:
        return dt + 1.0, dt + at_least(rate, MIN_LOG_DECAY)


@triton.jit(
    do_not_specialize=["stride_dt", "dt_min", "dt_max", "dt_factor"],
    do_not_specialize_on_alignment=["dt_ptr", "starts_ptr", "lengths_ptr"],
)
def _rows_kernel(
    dt_ptr,
    rate_ptr,
    dt_bias_ptr,
    stride_dt,
    dt_min,
    dt_max,
    dt_factor,
    rows_ptr,
    starts_ptr,
    lengths_ptr,
    HAS_STEPS: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
):
    """Compute the decays and weights of one head in one chunk: zeros for rows past its end."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start = tl.load(starts_ptr + chunk)
    length = tl.load(lengths_ptr + chunk).to(tl.int32)
    # A CUDA graph's grid is sized for the largest number of chunks; the surplus programs return.
    if length == 0:
        return
    row_L = tl.arange(0, L)
    is_token_L = row_L < length
    dt_L = tl.zeros([L], tl.float32)
    if HAS_STEPS:
        dt_L = tl.load(dt_ptr + (start + row_L) * stride_dt + head, mask=is_token_L, other=0.0).to(tl.float32)
    weight_L, log_decay_L = gate(dt_L, rate_ptr, dt_bias_ptr, head, dt_min, dt_max, dt_factor, HAS_STEPS, MIN_LOG_DECAY)
    # A difference of large sums must keep the small decays that came after a strong one: the sums are float64, and
    # the difference of their high halves is exact where the exponential is not 0.
    sum_L = tl.cumsum(tl.where(is_token_L, log_decay_L * LOG2_E, 0.0).to(tl.float64), 0)
    high_L = sum_L.to(tl.float32)
    ptrs_L = rows_ptr + (chunk * H + head).to(tl.int64) * (3 * L) + row_L
    tl.store(ptrs_L, high_L)
    tl.store(ptrs_L + L, (sum_L - high_L.to(tl.float64)).to(tl.float32))
    tl.store(ptrs_L + 2 * L, tl.where(is_token_L, weight_L, 0.0))


@staged
@triton.jit(
    do_not_specialize=["num_segments"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr", "first_chunks_ptr"
    ],
)  # fmt: skip
def _advance_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    skip_ptr,
    out_ptr,
    state_ptr,
    partial_ptr,
    left_ptr,
    src_ptr,
    dst_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    first_chunks_ptr,
    num_segments,
    stride_qt,
    stride_qg,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vh,
    stride_ss,
    HAS_SKIP: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Carry ``BLOCK_W`` columns of one head's state through the chunks of one segment of a sequence.

    Of a divided sequence, ``partial`` has the initial state, then the states after every segment but the last as from
    zeros, and ``left`` the decay of each of those: the partial run writes both.
    """
    first_value = tl.program_id(0) * BLOCK_W
    head = tl.program_id(1)
    num_parts = num_segments - 1 if IS_PARTIAL else num_segments
    sequence = tl.program_id(2) // num_parts
    segment = tl.program_id(2) % num_parts
    group = head // (H // G)
    row_L = tl.arange(0, L)
    key_K = tl.arange(0, BLOCK_K)
    value_W = first_value + tl.arange(0, BLOCK_W)
    is_key_K = key_K < K
    is_value_W = value_W < V
    is_state_KW = is_key_K[:, None] & is_value_W[None, :]
    in_slot_KW = head * (K * V) + key_K[:, None] * V + value_W[None, :]
    in_rows_LK = row_L[:, None] * stride_qt + key_K[None, :]
    in_key_rows_LK = row_L[:, None] * stride_kt + key_K[None, :]
    in_value_rows_LW = row_L[:, None] * stride_vt + value_W[None, :]
    q_ptr += group * stride_qg
    k_ptr += group * stride_kg
    v_ptr += head * stride_vh
    is_after_LL = row_L[:, None] > row_L[None, :]
    skip = 0.0
    if HAS_SKIP:
        skip = tl.load(skip_ptr + head).to(tl.float32)

    first, end = chunks_of_segment(first_chunks_ptr, lengths_ptr, sequence, segment, num_segments, IS_DIVIDED)
    if IS_DIVIDED:
        partial_ptr += sequence.to(tl.int64) * num_segments * (H * K * V)
        left_ptr += sequence * num_segments * H + head
    src = tl.load(src_ptr + sequence)
    if IS_PARTIAL:
        if segment == 0:
            before_KW = load_state(state_ptr, src, stride_ss, in_slot_KW, is_state_KW)
            tl.store(partial_ptr + in_slot_KW, before_KW, mask=is_state_KW)
        state_WK = tl.zeros([BLOCK_W, BLOCK_K], tl.float32)
    elif IS_DIVIDED:
        state_KW = tl.load(partial_ptr + in_slot_KW, mask=is_state_KW, other=0.0)
        for before in range(1, segment + 1):
            partial_ptrs = partial_ptr + before * (H * K * V) + in_slot_KW
            partial_KW = tl.load(partial_ptrs, mask=is_state_KW, other=0.0)
            state_KW = state_KW * tl.load(left_ptr + before * H) + partial_KW
        state_WK = tl.trans(state_KW)
    else:
        state_WK = tl.trans(load_state(state_ptr, src, stride_ss, in_slot_KW, is_state_KW))
    left = 1.0
    # Where the next chunk lies is known a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0).to(tl.int32)
    for chunk in tl.range(first, end, num_stages=NUM_STAGES):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0).to(tl.int32)
        is_token_L = row_L < length
        is_key_LK = is_token_L[:, None] & is_key_K[None, :]
        is_value_LW = is_token_L[:, None] & is_value_W[None, :]
        k_LK = tl.load(k_ptr + start * stride_kt + in_key_rows_LK, mask=is_key_LK, other=0.0)
        v_LW = tl.load(v_ptr + start * stride_vt + in_value_rows_LW, mask=is_value_LW, other=0.0)
        head_rows_ptr = rows_ptr + (chunk * H + head).to(tl.int64) * (3 * L)
        high_L = tl.load(head_rows_ptr + row_L)
        low_L = tl.load(head_rows_ptr + L + row_L)
        weight_L = tl.load(head_rows_ptr + 2 * L + row_L)
        last_high = tl.load(head_rows_ptr + L - 1)
        last_low = tl.load(head_rows_ptr + 2 * L - 1)
        v_WL = tl.trans(v_LW)
        if not IS_PARTIAL:
            q_LK = tl.load(q_ptr + start * stride_qt + in_rows_LK, mask=is_key_LK, other=0.0)
            # Keys by queries.
            attend_LL = tl.dot(k_LK, tl.trans(q_LK), input_precision=PRECISION)
            change_LL = (high_L[None, :] - high_L[:, None]) + (low_L[None, :] - low_L[:, None])
            attend_LL *= fast_exp2(tl.where(is_after_LL, float("-inf"), change_LL)) * weight_L[:, None]
            attend_LL = attend_LL.to(v_LW.dtype)
            out_WL = tl.dot(state_WK.to(k_LK.dtype), tl.trans(q_LK), input_precision=PRECISION)
            out_WL *= tl.exp2(high_L)[None, :]
        ending_L = tl.exp2((last_high - high_L) + (last_low - low_L)) * weight_L
        written_WL = (v_WL.to(tl.float32) * ending_L[None, :]).to(k_LK.dtype)
        decay = tl.exp2(last_high)
        state_WK = tl.dot(written_WL, k_LK, acc=state_WK * decay, input_precision=PRECISION)
        if not IS_PARTIAL:
            out_WL = tl.dot(v_WL, attend_LL, acc=out_WL, input_precision=PRECISION)
            if HAS_SKIP:
                out_WL += skip * v_WL.to(tl.float32)
            out_ptrs = out_ptr + start * (H * V) + head * V + (row_L[:, None] * (H * V) + value_W[None, :])
            tl.store(out_ptrs, tl.trans(out_WL.to(out_ptr.dtype.element_ty)), mask=is_value_LW)
        if IS_PARTIAL:
            left *= decay
        else:
            cut_slot = tl.load(cut_slots_ptr + chunk)
            if cut_slot != 0:
                store_state(state_ptr, cut_slot, stride_ss, in_slot_KW, is_state_KW, tl.trans(state_WK))
        start += length
        length = next_length

    if IS_PARTIAL:
        tl.store(partial_ptr + (segment + 1) * (H * K * V) + in_slot_KW, tl.trans(state_WK), mask=is_state_KW)
        tl.store(left_ptr + (segment + 1) * H, left)
    elif segment == num_parts - 1:
        dst = tl.load(dst_ptr + sequence)
        store_state(state_ptr, dst, stride_ss, in_slot_KW, is_state_KW, tl.trans(state_WK))


def prefill(
    inputs: HeadDecayInputs,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    launches: Launches,
) -> Tensor:
    """Run over the new tokens of N sequences; return ``out_THV`` in the dtype of ``v_THV``.

    The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``.
    """
    q_TGK, k_TGK, v_THV, gates, skip_H = inputs
    _, num_heads, value_dim = v_THV.shape
    _, num_groups, key_dim = k_TGK.shape
    num_sequences, num_chunks, device = chunks.num_sequences, len(chunks.starts), v_THV.device
    launch = choose_launch(gpu_of(device), key_dim, value_dim)
    num_programs = max(1, num_sequences * num_heads * cdiv(value_dim, launch.columns))
    num_segments = divide(DIVISION, num_programs, num_sequences, num_chunks, launches)
    block_w = min(launch.columns, max(16, next_power_of_2(value_dim)))
    # X: the high and the low part of the log2 decay from the chunk's start, the weight.
    rows_CHXL = torch.empty(num_chunks, num_heads, 3, CHUNK_TOKENS, dtype=torch.float32, device=device)
    _rows_kernel[(num_heads, num_chunks)](
        *gates.arguments, rows_CHXL, chunks.starts_C, chunks.lengths_C,
        HAS_STEPS=gates.dt_TH is not None, H=num_heads, L=CHUNK_TOKENS, MIN_LOG_DECAY=MIN_LOG_DECAY, num_warps=1,
    )  # fmt: skip
    partial_NJHKV = left_NJH = None
    if num_segments > 1:
        shape = num_sequences, num_segments, num_heads
        partial_NJHKV = torch.empty(*shape, key_dim, value_dim, dtype=torch.float32, device=device)
        left_NJH = torch.empty(shape, dtype=torch.float32, device=device)
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=device)
    for num_parts, constants in runs(num_segments):
        _advance_kernel[(cdiv(value_dim, block_w), num_heads, num_sequences * num_parts)](
            q_TGK, k_TGK, v_THV, rows_CHXL, skip_H, out_THV, state_SHKV, partial_NJHKV, left_NJH, *slots,
            chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C, chunks.first_chunks_N1, num_segments,
            *strides(q_TGK, k_TGK, v_THV), state_SHKV.stride(0),
            HAS_SKIP=skip_H is not None, **constants,
            G=num_groups, H=num_heads, K=key_dim, V=value_dim,
            BLOCK_K=max(16, next_power_of_2(key_dim)), BLOCK_W=block_w, L=CHUNK_TOKENS, PRECISION=FLOAT32_PRECISION,
            NUM_STAGES=launch.num_stages if v_THV.dtype != torch.float32 else 1, num_warps=launch.num_warps,
        )  # fmt: skip
    return out_THV


def decode(inputs: HeadDecayInputs, state_SHKV: Tensor, slots: Slots, launches: Launches) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``v_NHV``.

    Strides as in :func:`prefill`. No sequence's ``src`` may be another sequence's ``dst``.
    """
    q_NGK, k_NGK, v_NHV, gates, skip_H = inputs
    num_sequences, num_heads, value_dim = v_NHV.shape
    _, num_groups, key_dim = k_NGK.shape
    launch = choose_decode(HEADS, num_sequences, launches)
    out_NHV = torch.empty(v_NHV.shape, dtype=v_NHV.dtype, device=v_NHV.device)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _decode_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        q_NGK, k_NGK, v_NHV, *gates.arguments, skip_H, state_SHKV, *slots, out_NHV,
        *strides(q_NGK, k_NGK, v_NHV), state_SHKV.stride(0),
        HAS_STEPS=gates.dt_TH is not None, HAS_SKIP=skip_H is not None,
        G=num_groups, H=num_heads, K=key_dim, V=value_dim, BLOCK_K=next_power_of_2(key_dim), BLOCK_V=block_v,
        MIN_LOG_DECAY=MIN_LOG_DECAY, num_warps=launch.num_warps, **overlap_options(v_NHV),
    )  # fmt: skip
    return out_NHV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize=["stride_dt", "dt_min", "dt_max", "dt_factor"],
    do_not_specialize_on_alignment=["dt_ptr", "src_ptr", "dst_ptr"],
)
def _decode_kernel(
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
    q_ptrs = q_ptr + sequence * q_row_stride + group * q_group_stride + row_K
    q_K = tl.load(q_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    k_ptrs = k_ptr + sequence * k_row_stride + group * k_group_stride + row_K
    k_K = tl.load(k_ptrs, mask=is_row_K, other=0.0).to(tl.float32)
    v_ptrs = v_ptr + sequence * v_row_stride + head * v_head_stride + column_V
    v_V = tl.load(v_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    dt = 0.0
    if HAS_STEPS:
        dt = tl.load(dt_ptr + sequence * stride_dt + head).to(tl.float32)
    weight, log_decay = gate(dt, rate_ptr, dt_bias_ptr, head, dt_min, dt_max, dt_factor, HAS_STEPS, MIN_LOG_DECAY)

    state_KV = state_KV * tl.exp(log_decay) + k_K[:, None] * (weight * v_V)[None, :]
    out_V = tl.sum(state_KV * q_K[:, None], 0)
    if HAS_SKIP:
        out_V += tl.load(skip_ptr + head).to(tl.float32) * v_V
    out_ptrs = out_ptr + (sequence * H + head) * V + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
    store_state(state_ptr, dst, slot_stride, tile_KV, is_tile_KV, state_KV)
