"""Sums of many rows over the ranks' GPUs in one launch: each rank adds up its share and stores the sums on all others.

A message is cut into blocks, and block ``b`` belongs to rank ``b % N``. There are three kinds of programs:

1. Senders store this rank's parts of the blocks of others into the owners' buffers, over NVLink, and set a flag for
   each part there.
2. Owners wait for the parts of their blocks, add them up, and store the sums in the message and in the buffers of all
   other ranks, with a flag for each block.
3. Copiers wait for the sums of the blocks of others, and copy them into the message.

Where the residual addition and a norm follow, blocks are whole rows, and owners and copiers do these, too: every rank
has the stream of all rows, and only sums cross NVLink. The norm of a block is taken while others are on their way.

So a message crosses NVLink twice, less one share of N each time, and each GPU stores and receives at the same time. A
flag is set with release semantics after the barrier that follows the stores of its program; a program that waits for
it reads it with acquire semantics, and a barrier follows. Flags therefore need no words of their own among the data,
unlike those of few rows (``rank_sums_triton.py``): at these sizes bandwidth counts, and not the time of a fence.

A group is one block of each rank, as far as they exist. Programs start in the order of their number: in step ``s`` the
senders of group ``s``, the owner's program of group ``s - depth`` and the copiers of group ``s - 2 * depth``. So both
trips over NVLink and the copies overlap, and a program starts after what it waits for has most likely been done. The
grid may be larger than what runs at once: programs wait for those of earlier steps alone, so that of all programs that
have not ended, on all ranks, one of the earliest step runs and waits for nothing.

Each program advances a counter of its own, in this GPU's memory: the epoch, which is the value of the flags that it
sets and waits for. A block is used by one program of each kind at most, so that counters of a block are equal on all
ranks between two calls, whatever the sizes of the messages. Nothing on the host changes between two calls, and calls
can be replayed from a CUDA graph.

Invariant: nothing in a buffer is overwritten before it has been read, with one entry for each part and each sum.

- A part of epoch ``e + 1`` is stored by a kernel that starts after the sender's kernel of ``e`` has ended. That one had
  waited for the sum of ``e``, which the owner stored after it had read all parts of ``e``.
- A sum of epoch ``e + 1`` is stored after the owner has received all parts of ``e + 1``. Each comes from a kernel that
  started after that rank's kernel of ``e`` had ended, and this one had copied the sum of ``e``.

In the message itself, a copier overwrites what the sender of the same block has read: the sum that it waits for
contains that part. All this holds where the kernels of a rank run one after another, on one stream or on streams that
wait for each other, and where all ranks call alike. Flags are 0 in new memory and otherwise of the epoch before, so
epochs may start again at 1 after ``LAST_EPOCH``.

A rank's message may come as choices of experts that have not been added up (``expert_choices.py``). Blocks are whole
rows then. A sender adds them up and stores them in the owner's buffer, an owner those of its block in the message. They
do so row by row: with all rows of a block at once, registers would leave room for too few programs at a time.

A kernel waits for as long as another rank does not call, as those of few rows.

Sums are taken in float32, in the order of the ranks, and rounded once: all ranks get the same bits, and the same as
from the kernel for few rows.

Shape suffixes: M elements of the message, T rows, E channels, R rows of a block, N ranks, B blocks. A message without a
norm counts as rows of one block.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.collectives.connection import Connection, Norm
from strandline.kernels.expert_choices import ExpertChoices
from strandline.kernels.expert_choices_triton import choices_argument, num_added, sum_of_choices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

NUM_WARPS = 8
"""Each thread moves 64 bytes of a block of 16 KiB, 16 at once."""

MAX_REGISTERS = 64
"""Registers of a thread that adds up choices, for four programs on a multiprocessor: it would take 80."""

MAX_CHANNELS_LIMITED = 2048
"""Channels of the widest rows for which that is a limit; threads of wider ones would have to spill registers."""

DEPTH = 128
"""Steps between the kinds of programs of a group: with 2 ranks, 4 MiB or 10 µs of what a GPU stores on the other."""

LAST_EPOCH = 1 << 30


@triton.jit
def _buffer(address_ptr, rank, x_ptr):
    """Return a pointer to a rank's buffer, whose elements are those of the message."""
    return tl.multiple_of(tl.load(address_ptr + rank).to(x_ptr.dtype), 16)


