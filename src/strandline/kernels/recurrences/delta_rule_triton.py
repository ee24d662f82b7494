"""States of delta rules carried through the chunks of sequences, in Triton.

With a chunk's keys ``k``, queries ``q``, values ``v`` and the matrices that do not depend on the state, ``S`` being the
state before it, and every scale a number per token::

    e = v - read * (k S);  out = query * (q S) + attend e;  S <- decay * S + write^T e

A program runs through chunks with some value columns of a head's state in float32 registers. It keeps everything that
depends on the state transposed, values by keys: then the state and the errors are left operands, which the matrix units
take from the registers that they left them in, and the right operands are tiles as they lie in memory. Nothing on the
way from one state to the next passes through shared memory.

Where heads are too few to fill the GPU, long sequences are divided into segments which run side by side. What a chunk
does to the state is affine. So a first run, without outputs, computes for every segment of a sequence but the last the
state ``F`` after it as from zeros, and the matrix ``T`` that maps the state before it to its part of the state after
it: what becomes of the identity where all values are 0. The second run starts each segment from ``F + T S`` of the one
ahead. The first segment's ``F`` is computed from the sequence's initial state; its ``T`` is not needed.

All segments have the same number of chunks, but the last one of a sequence: a step has ``num_segments`` of them, or a
few more where sequences end within one. A program finds its segment in the chunk table on the device, because a CUDA
graph serves any prompts.

Operands of matrix products are rounded to the dtype of the keys, the state where it is one, too, and ``S`` and ``T`` to
two such numbers each. Sums are float32.

Invariants: a cut's state is stored from the registers that carry it on. Rows past a chunk's end, which belong to other
chunks, affect no output and no state, and are not written. No ``src`` may equal the ``dst`` of another sequence, nor a
cut's slot: programs run in any order. A sequence's cuts and its ``dst`` have slots of their own. The initial state of a
divided sequence is read from a copy, which the first run makes: ``dst`` may be ``src``.

One variant of the kernel is compiled per dtype, layer shape and run, for few sequences and for many: numbers of tokens,
chunks, sequences and segments, and where slot tables start, ask for no other.

Shape suffixes: T tokens, G key heads, H value heads, K key channels, V value channels, S slots, N sequences, C chunks,
L rows of a padded chunk (64), W value columns of a program, J segments of divided sequences, P parts of a matrix, X
scales per row (read, query), D channels of a head of any kind.
"""
# mypy: ignore-errors

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import CHUNK_TOKENS, ChunkTable
from strandline.kernels.gpu import gpu_of
from strandline.kernels.recurrences.segments_triton import Division, divide
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2, strides
from strandline.kernels.stages_triton import staged
from strandline.kernels.state_triton import FLOAT32_PRECISION, without_empty


class Advance(NamedTuple):
    """How states are carried on."""

    columns: int
    """Value columns of a program; the matrix units take 64 rows, here columns, per four warps."""
    num_warps: int
    num_stages: int
    num_segments: int = 1
    """Into which the chunks of the step are divided; a few more where sequences end within one."""


FEW_PROGRAMS = Advance(columns=64, num_warps=4, num_stages=3)
"""Up to one program per multiprocessor: 205 µs for one sequence of 8,192 tokens of 32 heads, where 128 columns take
350."""

MANY_PROGRAMS = Advance(columns=128, num_warps=8, num_stages=3)
"""Beyond: keys and matrices are read once per head. 109 µs for 8 sequences of 1,024 tokens, where 64 columns take 149.
Three chunks in flight fill a multiprocessor; with two, 137."""

REGISTER_COLUMNS = 32
"""Value columns of a program where registers hold all operands of matrix products, with ``REGISTER_WARPS``: those of 64
columns spill 1 to 10 KiB of a thread."""

REGISTER_WARPS = 8

PARTIAL_STAGES = 3
"""Chunks in flight in the run without outputs. Two programs share a multiprocessor, but where decays are of key
channels, which take 176 bytes too many. With two chunks, one waits for its tiles: 135 µs instead of 123 for 16 heads.
"""

DIVISION = Division(wanted_programs=NUM_SMS, min_chunks=10, max_segments=8)
"""For one sequence of 8,192 tokens of 32 heads in 2 segments 170 µs instead of 205, of 16 in 4 segments 112 instead of
220, of 8 in 8 segments 84 instead of 225. With fewer chunks, a second run costs more than it saves."""

MAX_DIVIDED = 32
"""Sequences of a step, beyond which none is divided: as many as a warp looks at together."""

