"""The short causal convolution in Triton: one pass over a prefill's tokens, and one kernel for a step of decoding.

A prefill is two launches. The first convolves all rows as if they were one sequence, which needs no table and reads
and writes every token once, but for the W - 1 rows before each program's own. The second overwrites the first W - 1
rows of every sequence, which reach into its window, and writes the windows. One program does all of that for a
sequence's channels, reading the old window before it writes any, so ``dst`` may be ``src``; cuts further in are
programs of their own, which read nothing but tokens.

No sequence's ``src`` may be another sequence's ``dst``, or the slot of another's cut: callers see to that (the torch
version reads all windows first). ``src`` may be shared, and may equal the same sequence's ``dst``. It may be the slot
of one of the sequence's own cuts, among its first ``IN_PLACE_CHUNKS``: the sequence's program writes that one too.

The update stays apart from the delta rule's decode kernel. There the programs of two value heads and of several
blocks of value channels would convolve the channels of one key head, and the window, which is shifted in place, can
be written only when the last of them has read it: an order that programs of one launch cannot keep without waiting
for each other, or without a second window per slot.

Shape suffixes as in ``kernels/recurrences/conv1d.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.recurrences.conv1d import Convolution
from strandline.kernels.sizes import cdiv, strides

BLOCK_T, BLOCK_C, NUM_WARPS = 16, 512, 2
"""Tile of the pass over a prefill: each thread loads 16 bytes of ``BLOCK_T + W - 1`` rows, all under way at once, and
converts each input once: with a load per tap of a tile, 36 instructions per output took longer than the memory."""

EDGE_BLOCK_C, EDGE_NUM_WARPS = 512, 4
"""Tile of the sequences' first rows and windows: little data, so few programs of short chains."""

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter knows no assembly."""

IN_PLACE_CHUNKS = tl.constexpr(2)
"""A cut after a log and one token is at the end of the first chunk, or of the second where the 64-token grid lies
between."""

SEARCH_BLOCK_N = 64
"""Sequences that a cut's program looks through at a time for the one that it belongs to."""

UPDATE_LAUNCHES: tuple[tuple[int, ...], ...] = ((16, 1, 128, 4), (64, 1, 1024, 4))
"""Largest batch, BLOCK_N, BLOCK_C and warps: at few sequences as many programs as there are, one channel per thread;
then 16-byte accesses. Elements do not mix, so the choice changes no bit."""

UPDATE_LARGEST: tuple[int, ...] = (4, 512, 4)
"""BLOCK_N, BLOCK_C and warps past the last of these: the weights are loaded once for several sequences."""


def causal_conv1d_prefill(
    x_TC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots, chunks: ChunkTable
) -> Tensor:
    """Convolve the new tokens of N sequences; return ``y_TC`` in x's dtype. Windows as in the torch version.

    ``x_TC`` may be a view of wider rows. No sequence's ``src`` may be another's ``dst``, or the slot of another's cut.
    """
    weight_CW, bias_C, activation = convolution
    num_tokens, num_channels = x_TC.shape
    num_taps = weight_CW.shape[1]
    y_TC = torch.empty((num_tokens, num_channels), dtype=x_TC.dtype, device=x_TC.device)
    shared = {
        "x_row_stride": x_TC.stride(0),
        "weight_channel_stride": weight_CW.stride(0),
        "weight_tap_stride": weight_CW.stride(1),
        "C": num_channels,
        "W": num_taps,
        "HAS_BIAS": bias_C is not None,
        "IS_SILU": activation == "silu",
    }
    bias_or_any_C = weight_CW if bias_C is None else bias_C
    _convolve_kernel[(cdiv(num_channels, BLOCK_C), cdiv(num_tokens, BLOCK_T))](
        x_TC, weight_CW, bias_or_any_C, y_TC, num_tokens, **shared,
        BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=NUM_WARPS,
    )  # fmt: skip
    num_sequences = chunks.num_sequences
    num_programs = num_sequences + (len(chunks.starts) if any(chunks.cut_slots) else 0)
    _edges_kernel[(cdiv(num_channels, EDGE_BLOCK_C), num_programs)](
        x_TC, weight_CW, bias_or_any_C, y_TC, window_SRC, *slots,
        chunks.first_chunks_N1, chunks.starts_C, chunks.lengths_C, chunks.cut_slots_C, num_sequences,
        *strides(window_SRC), **shared,
        BLOCK_N=SEARCH_BLOCK_N, BLOCK_C=EDGE_BLOCK_C, num_warps=EDGE_NUM_WARPS,
    )  # fmt: skip
    return y_TC