@triton.jit
def _entry(KIND: tl.constexpr, writer, reader, group, NUM_RANKS: tl.constexpr, MAX_GROUPS: tl.constexpr):
    """Return the index of the entry for a part (kind 0) or sum (kind 1) in the buffer of the rank that reads it."""
    return (KIND * (NUM_RANKS - 1) + writer - (writer > reader)) * MAX_GROUPS + group


@triton.jit
def _flag(buffer_ptr, entry, NUM_RANKS: tl.constexpr, MAX_GROUPS: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return a pointer to the flag of an entry: flags come after all entries."""
    NUM_ENTRIES: tl.constexpr = 2 * (NUM_RANKS - 1) * MAX_GROUPS
    return buffer_ptr.to(tl.pointer_type(tl.int32)) + (NUM_ENTRIES * (BLOCK_BYTES // 4) + entry)


@triton.jit
def _wait_for(flag_ptr, epoch, max_polls):
    """Wait until a flag has the epoch, and what was stored before it can be read."""
    polls_left = max_polls
    # One thread looks, and all others wait for it. Triton makes this a load with acquire semantics, and would leave out
    # one after the loop whose result is not used.
    while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != epoch) & (polls_left != 0):
        # A negative number stands for no limit, and stays.
        polls_left = tl.where(polls_left > 0, polls_left - 1, polls_left)
    tl.debug_barrier()


@triton.jit
def _set(flag_ptr, epoch):
    """Set a flag; before, a barrier after all stores that it stands for."""
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def _finish(
    sum_RE,
    residual_RE,
    first,
    inner_RE,
    mask_RE,
    x_ptr,
    weight_ptr,
    normed_ptr,
    eps,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ADDS: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr,
):
    """Store sums of a block; or add the residual stream, store the new one, normalise, and store that, too."""
    if ADDS:
        channel_E = tl.arange(0, BLOCK_E)
        weight_E = tl.load(weight_ptr + channel_E, mask=channel_E < E, other=0.0).to(tl.float32)
        sum_RE = (sum_RE.to(tl.float32) + residual_RE.to(tl.float32)).to(sum_RE.dtype)
    tl.store(x_ptr + first + inner_RE, sum_RE, mask=mask_RE)
    if ADDS:
        total_RE = tl.where(mask_RE, sum_RE.to(tl.float32), 0.0)
        scale_R = tl.rsqrt(tl.sum(total_RE * total_RE, axis=1) / E + eps)
        if IS_ZERO_CENTERED:
            normed_RE = total_RE * scale_R[:, None] * (weight_E + 1.0)[None, :]
        else:
            normed_RE = (total_RE * scale_R[:, None]).to(sum_RE.dtype).to(tl.float32) * weight_E[None, :]
        tl.store(normed_ptr + first + inner_RE, normed_RE.to(sum_RE.dtype), mask=mask_RE)


@triton.jit
def _store_choices(
    part_ptr,
    choices,
    first_row,
    end_row,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Add up the choices of rows, one after the other, and store the sums."""
    channel_E = tl.arange(0, BLOCK_E)
    for row in range(ROWS):
        token_R = (first_row + row).to(tl.int64) + tl.arange(0, 1)
        is_token_R = token_R < end_row
        mask_RE = is_token_R[:, None] & (channel_E < E)[None, :]
        sum_RE = sum_of_choices(choices, token_R, channel_E, is_token_R, mask_RE, E, TOP_K)
        tl.store(part_ptr + row * E + channel_E[None, :], sum_RE, mask=mask_RE)


@triton.jit(do_not_specialize=["max_polls"])
def _sum_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    address_ptr,
    counter_ptr,
    eps,
    num_elements,
    max_polls,
    choices,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    ENTRY: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    LAST_EPOCH: tl.constexpr,
    ADDS: tl.constexpr,
    IS_ZERO_CENTERED: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    NUM_OTHERS: tl.constexpr = NUM_RANKS - 1
    BLOCK: tl.constexpr = ROWS * E
    depth = tl.minimum(DEPTH, tl.cdiv(tl.cdiv(num_elements, BLOCK), NUM_RANKS))
    program = tl.program_id(0)
    step = program // (NUM_RANKS + NUM_OTHERS)
    index = program % (NUM_RANKS + NUM_OTHERS)
    is_sender = index < NUM_OTHERS
    is_owner = index == NUM_OTHERS
    group = step - tl.where(is_sender, 0, tl.where(is_owner, depth, 2 * depth))
    other = tl.where(is_sender, index, index - NUM_RANKS)
    other = tl.where(is_owner, RANK, other + (other >= RANK).to(tl.int32))
    block = group * NUM_RANKS + other
    first = block * BLOCK
    channel_E = tl.arange(0, BLOCK_E)
    inner_RE = tl.arange(0, ROWS)[:, None] * E + channel_E[None, :]
    mask_RE = first + inner_RE < num_elements
    if E != BLOCK_E:
        mask_RE = mask_RE & (channel_E < E)[None, :]
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if (group >= 0) & (first < num_elements):
        # Those of senders, then those of all others.
        count_ptr = counter_ptr + block + tl.where(is_sender, 0, MAX_GROUPS * NUM_RANKS)
        epoch = (tl.load(count_ptr) & (LAST_EPOCH - 1)) + 1
        buffers_ptr = ()
        for rank in tl.static_range(NUM_RANKS):
            buffers_ptr += (_buffer(address_ptr, rank, x_ptr),)
        rows = (block * ROWS, num_elements // E)
        if is_sender:
            entry = _entry(0, RANK, other, group, NUM_RANKS, MAX_GROUPS)
            owner_ptr = _buffer(address_ptr, other, x_ptr)
            part_ptr = owner_ptr + entry * ENTRY
            if TOP_K > 0:
                _store_choices(part_ptr, choices, *rows, ROWS, E, BLOCK_E, TOP_K)
            else:
                part_RE = tl.load(x_ptr + first + inner_RE, mask=mask_RE)
                tl.store(part_ptr + inner_RE, part_RE, mask=mask_RE)
            tl.debug_barrier()
            _set(_flag(owner_ptr, entry, NUM_RANKS, MAX_GROUPS, BLOCK_BYTES), epoch)
        else:
            residual_RE = mask_RE
            if ADDS:
                residual_RE = tl.load(residual_ptr + first + inner_RE, mask=mask_RE, other=0.0)
            if is_owner:
                if TOP_K > 0:
                    _store_choices(x_ptr + first, choices, *rows, ROWS, E, BLOCK_E, TOP_K)
                    tl.debug_barrier()
                own_RE = tl.load(x_ptr + first + inner_RE, mask=mask_RE)
                for writer in tl.static_range(NUM_RANKS):
                    if writer != RANK:
                        entry = _entry(0, writer, RANK, group, NUM_RANKS, MAX_GROUPS)
                        _wait_for(_flag(buffers_ptr[RANK], entry, NUM_RANKS, MAX_GROUPS, BLOCK_BYTES), epoch, max_polls)
                for writer in tl.static_range(NUM_RANKS):
                    if writer == RANK:
                        part_RE = own_RE
                    else:
                        entry = _entry(0, writer, RANK, group, NUM_RANKS, MAX_GROUPS)
                        # Not from the first-level cache, which may hold an earlier part.
                        part_RE = tl.load(
                            buffers_ptr[RANK] + entry * ENTRY + inner_RE, mask=mask_RE, cache_modifier=".cg"
                        )
                    if writer == 0:
                        total_RE = part_RE.to(tl.float32)
                    else:
                        total_RE += part_RE.to(tl.float32)
                sum_RE = total_RE.to(x_ptr.dtype.element_ty)
                for reader in tl.static_range(NUM_RANKS):
                    if reader != RANK:
                        entry = _entry(1, RANK, reader, group, NUM_RANKS, MAX_GROUPS)
                        tl.store(buffers_ptr[reader] + entry * ENTRY + inner_RE, sum_RE, mask=mask_RE)
                tl.debug_barrier()
                for reader in tl.static_range(NUM_RANKS):
                    if reader != RANK:
                        entry = _entry(1, RANK, reader, group, NUM_RANKS, MAX_GROUPS)
                        _set(_flag(buffers_ptr[reader], entry, NUM_RANKS, MAX_GROUPS, BLOCK_BYTES), epoch)
            else:
                entry = _entry(1, other, RANK, group, NUM_RANKS, MAX_GROUPS)
                _wait_for(_flag(buffers_ptr[RANK], entry, NUM_RANKS, MAX_GROUPS, BLOCK_BYTES), epoch, max_polls)
                sum_RE = tl.load(buffers_ptr[RANK] + entry * ENTRY + inner_RE, mask=mask_RE, cache_modifier=".cg")
            _finish(
                sum_RE,
                residual_RE,
                first,
                inner_RE,
                mask_RE,
                x_ptr,
                weight_ptr,
                normed_ptr,
                eps,
                E,
                BLOCK_E,
                ADDS,
                IS_ZERO_CENTERED,
            )
        # Not before all threads have read it.
        tl.debug_barrier()
        tl.store(count_ptr, epoch)


def sum_elements(x_M: Tensor, connection: Connection, block_bytes: int, max_polls: int = -1) -> None:
    """Replace elements by the sums of all ranks' elements.

    Args:
        x_M: contiguous, of at most B blocks; at a multiple of 16 bytes, it is summed faster.
        connection: buffers of ``[2, N - 1, B / N]`` blocks, then as many flags, which are zero at first; ``[2, B]``
            counters. B is a multiple of N.
        block_bytes: size of a block, a power of 2.
        max_polls: how often each program looks for a flag before the result is wrong instead of late; negative: no
            limit.
    """
    block = block_bytes // x_M.itemsize
    _launch(x_M, None, connection, block_bytes, (1, block), None, max_polls)


def sum_choices(
    choices: ExpertChoices,
    sum_TE: Tensor,
    connection: Connection,
    block_bytes: int,
    block_rows: int,
    max_polls: int = -1,
) -> None:
    """Store sums of all ranks' choices: as ``add_choices``, then ``sum_elements``, to the bit.

    Args:
        sum_TE: contiguous, of at most B blocks.
        block_rows: rows of a block, which have room in it; a power of 2.
    """
    shape = (block_rows, sum_TE.shape[1])
    _launch(sum_TE, choices, connection, block_bytes, shape, None, max_polls)


def sum_add_norm_rows(
    x_TE: Tensor,
    norm: Norm,
    connection: Connection,
    block_bytes: int,
    block_rows: int,
    max_polls: int = -1,
    choices: ExpertChoices | None = None,
) -> None:
    """Replace rows by the sums of all ranks' rows and of the residual stream, and store these normalised.

    As ``sum_elements``, then ``add_rms_norm`` or ``add_rms_norm_zero_centered``, with the same rounding.

    Args:
        x_TE: contiguous, of at most B blocks.
        block_rows: rows of a block, which have room in it; a power of 2.
        choices: what is summed instead of the rows.
    """
    shape = (block_rows, x_TE.shape[1])
    _launch(x_TE, choices, connection, block_bytes, shape, norm, max_polls)


def _launch(
    x: Tensor,
    choices: ExpertChoices | None,
    connection: Connection,
    block_bytes: int,
    block_shape: tuple[int, int],
    norm: Norm | None,
    max_polls: int,
) -> None:
    address_N, counter_2B = connection.address_N, connection.counter
    num_ranks, (rows, size) = len(address_N), block_shape
    num_groups = cdiv(cdiv(x.numel(), rows * size), num_ranks)
    num_steps = num_groups + 2 * min(DEPTH, num_groups)
    is_limited = choices is not None and size <= MAX_CHANNELS_LIMITED
    _sum_kernel[(num_steps * (2 * num_ranks - 1),)](
        x,
        None if norm is None else norm.residual_TE,
        None if norm is None else norm.weight_E,
        None if norm is None else norm.normed_TE,
        address_N,
        counter_2B,
        0.0 if norm is None else norm.eps,
        x.numel(),
        max_polls,
        choices_argument(choices),
        E=size,
        ROWS=rows,
        BLOCK_E=next_power_of_2(size),
        BLOCK_BYTES=block_bytes,
        ENTRY=block_bytes // x.itemsize,
        DEPTH=DEPTH,
        RANK=connection.rank,
        NUM_RANKS=num_ranks,
        MAX_GROUPS=counter_2B.shape[1] // num_ranks,
        LAST_EPOCH=LAST_EPOCH,
        ADDS=norm is not None,
        IS_ZERO_CENTERED=norm is not None and norm.is_zero_centered,
        TOP_K=num_added(choices),
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS if is_limited else None,
        **overlap_options(x),
    )
