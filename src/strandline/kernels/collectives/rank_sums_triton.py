"""Sums of few rows over the ranks' GPUs in one launch, with the residual addition and the norm that follow; gathers.

Every rank stores its rows into buffers of all other ranks over NVLink, and waits for theirs in its own. A 64-bit word
holds 32 bits of a row and a 32-bit flag, the epoch of the row: an aligned word is stored at once, so a rank that sees
the flag sees the bits. A message takes one trip to the other GPU, without a fence and without a barrier before or
after.

One program has one row. Its epoch is one more than the row's counter, which lies in this GPU's memory and which this
program alone advances. So nothing on the host changes between two calls, and calls can be replayed from a CUDA graph.

Invariant: a word is overwritten only after it has been read. Two parities of the epoch have separate words. A rank
stores words of a row's epoch ``e + 2`` in a kernel that starts after its kernel of epoch ``e + 1`` has ended. That one
waited for the words that every other rank stored in its kernel of ``e + 1``, and that kernel started after the other
rank's kernel of ``e``, which read the words of ``e``, had ended. All this holds where the kernels of a rank run one
after another, on one stream or on streams that wait for each other, and where all ranks call alike.

Epochs go from 1 to ``LAST_EPOCH`` and then start again at 1, which has the other parity. A flag is 0 in new memory, and
otherwise that of an earlier epoch of the same parity. Words that a call does not store, since its rows are narrower,
would have to be left out ``LAST_EPOCH`` times in a row to be taken for new.

A kernel waits for as long as another rank does not call. If that rank's process has ended, the engine ends this one,
and the kernel with it.

Sums are taken in float32, in the order of the ranks, and rounded once: all ranks get the same bits.

Source: the protocol LL of NCCL (``src/device/prims_ll.h``) for words with flags.

Shape suffixes: T rows, E channels, C columns of all ranks, W words of a row, N ranks, R rows of the counters. ``first``
and ``second`` are the two halves of words: bfloat16 channels ``2 * w`` and ``2 * w + 1``; a word of float32 has one
channel, and ``second`` is zero.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import next_power_of_2

LAST_EPOCH = 1 << 30
"""An even number, after which the other parity follows."""

WORDS_OF_WARP = 64
"""Each thread moves two words, 16 bytes, at once."""

MAX_WARPS = 16


@triton.jit
def _halves(word_W, IS_PAIR: tl.constexpr):
    """Return the channels of words in float32."""
    if IS_PAIR:
        first_W = (word_W << 16).to(tl.float32, bitcast=True)
        second_W = (word_W & -65536).to(tl.float32, bitcast=True)
    else:
        first_W = word_W.to(tl.float32, bitcast=True)
        second_W = tl.zeros_like(first_W)
    return first_W, second_W


@triton.jit
def _rounded(x_W, IS_PAIR: tl.constexpr):
    """Return float32 rounded to the message's dtype."""
    if IS_PAIR:
        return x_W.to(tl.bfloat16).to(tl.float32)
    else:
        return x_W


@triton.jit
def _word(first_W, second_W, IS_PAIR: tl.constexpr):
    """Return words of channels, rounded."""
    if IS_PAIR:
        low_W = first_W.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high_W = second_W.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return low_W | high_W
    else:
        return first_W.to(tl.int32, bitcast=True)


@triton.jit
def _buffers(address_ptr, NUM_RANKS: tl.constexpr):
    """Return pointers to the buffers of all ranks."""
    buffers_ptr = ()
    for rank in tl.static_range(NUM_RANKS):
        buffer_ptr = tl.load(address_ptr + rank).to(tl.pointer_type(tl.int64))
        buffers_ptr += (tl.multiple_of(buffer_ptr, 16),)
    return buffers_ptr