MAX_DIVIDED_KEYS = 128
"""Channels of a key, beyond which sequences are not divided: a matrix of them would not fit in shared memory."""


class Prepared(NamedTuple):
    """What of a chunk does not depend on the state. Keys are padded to a power of two."""

    attend_CHLL: Tensor
    write_CHLK: Tensor
    scales_CHXL: Tensor | None
    """float32; X: of what keys read from the state, of what queries read. None: these are scaled."""
    decay: Tensor
    """float32, of a chunk and head; or of each key channel, where there are no scales."""


@triton.jit
def _segment_of(
    slot,
    first_chunks_ptr,
    lengths_ptr,
    num_sequences,
    num_segments,
    MIN_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
):
    """Return the segment that a slot of the grid has. In the partial run only divided sequences have slots.

    Returns:
        The sequence, the segment's first chunk and end, its index, the number of the sequence's segments (0: the slot
        is free), and the index of the sequence's first segment among those of divided sequences.
    """
    index_N = tl.arange(0, BLOCK_N)
    is_sequence_N = index_N < num_sequences
    first_N = tl.load(first_chunks_ptr + index_N, mask=is_sequence_N, other=0).to(tl.int32)
    end_N = tl.load(first_chunks_ptr + index_N + 1, mask=is_sequence_N, other=0).to(tl.int32)
    last_length_N = tl.load(lengths_ptr + end_N - 1, mask=end_N > first_N, other=1)
    num_chunks_N = end_N - first_N - (last_length_N == 0).to(tl.int32)
    segment_chunks = tl.maximum(tl.cdiv(tl.sum(num_chunks_N, 0), num_segments), MIN_CHUNKS)
    count_N = tl.where(is_sequence_N, tl.maximum(tl.cdiv(num_chunks_N, segment_chunks), 1), 0)
    divided_N = tl.where(count_N > 1, count_N, 0)
    slots_N = divided_N if IS_PARTIAL else count_N
    end_slot_N = tl.cumsum(slots_N, 0)
    sequence = tl.sum((end_slot_N <= slot).to(tl.int32), 0)
    is_mine_N = index_N == sequence
    count = tl.sum(tl.where(is_mine_N, count_N, 0), 0)
    segment = slot - tl.sum(tl.where(is_mine_N, end_slot_N - slots_N, 0), 0)
    first_partial = tl.sum(tl.where(index_N < sequence, divided_N, 0), 0)
    first = tl.sum(tl.where(is_mine_N, first_N, 0), 0)
    end = first + tl.sum(tl.where(is_mine_N, num_chunks_N, 0), 0)
    first += segment * segment_chunks
    return sequence, first, tl.minimum(first + segment_chunks, end), segment, count, first_partial


