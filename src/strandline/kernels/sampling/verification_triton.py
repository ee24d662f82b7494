"""The Triton versions of ``verification.py``: a small launch each, and a program for each sequence.

Shape suffixes as in ``verification.py``; E rows of one sequence (a certain token and its drafts), H their chunks; T
some rows of the step.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sampling.verification import (
    CHUNKS_OF_SEQUENCE,
    AcceptedDrafts,
    LastStep,
    Verdict,
    VerificationTables,
)
from strandline.kernels.sizes import next_power_of_2
from strandline.kernels.step import PlannedStep

BLOCK_SEQUENCES = 128
BLOCK_ROWS = 32
NUM_WARPS = 1


@triton.jit
def _is_stop(token, stop_ids_ptr, n, NUM_STOPS: tl.constexpr):
    """Return whether tokens are stop tokens of a sequence, or none could be chosen."""
    is_stop = token < 0
    for i in tl.static_range(NUM_STOPS):
        is_stop = is_stop | (tl.load(stop_ids_ptr + n * NUM_STOPS + i) == token)
    return is_stop


@triton.jit
def _num_real(query_starts_ptr, num_sequences, BLOCK_N: tl.constexpr):
    """Return how many sequences have rows."""
    num_real = tl.zeros([BLOCK_N], tl.int64)
    for first in range(0, num_sequences, BLOCK_N):
        sequence_N = first + tl.arange(0, BLOCK_N)
        is_sequence_N = sequence_N < num_sequences
        row_N = tl.load(query_starts_ptr + sequence_N, mask=is_sequence_N, other=0)
        end_row_N = tl.load(query_starts_ptr + sequence_N + 1, mask=is_sequence_N, other=0)
        num_real += (end_row_N > row_N).to(tl.int64)
    return tl.sum(num_real)


# Numbers of sequences, and where slices of small tables start, must not ask for a kernel to be compiled anew.
@triton.jit(
    do_not_specialize=["num_sequences", "drafts_stride"],
    do_not_specialize_on_alignment=[
        "query_starts_ptr",
        "start_ptr",
        "end_ptr",
        "state_dst_ptr",
        "log_ptr",
        "num_logged_ptr",
        "num_drafts_ptr",
        "pending_ptr",
        "source_row_ptr",
        "stop_ids_ptr",
    ],
)
def _resolve_kernel(
    token_ids_ptr,
    query_starts_ptr,
    start_ptr,
    end_ptr,
    state_dst_ptr,
    log_ptr,
    num_logged_ptr,
    num_drafts_ptr,
    pending_ptr,
    source_row_ptr,
    stop_ids_ptr,
    num_accepted_ptr,
    tokens_ptr,
    drafts_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    table_dst_ptr,
    step_rows_ptr,
    logged_rows_ptr,
    logged_entries_ptr,
    draft_rows_ptr,
    draft_entries_ptr,
    source_rows_ptr,
    log_entries_ptr,
    num_sequences,
    drafts_stride,
    NUM_STOPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if L > 0:
        end_R = num_sequences.to(tl.int64) * (1 + D + L) + 1
        num_real = _num_real(query_starts_ptr, num_sequences, BLOCK_N)
        tl.store(first_chunks_ptr + n, CHUNKS * tl.minimum(n, num_real))
        if n == num_sequences:
            # The sequence that has the rows of none.
            tl.store(first_chunks_ptr + n + 1, CHUNKS * num_real)
            tl.store(starts_ptr + CHUNKS * n, end_R)
            tl.store(lengths_ptr + CHUNKS * n, 0)
            tl.store(cut_slots_ptr + CHUNKS * n, 0)
            tl.store(table_dst_ptr + n, 0)
    if n < num_sequences:
        first_row = tl.load(query_starts_ptr + n)
        num_rows = tl.load(query_starts_ptr + n + 1) - first_row
        slot = tl.load(state_dst_ptr + n)
        num_logged = tl.load(num_logged_ptr + n)
        index_E = tl.arange(0, BLOCK_E)
        row_E = first_row + index_E
        is_row_E = index_E < num_rows
        if tl.load(pending_ptr + n) != 0:
            source = tl.load(source_row_ptr + n)
            token = tl.load(tokens_ptr + source)
            slot = tl.where(_is_stop(token, stop_ids_ptr, n, NUM_STOPS), 0, slot)
            tl.store(state_dst_ptr + n, slot)
            draft_ptrs_E = drafts_ptr + source * drafts_stride + index_E - 1
            draft_E = tl.load(draft_ptrs_E, mask=is_row_E & (index_E > 0), other=0)
            tl.store(token_ids_ptr + row_E, tl.maximum(tl.where(index_E > 0, draft_E, token), 0), mask=is_row_E)
            if L > 0:
                num_accepted = tl.load(num_accepted_ptr + source)
                num_logged += num_accepted
                tl.store(start_ptr + n, tl.load(start_ptr + n) + num_accepted)
                tl.store(end_ptr + n, tl.load(end_ptr + n) + num_accepted)
                tl.store(num_logged_ptr + n, num_logged)
        if L > 0:
            first_entry = tl.load(log_ptr + n) * L
            own_row = first_row + (n + 1) * L
            num_drafts = tl.load(num_drafts_ptr + n)
            num_certain = num_rows - num_drafts
            is_real = num_rows > 0
            has_drafts = num_drafts > 0
            first_chunk = CHUNKS * n
            tl.store(starts_ptr + first_chunk, tl.where(is_real, own_row - num_logged, end_R))
            tl.store(starts_ptr + first_chunk + 1, tl.where(is_real, own_row + num_certain, end_R))
            tl.store(lengths_ptr + first_chunk, num_logged + num_certain)
            tl.store(lengths_ptr + first_chunk + 1, num_drafts)
            tl.store(cut_slots_ptr + first_chunk, tl.where(has_drafts, slot, 0))
            tl.store(cut_slots_ptr + first_chunk + 1, 0)
            tl.store(table_dst_ptr + n, tl.where(has_drafts, 0, slot))

            index_L = tl.arange(0, BLOCK_L)
            is_index_L = index_L < L
            is_logged_L = index_L < num_logged
            logged_row_L = own_row - num_logged + index_L
            logged_entry_L = tl.where(is_logged_L, first_entry + index_L, 0)
            tl.store(logged_rows_ptr + n * L + index_L, tl.where(is_logged_L, logged_row_L, end_R - 1), mask=is_index_L)
            tl.store(logged_entries_ptr + n * L + index_L, logged_entry_L, mask=is_index_L)
            tl.store(source_rows_ptr + logged_row_L, -1 - logged_entry_L, mask=is_logged_L)
            tl.store(log_entries_ptr + logged_row_L, -1, mask=is_logged_L)

            is_draft_E = index_E < num_drafts
            is_kept_E = is_draft_E & (slot != 0)
            draft_entry_E = tl.where(is_kept_E, first_entry, 0) + index_E
            tl.store(draft_rows_ptr + n * D + index_E, tl.where(is_draft_E, row_E + 1, 0), mask=index_E < D)
            tl.store(draft_entries_ptr + n * D + index_E, draft_entry_E, mask=index_E < D)

            own_row_E = own_row + index_E
            tl.store(step_rows_ptr + row_E, own_row_E, mask=is_row_E)
            tl.store(source_rows_ptr + own_row_E, row_E, mask=is_row_E)
            # Drafts are the last rows of a sequence.
            kept_entry_E = tl.where(slot != 0, first_entry + index_E - num_certain, -1)
            tl.store(log_entries_ptr + own_row_E, tl.where(index_E < num_certain, -1, kept_entry_E), mask=is_row_E)

            # Rows of no sequence, in equal parts.
            row_E = n * (1 + D) + index_E
            is_spare_E = (index_E <= D) & (row_E >= tl.load(query_starts_ptr + num_sequences))
            tl.store(step_rows_ptr + row_E, end_R - 1, mask=is_spare_E)


def resolve_pending(planned: PlannedStep, last: LastStep, log_tokens: int = 0) -> VerificationTables | None:
    """As ``verification.resolve_pending``; all tensors contiguous."""
    token_ids_T, columns = planned.token_ids_T, planned.columns
    count, depth = len(columns.start), 0
    tables = None
    if log_tokens:
        depth = len(token_ids_T) // count - 1
        tables = _empty_tables(count, depth, log_tokens, token_ids_T.device)
    _resolve_kernel[(count if tables is None else count + 1,)](
        token_ids_T, planned.query_starts_N1, columns.start, columns.end, columns.state_dst, columns.log,
        columns.num_logged, columns.num_drafts, columns.pending, columns.source_row, columns.stop_ids,
        *last, *(tables or (None,) * len(VerificationTables._fields)),
        count, last.drafts_PD.stride(0),
        NUM_STOPS=columns.stop_ids.shape[1], CHUNKS=CHUNKS_OF_SEQUENCE, D=depth, L=log_tokens,
        BLOCK_E=next_power_of_2(1 + depth), BLOCK_L=next_power_of_2(max(log_tokens, 1)), BLOCK_N=BLOCK_SEQUENCES,
        num_warps=NUM_WARPS, **overlap_options(token_ids_T),
    )  # fmt: skip
    return tables


def _empty_tables(count: int, depth: int, log_tokens: int, device: torch.device) -> VerificationTables:
    num_rows, num_chunks, num_logged = count * (1 + depth), CHUNKS_OF_SEQUENCE * count + 1, count * log_tokens
    lengths = (
        *(count + 2, num_chunks, num_chunks, num_chunks, count + 1, num_rows),
        *(num_logged, num_logged, count * depth, count * depth),
        *(num_rows + num_logged + 1, num_rows + num_logged + 1),
    )
    return VerificationTables(*(torch.empty(length, dtype=torch.int64, device=device) for length in lengths))


@triton.jit
def _chosen(tokens_ptr, token_ids_ptr, verdicts_ptr, row, mask, num_rows, ACCEPT: tl.constexpr):
    """Return the tokens after rows, with drafts that are accepted by force in their places; and verdicts and drafts.

    Another program may have put these drafts there already.
    """
    verdict = tl.load(verdicts_ptr + row, mask=mask, other=0)
    draft = tl.load(token_ids_ptr + row + 1, mask=mask & (row + 1 < num_rows), other=0)
    token = tl.load(tokens_ptr + row, mask=mask, other=0)
    return tl.where(verdict == ACCEPT, draft, token), verdict, draft


# Numbers of rows, of sequences and of blocks must not ask for a kernel to be compiled anew.
@triton.jit(do_not_specialize=["num_sequences", "num_rows", "num_blocks", "table_stride"])
def _accept_kernel(
    token_ids_ptr,
    verdicts_ptr,
    last_row_in_ptr,
    end_ptr,
    num_drafts_ptr,
    next_drafts_ptr,
    rotary_delta_ptr,
    stop_ids_ptr,
    tokens_ptr,
    last_accepted_ptr,
    last_tokens_ptr,
    block_table_ptr,
    num_accepted_ptr,
    last_row_ptr,
    next_tokens_ptr,
    rotary_ptr,
    context_lens_ptr,
    write_blocks_ptr,
    write_offsets_ptr,
    num_sequences,
    num_rows,
    num_blocks,
    table_stride,
    NUM_STOPS: tl.constexpr,
    D: tl.constexpr,
    ACCEPT: tl.constexpr,
    REJECT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    index_E = tl.arange(0, BLOCK_E)
    num_drafts = tl.load(num_drafts_ptr + n)
    first_row = tl.load(last_row_in_ptr + n) - num_drafts
    row_E = tl.minimum(first_row + index_E, num_rows - 1)
    inputs = (tokens_ptr, token_ids_ptr, verdicts_ptr)
    token_E, verdict_E, draft_E = _chosen(*inputs, row_E, index_E <= D, num_rows, ACCEPT)
    is_stop_E = tl.zeros([BLOCK_E], dtype=tl.int1)
    for i in tl.static_range(NUM_STOPS):
        is_stop_E = is_stop_E | (tl.load(stop_ids_ptr + n * NUM_STOPS + i) == token_E)
    agrees_E = (token_E == draft_E) & (verdict_E != REJECT) & (index_E < num_drafts) & (index_E < D)
    agrees_E = agrees_E & (is_stop_E == 0)
    num_accepted = tl.min(tl.where(agrees_E, BLOCK_E, index_E)).to(tl.int64)
    tl.store(num_accepted_ptr + n, num_accepted)
    tl.store(last_accepted_ptr + n, num_accepted)
    tl.store(last_row_ptr + n, first_row + num_accepted)
    tl.store(last_tokens_ptr + n, tl.sum(tl.where(index_E == num_accepted, token_E, 0)))

    position = tl.maximum(tl.load(end_ptr + n) - 1 - num_drafts, 0) + num_accepted
    num_further = tl.maximum(tl.load(next_drafts_ptr + n) - 1, 0)
    position_E = position + tl.minimum(index_E.to(tl.int64), num_further)
    is_further_E = (index_E > 0) & (index_E < D)
    is_written_E = is_further_E & (index_E <= num_further)
    block_index_E = tl.minimum(position_E // BLOCK_TOKENS, num_blocks - 1)
    block_E = tl.load(block_table_ptr + n * table_stride + block_index_E, mask=is_written_E, other=0)
    out_E = (index_E - 1).to(tl.int64) * num_sequences + n
    tl.store(rotary_ptr + out_E, position_E + tl.load(rotary_delta_ptr + n), mask=is_further_E)
    tl.store(context_lens_ptr + out_E, position_E + 1, mask=is_further_E)
    tl.store(write_blocks_ptr + out_E, block_E.to(tl.int64), mask=is_further_E)
    tl.store(write_offsets_ptr + out_E, position_E % BLOCK_TOKENS, mask=is_further_E)

    # All rows, those of no sequence as well.
    for first_row in range(n * BLOCK_T, num_rows, num_sequences * BLOCK_T):
        row_T = first_row + tl.arange(0, BLOCK_T)
        is_row_T = row_T < num_rows
        token_T, verdict_T, _ = _chosen(*inputs, row_T, is_row_T, num_rows, ACCEPT)
        tl.store(tokens_ptr + row_T, token_T, mask=is_row_T & (verdict_T == ACCEPT))
        tl.store(next_tokens_ptr + row_T, tl.maximum(token_T, 0), mask=is_row_T)


def accept_drafts(
    sampled: PlannedStep,
    verdicts_T: Tensor,
    tokens_T: Tensor,
    last: LastStep,
    block_table_NM: Tensor,
    draft_tokens: int,
) -> AcceptedDrafts:
    """As ``verification.accept_drafts``; all tensors contiguous."""
    columns = sampled.columns
    count, num_rows, num_further = len(columns.end), len(tokens_T), max(draft_tokens - 1, 0)
    accepted = AcceptedDrafts(
        *(
            torch.empty(shape, dtype=torch.int64, device=tokens_T.device)
            for shape in ((count,), (count,), (num_rows,), *[(num_further, count)] * 4)
        )
    )
    _accept_kernel[(count,)](
        sampled.token_ids_T, verdicts_T, columns.last_row, columns.end, columns.num_drafts, columns.next_drafts,
        columns.rotary_delta, columns.stop_ids,
        tokens_T, last.num_accepted_P, last.tokens_P, block_table_NM, *accepted,
        count, num_rows, block_table_NM.shape[1], block_table_NM.stride(0),
        NUM_STOPS=columns.stop_ids.shape[1], D=draft_tokens, ACCEPT=int(Verdict.ACCEPT), REJECT=int(Verdict.REJECT),
        BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_E=next_power_of_2(1 + draft_tokens), BLOCK_T=BLOCK_ROWS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return accepted