@triton.jit
def _send(buffers_ptr, offset, word_W, own_W, mask_W, epoch, RANK: tl.constexpr):
    """Store words with the flag of the epoch into the buffers of all other ranks."""
    flagged_W = (own_W.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
    for peer in tl.static_range(len(buffers_ptr)):
        if peer != RANK:
            # Written through: a store that other GPUs see, as a volatile one.
            tl.store(buffers_ptr[peer] + offset + word_W, flagged_W, mask=mask_W, cache_modifier=".wt")
    # No store may move after a loop that waits, since another rank may wait for it.
    tl.debug_barrier()


@triton.jit
def _received(received_W_ptr, mask_W, epoch, max_polls):
    """Return words once they have the flag of the epoch."""
    flagged_W = tl.load(received_W_ptr, mask=mask_W, other=0, volatile=True)
    polls_left = max_polls
    while (tl.sum((mask_W & ((flagged_W >> 32).to(tl.int32) != epoch)).to(tl.int32), axis=0) > 0) & (polls_left != 0):
        flagged_W = tl.load(received_W_ptr, mask=mask_W, other=0, volatile=True)
        # A negative number stands for no limit, and stays.
        polls_left = tl.where(polls_left > 0, polls_left - 1, polls_left)
    return flagged_W.to(tl.int32)


@triton.jit(do_not_specialize=["max_polls"])
def _sum_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    address_ptr,
    counter_ptr,
    eps,
    max_polls,
    E: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    LAST_EPOCH: tl.constexpr,
    ADDS: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    IS_PAIR: tl.constexpr = NUM_WORDS != E
    SLOT: tl.constexpr = MAX_ROWS * MAX_WORDS
    row = tl.program_id(0)
    word_W = tl.arange(0, BLOCK_W)
    mask_W = word_W < NUM_WORDS
    if ADDS:
        if IS_PAIR:
            first_weight_W = tl.load(weight_ptr + 2 * word_W, mask=mask_W, other=0.0).to(tl.float32)
            second_weight_W = tl.load(weight_ptr + 2 * word_W + 1, mask=mask_W, other=0.0).to(tl.float32)
        else:
            first_weight_W = tl.load(weight_ptr + word_W, mask=mask_W, other=0.0).to(tl.float32)
            second_weight_W = tl.zeros_like(first_weight_W)
    buffers_ptr = _buffers(address_ptr, NUM_RANKS)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    epoch = (tl.load(counter_ptr + row) & (LAST_EPOCH - 1)) + 1
    # For each parity, senders one after another; for each sender, rows one after another.
    offset = (epoch & 1) * (NUM_RANKS * SLOT) + row * MAX_WORDS
    x_W_ptr = (x_ptr + row * E).to(tl.pointer_type(tl.int32)) + word_W
    own_W = tl.load(x_W_ptr, mask=mask_W, other=0)
    _send(buffers_ptr, offset + RANK * SLOT, word_W, own_W, mask_W, epoch, RANK)
    if ADDS:
        residual_W = tl.load((residual_ptr + row * E).to(tl.pointer_type(tl.int32)) + word_W, mask=mask_W, other=0)
    for sender in tl.static_range(NUM_RANKS):
        if sender == RANK:
            part_W = own_W
        else:
            part_W = _received(buffers_ptr[RANK] + (offset + sender * SLOT) + word_W, mask_W, epoch, max_polls)
        first_part_W, second_part_W = _halves(part_W, IS_PAIR)
        if sender == 0:
            first_W = first_part_W
            second_W = second_part_W
        else:
            first_W += first_part_W
            second_W += second_part_W
    if ADDS:
        first_residual_W, second_residual_W = _halves(residual_W, IS_PAIR)
        first_W = _rounded(_rounded(first_W, IS_PAIR) + first_residual_W, IS_PAIR)
        second_W = _rounded(_rounded(second_W, IS_PAIR) + second_residual_W, IS_PAIR)
    tl.store(x_W_ptr, _word(first_W, second_W, IS_PAIR), mask=mask_W)
    if ADDS:
        scale = tl.rsqrt(tl.sum(first_W * first_W + second_W * second_W, axis=0) / E + eps)
        if IS_ZERO_CENTERED:
            first_W = first_W * scale * (first_weight_W + 1.0)
            second_W = second_W * scale * (second_weight_W + 1.0)
        else:
            first_W = _rounded(first_W * scale, IS_PAIR) * first_weight_W
            second_W = _rounded(second_W * scale, IS_PAIR) * second_weight_W
        normed_W_ptr = (normed_ptr + row * E).to(tl.pointer_type(tl.int32)) + word_W
        tl.store(normed_W_ptr, _word(first_W, second_W, IS_PAIR), mask=mask_W)
    # Not before all threads have read it.
    tl.debug_barrier()
    tl.store(counter_ptr + row, epoch)


@triton.jit(do_not_specialize=["max_polls"])
def _gather_kernel(
    x_ptr,
    out_ptr,
    address_ptr,
    counter_ptr,
    max_polls,
    NUM_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    LAST_EPOCH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    SLOT: tl.constexpr = MAX_ROWS * MAX_WORDS
    row = tl.program_id(0)
    word_W = tl.arange(0, BLOCK_W)
    mask_W = word_W < NUM_WORDS
    buffers_ptr = _buffers(address_ptr, NUM_RANKS)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    epoch = (tl.load(counter_ptr + row) & (LAST_EPOCH - 1)) + 1
    offset = (epoch & 1) * (NUM_RANKS * SLOT) + row * MAX_WORDS
    own_W = tl.load(x_ptr + row * NUM_WORDS + word_W, mask=mask_W, other=0)
    _send(buffers_ptr, offset + RANK * SLOT, word_W, own_W, mask_W, epoch, RANK)
    for sender in tl.static_range(NUM_RANKS):
        if sender == RANK:
            part_W = own_W
        else:
            part_W = _received(buffers_ptr[RANK] + (offset + sender * SLOT) + word_W, mask_W, epoch, max_polls)
        tl.store(out_ptr + (row * NUM_RANKS + sender) * NUM_WORDS + word_W, part_W, mask=mask_W)
    # Not before all threads have read it.
    tl.debug_barrier()
    tl.store(counter_ptr + row, epoch)


def gather_rows(x_TW: Tensor, connection: Connection, max_words: int, max_polls: int = -1) -> Tensor:
    """Return all ranks' rows side by side.

    Args:
        x_TW: int32, contiguous.
        max_polls: as the others, as ``sum_rows`` takes them.
    """
    num_rows, num_words = x_TW.shape
    address_N, counter_R = connection.address_N, connection.counter
    out_TC = x_TW.new_empty(num_rows, len(address_N) * num_words)
    block = next_power_of_2(num_words)
    _gather_kernel[(num_rows,)](
        x_TW,
        out_TC,
        address_N,
        counter_R,
        max_polls,
        NUM_WORDS=num_words,
        BLOCK_W=block,
        RANK=connection.rank,
        NUM_RANKS=len(address_N),
        MAX_ROWS=len(counter_R),
        MAX_WORDS=max_words,
        LAST_EPOCH=LAST_EPOCH,
        num_warps=_num_warps(block),
        **overlap_options(x_TW),
    )
    return out_TC


def sum_rows(x_TE: Tensor, connection: Connection, max_words: int, max_polls: int = -1) -> None:
    """Replace rows by the sums of all ranks' rows.

    Args:
        x_TE: bfloat16 or float32, contiguous and at a multiple of 4 bytes; a row has a multiple of 4 bytes.
        connection: buffers of ``[2, N, R, max_words]`` words of 8 bytes and R counters: no more rows are summed.
        max_words: maximum number of words of 4 bytes in a row.
        max_polls: after as many, the result is wrong instead of late; negative: no limit.
    """
    _launch(x_TE, None, connection, max_words, max_polls)


def sum_add_norm_rows(x_TE: Tensor, norm: Norm, connection: Connection, max_words: int) -> None:
    """Replace rows by the sums of all ranks' rows and of the residual stream, and store these normalised.

    As ``sum_rows``, then ``add_rms_norm`` or ``add_rms_norm_zero_centered``, with the same rounding. The residual
    stream is as ``x_TE``.
    """
    _launch(x_TE, norm, connection, max_words, -1)


def _launch(x_TE: Tensor, norm: Norm | None, connection: Connection, max_words: int, max_polls: int) -> None:
    address_N, counter_R = connection.address_N, connection.counter
    num_rows, num_channels = x_TE.shape
    num_words = num_channels * x_TE.itemsize // 4
    block = next_power_of_2(num_words)
    _sum_kernel[(num_rows,)](
        x_TE,
        None if norm is None else norm.residual_TE,
        None if norm is None else norm.weight_E,
        None if norm is None else norm.normed_TE,
        address_N,
        counter_R,
        0.0 if norm is None else norm.eps,
        max_polls,
        E=num_channels,
        NUM_WORDS=num_words,
        BLOCK_W=block,
        RANK=connection.rank,
        NUM_RANKS=len(address_N),
        MAX_ROWS=len(counter_R),
        MAX_WORDS=max_words,
        LAST_EPOCH=LAST_EPOCH,
        ADDS=norm is not None,
        IS_ZERO_CENTERED=norm is not None and norm.is_zero_centered,
        num_warps=_num_warps(block),
        **overlap_options(x_TE),
    )


def _num_warps(num_words: int) -> int:
    return min(MAX_WARPS, max(1, num_words // WORDS_OF_WARP))