def causal_conv1d_update(x_NC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots) -> Tensor:
    """Convolve one new token of each of N sequences; return ``y_NC``. Inputs and windows as in the prefill."""
    weight_CW, bias_C, activation = convolution
    num_sequences, num_channels = x_NC.shape
    y_NC = torch.empty((num_sequences, num_channels), dtype=x_NC.dtype, device=x_NC.device)
    block_n, block_c, num_warps = _update_launch(num_sequences)
    _update_kernel[(cdiv(num_channels, block_c), cdiv(num_sequences, block_n))](
        x_NC, weight_CW, weight_CW if bias_C is None else bias_C, y_NC, window_SRC, *slots,
        num_sequences, x_NC.stride(0), *weight_CW.stride(), *strides(window_SRC),
        C=num_channels, W=weight_CW.shape[1], HAS_BIAS=bias_C is not None, IS_SILU=activation == "silu",
        BLOCK_N=block_n, BLOCK_C=block_c, num_warps=num_warps, **overlap_options(x_NC),
    )  # fmt: skip
    return y_NC


def _update_launch(num_sequences: int) -> tuple[int, int, int]:
    for largest_batch, *launch in UPDATE_LAUNCHES:
        if num_sequences <= largest_batch:
            return tuple(launch)
    return UPDATE_LARGEST