@staged
@triton.jit(
    do_not_specialize=["num_tokens", "num_chunks", "num_sequences", "num_segments"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr", "first_chunks_ptr"
    ],
)  # fmt: skip
def _advance_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    attend_ptr,
    write_ptr,
    scales_ptr,
    decay_ptr,
    out_ptr,
    state_ptr,
    partial_ptr,
    transitions_ptr,
    src_ptr,
    dst_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    first_chunks_ptr,
    num_tokens,
    num_chunks,
    num_sequences,
    num_segments,
    stride_qt,
    stride_qg,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vh,
    stride_ss,
    H: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    MIN_CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Carry ``BLOCK_W`` columns of one head's state through the chunks of one segment of a sequence.

    Of divided sequences, ``partial`` has the state after every segment, as from zeros but for the first one; in the
    index of the last one's it has the initial state. ``transitions`` has the matrices. The partial run writes both.

    Without scales, these are in the keys and queries, and decays are a number per key channel.
    """
    first_value = tl.program_id(0) * BLOCK_W
    head = tl.program_id(1)
    is_transition = False
    if IS_DIVIDED:
        # Free slots are the last: their programs come first, and do not wait for others to end.
        slot = tl.num_programs(2) - 1 - tl.program_id(2)
        if IS_PARTIAL:
            is_transition = slot >= 2 * num_segments
            slot = tl.where(is_transition, slot - 2 * num_segments, slot)
        sequence, first, end, segment, count, first_partial = _segment_of(
            slot, first_chunks_ptr, lengths_ptr, num_sequences, num_segments, MIN_CHUNKS, BLOCK_N, IS_PARTIAL
        )
        if count == 0:
            return
    else:
        sequence = tl.program_id(2)
        first = tl.load(first_chunks_ptr + sequence).to(tl.int32)
        end = without_empty(first, tl.load(first_chunks_ptr + sequence + 1).to(tl.int32), lengths_ptr)
    key_head = head // HEADS_PER_KEY
    row = tl.arange(0, L)
    key = tl.arange(0, BLOCK_K)
    value = first_value + tl.arange(0, BLOCK_W)
    is_value = value < V
    is_state_KW = (key < K)[:, None] & is_value[None, :]
    in_slot_KW = head * (K * V) + key[:, None] * V + value[None, :]
    src = tl.load(src_ptr + sequence).to(tl.int64)
    dst = tl.load(dst_ptr + sequence).to(tl.int64)
    if (first >= end) & (dst == 0):
        # A padded step has sequences without tokens, and fewer segments than there may be.
        return
    initial_ptrs = state_ptr + src * stride_ss + in_slot_KW
    if IS_DIVIDED:
        in_partial_WK = value[:, None] * BLOCK_K + key[None, :]
        partial_ptr += (first_partial * H + head).to(tl.int64) * (BLOCK_V * BLOCK_K)
    if IS_PARTIAL:
        if first_value >= tl.where(is_transition, BLOCK_K, V):
            return
        is_read_KW = is_state_KW & (src != 0) & (segment == 0)
        state_WK = tl.trans(tl.load(initial_ptrs, mask=is_read_KW, other=0.0).to(tl.float32))
        if is_transition:
            if segment == 0:
                return
        elif segment == 0:
            tl.store(partial_ptr + (count - 1) * (H * BLOCK_V * BLOCK_K) + in_partial_WK, state_WK)
        if segment == count - 1:
            return
        is_diagonal_WK = (value[:, None] == key[None, :]) & (key < K)[None, :]
        state_WK += tl.where(is_diagonal_WK & is_transition, 1.0, 0.0)
    elif IS_DIVIDED:
        if count > 1:
            before = tl.where(segment == 0, count - 1, 0)
            state_WK = tl.load(partial_ptr + before * (H * BLOCK_V * BLOCK_K) + in_partial_WK)
        else:
            state_WK = tl.trans(tl.load(initial_ptrs, mask=is_state_KW & (src != 0), other=0.0).to(tl.float32))
        transition_tiles = tl.make_tensor_descriptor(
            transitions_ptr, [2 * num_segments * (H * P * BLOCK_K), BLOCK_K], [BLOCK_K, 1], [BLOCK_K, BLOCK_K]
        )
        for before in tl.range(1, segment, num_stages=1):
            matrix = ((first_partial + before) * H + head) * P
            transition_KK = transition_tiles.load([matrix * BLOCK_K, 0])
            joined_WK = tl.load(partial_ptr + before * (H * BLOCK_V * BLOCK_K) + in_partial_WK)
            high_WK = state_WK.to(transition_KK.dtype)
            joined_WK = tl.dot(high_WK, transition_KK, acc=joined_WK, input_precision=PRECISION)
            if P == 2:
                low_WK = (state_WK - high_WK.to(tl.float32)).to(transition_KK.dtype)
                joined_WK = tl.dot(low_WK, transition_KK, acc=joined_WK)
                joined_WK = tl.dot(high_WK, transition_tiles.load([(matrix + 1) * BLOCK_K, 0]), acc=joined_WK)
            state_WK = joined_WK
    else:
        state_WK = tl.trans(tl.load(initial_ptrs, mask=is_state_KW & (src != 0), other=0.0).to(tl.float32))

    G: tl.constexpr = H // HEADS_PER_KEY
    k_tiles = tl.make_tensor_descriptor(k_ptr, [num_tokens, G * stride_kg], [stride_kt, 1], [L, BLOCK_K])
    v_tiles = tl.make_tensor_descriptor(v_ptr, [num_tokens, H * stride_vh], [stride_vt, 1], [L, BLOCK_W])
    if not IS_PARTIAL:
        q_tiles = tl.make_tensor_descriptor(q_ptr, [num_tokens, G * stride_qg], [stride_qt, 1], [L, BLOCK_K])
        attend_tiles = tl.make_tensor_descriptor(attend_ptr, [num_chunks * (H * L), L], [L, 1], [L, L])
    write_tiles = tl.make_tensor_descriptor(write_ptr, [num_chunks * (H * L), BLOCK_K], [BLOCK_K, 1], [L, BLOCK_K])
    # The next chunk's location is loaded a step ahead, so that its loads wait for no other load.
    start = tl.load(starts_ptr + first, mask=first < end, other=0).to(tl.int32)
    length = tl.load(lengths_ptr + first, mask=first < end, other=0).to(tl.int32)
    for chunk in tl.range(first, end, num_stages=NUM_STAGES):
        next_length = tl.load(lengths_ptr + chunk + 1, mask=chunk + 1 < end, other=0).to(tl.int32)
        if HAS_SCALES:
            decay = tl.load(decay_ptr + chunk * H + head)
        else:
            decay = tl.load(decay_ptr + (chunk * H + head).to(tl.int64) * BLOCK_K + key)[None, :]
        is_token = row < length
        tile = chunk * H + head
        k_LK = k_tiles.load([start, key_head * stride_kg])
        v_LW = v_tiles.load([start, head * stride_vh + first_value])
        write_LK = write_tiles.load([tile * L, 0])
        if HAS_SCALES:
            scale_ptrs = scales_ptr + tile.to(tl.int64) * (2 * L) + row
            read_scale = tl.load(scale_ptrs)[None, :]
            query_scale = tl.load(scale_ptrs + L)[None, :]
        else:
            read_scale = 1.0
            query_scale = 1.0
        if not IS_PARTIAL:
            cut_slot = tl.load(cut_slots_ptr + chunk)
            q_LK = q_tiles.load([start, key_head * stride_qg])
            attend_LL = attend_tiles.load([tile * L, 0])

        operand_WK = state_WK.to(k_LK.dtype)
        read_WL = tl.dot(operand_WK, tl.trans(k_LK), input_precision=PRECISION)
        value_WL = tl.trans(v_LW).to(tl.float32)
        if IS_PARTIAL:
            value_WL = tl.where(is_transition, 0.0, value_WL)
        error_WL = (value_WL - read_WL * read_scale).to(k_LK.dtype)
        if length < L:
            error_WL = tl.where(is_token[None, :], error_WL, 0.0)
        state_WK = tl.dot(error_WL, write_LK, acc=state_WK * decay, input_precision=PRECISION)
        if not IS_PARTIAL:
            out_WL = tl.dot(operand_WK, tl.trans(q_LK), input_precision=PRECISION) * query_scale
            out_WL = tl.dot(error_WL, tl.trans(attend_LL), acc=out_WL, input_precision=PRECISION)
            out_ptrs = out_ptr + (start.to(tl.int64) * (H * V) + head * V) + (row[:, None] * (H * V) + value[None, :])
            out_LW = tl.trans(out_WL.to(out_ptr.dtype.element_ty))
            tl.store(out_ptrs, out_LW, mask=is_token[:, None] & is_value[None, :])
            if cut_slot != 0:
                cut_KW = tl.trans(state_WK).to(state_ptr.dtype.element_ty)
                tl.store(state_ptr + cut_slot.to(tl.int64) * stride_ss + in_slot_KW, cut_KW, mask=is_state_KW)
        start += length
        length = next_length

    if IS_PARTIAL:
        if is_transition:
            high_WK = state_WK.to(transitions_ptr.dtype.element_ty)
            matrix = (((first_partial + segment) * H + head) * P).to(tl.int64)
            transition_ptrs = transitions_ptr + matrix * (BLOCK_K * BLOCK_K) + in_partial_WK
            tl.store(transition_ptrs, high_WK, mask=(value < BLOCK_K)[:, None])
            if P == 2:
                low_WK = (state_WK - high_WK.to(tl.float32)).to(high_WK.dtype)
                tl.store(transition_ptrs + BLOCK_K * BLOCK_K, low_WK, mask=(value < BLOCK_K)[:, None])
        else:
            tl.store(partial_ptr + segment * (H * BLOCK_V * BLOCK_K) + in_partial_WK, state_WK)
    else:
        if IS_DIVIDED:
            dst = tl.where(segment == count - 1, dst, 0)
        if dst != 0:
            last_KW = tl.trans(state_WK).to(state_ptr.dtype.element_ty)
            tl.store(state_ptr + dst * stride_ss + in_slot_KW, last_KW, mask=is_state_KW)


def advance(
    qkv: tuple[Tensor, Tensor, Tensor],
    prepared: Prepared,
    state_SHKV: Tensor,
    slots: Slots,
    chunks: ChunkTable,
    launch: Advance,
    out_THV: Tensor | None = None,
) -> Tensor:
    """Carry the states through the chunks; return ``out_THV`` in the dtype of the queries, a new tensor if None.

    Rows and heads must start at multiples of 16 bytes (:func:`aligned`).
    """
    q_TGK, k_TGK, v_THV = qkv
    num_tokens, num_heads, value_dim = v_THV.shape
    _, num_key_heads, key_dim = k_TGK.shape
    num_sequences, num_segments, device = chunks.num_sequences, launch.num_segments, q_TGK.device
    if gpu_of(device).multiplies_from_registers:
        launch = launch._replace(columns=REGISTER_COLUMNS, num_warps=REGISTER_WARPS)
    block_k = prepared.write_CHLK.shape[3]
    block_w = min(launch.columns, max(16, next_power_of_2(value_dim)))
    num_blocks = cdiv(value_dim, block_w)
    is_float32 = q_TGK.dtype == torch.float32
    is_divided = num_segments > 1 and block_k <= MAX_DIVIDED_KEYS
    num_parts = 1 if is_float32 else 2
    partial_JHVK = transitions_JHPKK = None
    if is_divided:
        # A divided sequence has less than twice as many segments as its share of all chunks.
        shape = 2 * num_segments, num_heads
        partial_JHVK = torch.empty(*shape, num_blocks * block_w, block_k, dtype=torch.float32, device=device)
        transitions_JHPKK = torch.empty(*shape, num_parts, block_k, block_k, dtype=k_TGK.dtype, device=device)
    if out_THV is None:
        out_THV = torch.empty(v_THV.shape, dtype=q_TGK.dtype, device=device)
    # The tiles' descriptions are made by the kernel: on the host they would take longer than the launch.
    triton.set_allocator(_scratch)
    for is_partial in (True, False) if is_divided else (False,):
        grid = (num_blocks, num_heads, num_sequences + num_segments if is_divided else num_sequences)
        if is_partial:
            grid = (max(num_blocks, cdiv(block_k, block_w)), num_heads, 4 * num_segments)
        num_stages = PARTIAL_STAGES if is_partial else launch.num_stages
        _advance_kernel[grid](
            *qkv, *prepared, out_THV, state_SHKV, partial_JHVK, transitions_JHPKK, *slots,
            chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C, chunks.first_chunks_N1,
            num_tokens, len(chunks.starts), num_sequences, num_segments,
            *strides(*qkv), state_SHKV.stride(0),
            H=num_heads, HEADS_PER_KEY=num_heads // num_key_heads, K=key_dim, V=value_dim,
            BLOCK_K=block_k, BLOCK_V=num_blocks * block_w, BLOCK_W=block_w, L=CHUNK_TOKENS, P=num_parts,
            IS_DIVIDED=is_divided, IS_PARTIAL=is_partial, MIN_CHUNKS=DIVISION.min_chunks, BLOCK_N=MAX_DIVIDED,
            HAS_SCALES=prepared.scales_CHXL is not None, PRECISION=FLOAT32_PRECISION,
            NUM_STAGES=1 if is_float32 else num_stages, num_warps=launch.num_warps,
        )  # fmt: skip
    return out_THV


def choose_launch(chunks: ChunkTable, num_heads: int, value_dim: int) -> Advance:
    """Return how the states of all sequences' heads are carried on."""
    first_chunks = chunks.first_chunks
    num_chunks, longest = first_chunks[-1], max((end - first for first, end in pairwise(first_chunks)), default=0)
    # Short sequences beside a long one end early: what counts is how many long ones have as many chunks as all.
    num_sequences = round(num_chunks / max(1, longest))
    num_programs = num_heads * cdiv(value_dim, FEW_PROGRAMS.columns)
    if num_sequences * num_programs > NUM_SMS:
        return MANY_PROGRAMS
    num_segments = divide(DIVISION, num_programs, 1, longest)
    is_any_divided = longest > max(DIVISION.min_chunks, cdiv(num_chunks, num_segments))
    if is_any_divided and chunks.num_sequences <= MAX_DIVIDED:
        return FEW_PROGRAMS._replace(num_segments=num_segments)
    return FEW_PROGRAMS


def aligned(x_THD: Tensor) -> Tensor:
    """Return the tensor with rows and heads at multiples of 16 bytes, as the copies of tiles need them."""
    items = 16 // x_THD.element_size()
    stride_t, stride_h, _ = x_THD.stride()
    if stride_t % items == 0 and stride_h % items == 0 and x_THD.data_ptr() % 16 == 0:
        return x_THD
    num_tokens, num_heads, size = x_THD.shape
    padded_THD = x_THD.new_zeros(num_tokens, num_heads, -(-size // items) * items)
    padded_THD[:, :, :size] = x_THD
    return padded_THD[:, :, :size]


def _scratch(num_bytes: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for the descriptions of tiles; torch's is aligned to 512 bytes, and ordered with the stream."""
    return torch.empty(num_bytes, dtype=torch.int8, device="cuda")
