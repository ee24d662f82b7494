"""The Triton versions of ``step.py``: one small launch each.

Shape suffixes: as in ``step.py``.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv
from strandline.kernels.step import PlannedStep, RowAddresses

BLOCK_SEQUENCES = 128
BLOCK_ROWS = 64
BLOCK_FEATURES = 1024
BLOCK_INTEGERS = 1024


# Numbers of rows and sequences, and where slices of small tables start, must not ask for a kernel to be compiled anew.
@triton.jit(
    do_not_specialize=["num_rows", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["query_starts", "start", "end", "kv_start", "rotary_delta"],
)
def _locate_kernel(
    query_starts,
    start,
    end,
    kv_start,
    rotary_delta,
    block_table,
    positions,
    write_blocks,
    write_offsets,
    rotary,
    num_rows,
    num_sequences,
    table_stride,
    ARE_SINGLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row_T = row_T < num_rows
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if ARE_SINGLE:
        sequence_T = row_T
        first_row_T = row_T
    else:
        # A row's sequence: as many as end before it.
        sequence_T = tl.zeros([BLOCK_T], tl.int64)
        for first in range(0, num_sequences, BLOCK_N):
            sequence_N = first + tl.arange(0, BLOCK_N)
            is_sequence_N = sequence_N < num_sequences
            end_row_N = tl.load(query_starts + 1 + sequence_N, mask=is_sequence_N, other=0)
            is_before_TN = (end_row_N[None, :] <= row_T[:, None]) & is_sequence_N[None, :]
            sequence_T += tl.sum(is_before_TN.to(tl.int64), 1)
        sequence_T = tl.minimum(sequence_T, num_sequences - 1)
        first_row_T = tl.load(query_starts + sequence_T, mask=is_row_T, other=0)
    position_T = row_T - first_row_T + tl.load(start + sequence_T, mask=is_row_T, other=0)
    is_written_T = is_row_T & (position_T >= tl.load(kv_start + sequence_T, mask=is_row_T, other=0))
    is_written_T = is_written_T & (position_T < tl.load(end + sequence_T, mask=is_row_T, other=0))
    table_ptrs_T = block_table + sequence_T * table_stride + position_T // BLOCK_TOKENS
    block_T = tl.load(table_ptrs_T, mask=is_written_T, other=0)
    tl.store(positions + row_T, position_T, mask=is_row_T)
    tl.store(write_blocks + row_T, block_T.to(tl.int64), mask=is_row_T)
    tl.store(write_offsets + row_T, position_T % BLOCK_TOKENS, mask=is_row_T)
    rotary_T = position_T + tl.load(rotary_delta + sequence_T, mask=is_row_T, other=0)
    tl.store(rotary + row_T, rotary_T, mask=is_row_T)


def locate_rows(planned: PlannedStep, block_table_NM: Tensor, *, are_single: bool = False) -> RowAddresses:
    """As ``step.locate_rows``; the columns are contiguous."""
    columns, num_rows = planned.columns, len(planned.token_ids_T)
    addresses = [torch.empty(num_rows, dtype=torch.int64, device=block_table_NM.device) for _ in RowAddresses._fields]
    _locate_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
        planned.query_starts_N1,
        columns.start,
        columns.end,
        columns.kv_start,
        columns.rotary_delta,
        block_table_NM,
        *addresses,
        num_rows,
        len(columns.start),
        block_table_NM.stride(0),
        ARE_SINGLE=are_single,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_T=BLOCK_ROWS,
        BLOCK_N=BLOCK_SEQUENCES,
        num_warps=4,
        **overlap_options(block_table_NM),
    )
    return RowAddresses(*addresses)


@triton.jit(do_not_specialize_on_alignment=["rows", "slots"])
def _store_hidden_kernel(
    hidden, rows, out, slots, size, hidden_stride, out_stride, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    n = tl.program_id(0)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    slot = tl.load(slots + n).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (features < size) & (slot != 0)
    value = tl.load(hidden + row * hidden_stride + features, mask)
    tl.store(out + slot * out_stride + features, value, mask)


def store_hidden(hidden_TE: Tensor, rows_N: Tensor, hidden_SE: Tensor, slots_N: Tensor) -> None:
    """As ``step.store_hidden``."""
    size = hidden_TE.shape[1]
    _store_hidden_kernel[(rows_N.shape[0], cdiv(size, BLOCK_FEATURES))](
        hidden_TE,
        rows_N,
        hidden_SE,
        slots_N,
        size,
        hidden_TE.stride(0),
        hidden_SE.stride(0),
        BLOCK=BLOCK_FEATURES,
        num_warps=4,
        **overlap_options(hidden_TE),
    )


@triton.jit(do_not_specialize=["num_integers"])
def _fetch_kernel(host_ptr, buffer_ptr, num_integers, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_integers
    tl.store(buffer_ptr + i, tl.load(host_ptr + i, mask), mask)


def fetch_integers(host_I: Tensor, buffer_I: Tensor) -> None:
    """As ``step.fetch_integers``; read over the bus by a kernel, which starts sooner than a copy would."""
    grid = (cdiv(len(host_I), BLOCK_INTEGERS),)
    _fetch_kernel[grid](host_I, buffer_I, len(host_I), BLOCK=BLOCK_INTEGERS, num_warps=4)


@triton.jit
def _hand_over_kernel(tokens, sampled, address, num_tokens, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_tokens
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    token = tl.load(tokens + n, mask)
    host = tl.load(address).to(tl.pointer_type(tl.int64))
    tl.store(sampled + n, token, mask)
    tl.store(host + n, token, mask)


def hand_over_tokens(token_N: Tensor, sampled_P: Tensor, address_1: Tensor) -> None:
    """As ``step.hand_over_tokens``."""
    _hand_over_kernel[(cdiv(len(token_N), BLOCK_SEQUENCES),)](
        token_N,
        sampled_P,
        address_1,
        len(token_N),
        BLOCK=BLOCK_SEQUENCES,
        num_warps=4,
        **overlap_options(sampled_P),
    )


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _hand_over_drafts_kernel(
    tokens,
    accepted,
    drafts,
    next_drafts,
    address,
    num_tokens,
    num_sequences,
    next_stride,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = i < num_tokens
    accepted_i = i - num_tokens
    is_accepted = (accepted_i >= 0) & (accepted_i < num_sequences)
    draft_i = accepted_i - num_sequences
    is_draft = (draft_i >= 0) & (draft_i < num_sequences * DRAFTS)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    draft = tl.load(drafts + draft_i, is_draft, 0)
    value = tl.load(tokens + i, is_token, 0) + tl.load(accepted + accepted_i, is_accepted, 0) + draft
    host = tl.load(address).to(tl.pointer_type(tl.int64))
    tl.store(host + i, value, is_token | is_accepted | is_draft)
    if DRAFTS > 0:
        tl.store(next_drafts + draft_i // DRAFTS * next_stride + draft_i % DRAFTS, draft, is_draft)


def hand_over_drafts(
    tokens_T: Tensor, num_accepted_N: Tensor, drafts_ND: Tensor, drafts_PD: Tensor, address_1: Tensor
) -> None:
    """As ``step.hand_over_drafts``; all but ``drafts_PD`` are contiguous."""
    num_tokens, (num_sequences, num_drafts) = len(tokens_T), drafts_ND.shape
    _hand_over_drafts_kernel[(cdiv(num_tokens + num_sequences * (1 + num_drafts), BLOCK_SEQUENCES),)](
        tokens_T,
        num_accepted_N,
        drafts_ND,
        drafts_PD,
        address_1,
        num_tokens,
        num_sequences,
        drafts_PD.stride(0),
        DRAFTS=num_drafts,
        BLOCK=BLOCK_SEQUENCES,
        num_warps=4,
        **overlap_options(drafts_PD),
    )