# The number of tokens and the slot tables' first sequence differ from step to step: none of them may ask for a
# kernel to be compiled anew because it is 1, or a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_tokens,
    x_row_stride,
    weight_channel_stride,
    weight_tap_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve all rows as one sequence: the first W - 1 rows of all but the first see its neighbour's last."""
    first_row = tl.program_id(1).to(tl.int64) * BLOCK_T
    channel_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel_C = channel_C < C
    weights = ()
    for tap in tl.static_range(W):
        weight_ptrs = weight_ptr + channel_C * weight_channel_stride + tap * weight_tap_stride
        weights += (tl.load(weight_ptrs, mask=is_channel_C, other=0.0).to(tl.float32),)
    rows = ()
    for i in tl.static_range(BLOCK_T + W - 1):
        row = first_row + (i - (W - 1))
        is_input_C = is_channel_C & (row >= 0) & (row < num_tokens)
        rows += (tl.load(x_ptr + row * x_row_stride + channel_C, mask=is_input_C, other=0.0),)
    for i in tl.static_range(BLOCK_T):
        y_C = tl.zeros([BLOCK_C], tl.float32)
        for tap in tl.static_range(W):
            y_C += rows[i + tap].to(tl.float32) * weights[tap]
        if HAS_BIAS:
            y_C += tl.load(bias_ptr + channel_C, mask=is_channel_C, other=0.0).to(tl.float32)
        y_ptrs = y_ptr + (first_row + i) * C + channel_C
        is_output_C = is_channel_C & (first_row + i < num_tokens)
        tl.store(y_ptrs, activate(y_C, y_ptr.dtype.element_ty, IS_SILU), mask=is_output_C)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
    ],
)  # fmt: skip
def _edges_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    window_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    num_sequences,
    slot_stride,
    window_row_stride,
    x_row_stride,
    weight_channel_stride,
    weight_tap_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Programs below N: a sequence's first rows, its last window, and cuts among its first W - 2 tokens.

    The others: the window at a chunk's end, where that is a cut with W - 1 tokens before it.
    """
    index = tl.program_id(1).to(tl.int64)
    channel_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel_C = channel_C < C
    if index < num_sequences:
        first_chunk = tl.load(first_chunks_ptr + index)
        end_chunk = tl.load(first_chunks_ptr + index + 1)
        start = tl.load(starts_ptr + first_chunk)
        # An empty sequence begins at an empty chunk.
        last_chunk = tl.maximum(end_chunk - 1, first_chunk)
        num_tokens = tl.load(starts_ptr + last_chunk) + tl.load(lengths_ptr + last_chunk) - start
        src = tl.load(src_ptr + index)
        dst = tl.load(dst_ptr + index)
        x_ptrs = x_ptr + start * x_row_stride + channel_C
        old_ptrs = window_ptr + src * slot_stride + channel_C
        # The window, then the first tokens: row j of these is the input W - 1 - j before the sequence's start.
        rows = ()
        for j in tl.static_range(W - 1):
            old_C = tl.load(old_ptrs + j * window_row_stride, mask=is_channel_C & (src != 0), other=0.0)
            rows += (old_C.to(x_ptr.dtype.element_ty),)
        for j in tl.static_range(W - 1):
            rows += (tl.load(x_ptrs + j * x_row_stride, mask=is_channel_C & (j < num_tokens), other=0.0),)
        # Other threads may still read what this one is about to overwrite.
        tl.debug_barrier()

        for j in tl.static_range(W - 1):
            y_C = tl.zeros([BLOCK_C], tl.float32)
            for tap in tl.static_range(W):
                weight_ptrs = weight_ptr + channel_C * weight_channel_stride + tap * weight_tap_stride
                weight_C = tl.load(weight_ptrs, mask=is_channel_C, other=0.0).to(tl.float32)
                y_C += rows[j + tap].to(tl.float32) * weight_C
            if HAS_BIAS:
                y_C += tl.load(bias_ptr + channel_C, mask=is_channel_C, other=0.0).to(tl.float32)
            y_ptrs = y_ptr + (start + j) * C + channel_C
            tl.store(y_ptrs, activate(y_C, y_ptr.dtype.element_ty, IS_SILU), mask=is_channel_C & (j < num_tokens))

        for j in tl.static_range(W - 1):
            source = num_tokens - (W - 1) + j
            row_C = tl.load(x_ptrs + source * x_row_stride, mask=is_channel_C & (source >= 0), other=0.0)
            for old in tl.static_range(W - 1):
                row_C = tl.where(source + (W - 1) == old, rows[old], row_C)
            new_ptrs = window_ptr + dst * slot_stride + j * window_row_stride + channel_C
            tl.store(new_ptrs, row_C.to(window_ptr.dtype.element_ty), mask=is_channel_C & (dst != 0))

        for i in tl.static_range(W - 2):
            is_chunk = first_chunk + i < end_chunk
            slot = tl.load(cut_slots_ptr + first_chunk + i, mask=is_chunk, other=0)
            last = tl.load(starts_ptr + first_chunk + i, mask=is_chunk, other=0)
            last += tl.load(lengths_ptr + first_chunk + i, mask=is_chunk, other=0) - start
            if (slot != 0) & (last < W - 1):
                for j in tl.static_range(W - 1):
                    row_C = rows[j]
                    for shift in tl.static_range(1, W - 1):
                        row_C = tl.where(last == shift, rows[j + shift], row_C)
                    new_ptrs = window_ptr + slot * slot_stride + j * window_row_stride + channel_C
                    tl.store(new_ptrs, row_C.to(window_ptr.dtype.element_ty), mask=is_channel_C)

        for i in tl.static_range(IN_PLACE_CHUNKS):
            is_chunk = first_chunk + i < end_chunk
            slot = tl.load(cut_slots_ptr + first_chunk + i, mask=is_chunk, other=0)
            last = tl.load(starts_ptr + first_chunk + i, mask=is_chunk, other=0)
            last += tl.load(lengths_ptr + first_chunk + i, mask=is_chunk, other=0) - start
            if (slot != 0) & (slot == src) & (last >= W - 1):
                for j in tl.static_range(W - 1):
                    row_C = tl.load(x_ptrs + (last - (W - 1) + j) * x_row_stride, mask=is_channel_C)
                    new_ptrs = window_ptr + slot * slot_stride + j * window_row_stride + channel_C
                    tl.store(new_ptrs, row_C.to(window_ptr.dtype.element_ty), mask=is_channel_C)
    else:
        chunk = index - num_sequences
        slot = tl.load(cut_slots_ptr + chunk)
        if slot != 0:
            end = tl.load(starts_ptr + chunk) + tl.load(lengths_ptr + chunk)
            # The sequence's first row: the last of the first rows of all sequences that start at or before the chunk.
            start = tl.zeros([], tl.int64)
            sequence = tl.zeros([], tl.int64)
            for first in range(0, num_sequences, BLOCK_N):
                sequence_N = first + tl.arange(0, BLOCK_N)
                is_sequence_N = sequence_N < num_sequences
                chunk_N = tl.load(first_chunks_ptr + sequence_N, mask=is_sequence_N, other=0)
                is_not_after_N = is_sequence_N & (chunk_N <= chunk)
                start_N = tl.load(starts_ptr + chunk_N, mask=is_not_after_N, other=0)
                start = tl.maximum(start, tl.max(start_N, 0))
                sequence = tl.maximum(sequence, tl.max(tl.where(is_not_after_N, sequence_N, 0), 0))
            if (end - start >= W - 1) & (slot != tl.load(src_ptr + sequence)):
                for j in tl.static_range(W - 1):
                    row_C = tl.load(x_ptr + (end - (W - 1) + j) * x_row_stride + channel_C, mask=is_channel_C)
                    new_ptrs = window_ptr + slot * slot_stride + j * window_row_stride + channel_C
                    tl.store(new_ptrs, row_C.to(window_ptr.dtype.element_ty), mask=is_channel_C)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["src_ptr", "dst_ptr"],
)
def _update_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    window_ptr,
    src_ptr,
    dst_ptr,
    num_sequences,
    x_row_stride,
    weight_channel_stride,
    weight_tap_stride,
    slot_stride,
    window_row_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first_channel = tl.program_id(0) * BLOCK_C
    sequence_N = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel_C = tl.arange(0, BLOCK_C)
    is_sequence_N = sequence_N < num_sequences
    is_channel_C = first_channel + channel_C < C
    is_tile_NC = is_sequence_N[:, None] & is_channel_C[None, :]
    src_N = tl.load(src_ptr + sequence_N, mask=is_sequence_N, other=0)
    dst_N = tl.load(dst_ptr + sequence_N, mask=is_sequence_N, other=0)
    old_ptrs = window_ptr + first_channel + (src_N * slot_stride)[:, None] + channel_C[None, :]
    rows = ()
    for j in tl.static_range(W - 1):
        is_old_NC = is_tile_NC & (src_N != 0)[:, None]
        old_NC = tl.load(old_ptrs + j * window_row_stride, mask=is_old_NC, other=0.0)
        rows += (old_NC.to(x_ptr.dtype.element_ty),)
    weights = ()
    for tap in tl.static_range(W):
        weight_ptrs = weight_ptr + (first_channel + channel_C) * weight_channel_stride + tap * weight_tap_stride
        weights += (tl.load(weight_ptrs, mask=is_channel_C, other=0.0).to(tl.float32),)
    # The next kernel, mostly a recurrence, loads states before it waits: it may start while this one waits, too.
    release_next(OVERLAPS)
    # The kernel before makes x; windows are older.
    wait_for_previous(OVERLAPS)
    x_ptrs = x_ptr + first_channel + (sequence_N * x_row_stride)[:, None] + channel_C[None, :]
    rows += (tl.load(x_ptrs, mask=is_tile_NC, other=0.0),)

    y_NC = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for tap in tl.static_range(W):
        y_NC += rows[tap].to(tl.float32) * weights[tap][None, :]
    if HAS_BIAS:
        y_NC += tl.load(bias_ptr + first_channel + channel_C, mask=is_channel_C, other=0.0).to(tl.float32)[None, :]
    # The window may be shifted in place: other threads may still read what this one is about to overwrite.
    tl.debug_barrier()

    new_ptrs = window_ptr + first_channel + (dst_N * slot_stride)[:, None] + channel_C[None, :]
    for j in tl.static_range(W - 1):
        new_NC = rows[j + 1].to(window_ptr.dtype.element_ty)
        tl.store(new_ptrs + j * window_row_stride, new_NC, mask=is_tile_NC & (dst_N != 0)[:, None])
    y_ptrs = y_ptr + first_channel + (sequence_N * C)[:, None] + channel_C[None, :]
    tl.store(y_ptrs, activate(y_NC, y_ptr.dtype.element_ty, IS_SILU), mask=is_tile_NC)


@triton.jit
def activate(y, dtype: tl.constexpr, IS_SILU: tl.constexpr):
    """Round to the outputs' dtype, then activate, as the published models do."""
    y = y.to(dtype)
    if IS_SILU:
        y = y.to(tl.float32)
        y = (y * _sigmoid(y)).to(dtype)
    return y


@triton.jit
def _sigmoid(y):
    """Return ``1 / (1 + exp(-y))``.

    Compiled, what would be a subnormal number is 0: without that the exponential and the division take nine
    instructions instead of four, of 25 per token and channel, and the prefill waits for arithmetic, not for memory.
    """
    if IS_INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-y))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
        "add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [y],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
