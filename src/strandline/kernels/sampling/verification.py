"""What a step decides on the device, in tables of integers: launches before the model's and, with drafts, after it.

``resolve_pending`` corrects what was planned before the last step's tokens were known. Where a step verifies drafts, it
also makes the tables of rows, chunks, logs and drafts; ``accept_drafts`` then counts the drafts that agree with the
chosen tokens, and leaves what the next step needs. All integers are int64, but for the block table, which is int32.

Every sequence of the step has as many rows for logged tokens as there can be, and the logged ones are the last of
these: where its own rows are among the rerun ones does not depend on how many there are.

Shape suffixes: T rows of the step, R the same and those rerun (and one of no token), N sequences, C chunks,
D drafts of a sequence, F all of these but the first, L entries of its log, P sequences of the last step, S stop tokens
of a sequence, M blocks per table.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_SLOT
from strandline.kernels.operation import operation, triton
from strandline.kernels.step import PlannedStep

CHUNKS_OF_SEQUENCE: Final = 2
"""Logged tokens and certain ones, then drafts. Kernels of a few tokens need no chunks on the 64-token grid."""

NO_ENTRY: Final = -1
"""Where a row is not logged."""


class Verdict(IntEnum):
    """How the draft after a row is accepted or rejected."""

    COMPARE = 0
    """Accepted if it equals the chosen token."""
    ACCEPT = 1
    REJECT = 2


class LastStep(NamedTuple):
    """The tokens of the last step on the device, by row of the sequences that it sampled: the next step may have been
    planned without them. Tensors keep their addresses, for graphs.
    """

    num_accepted_P: Tensor
    tokens_P: Tensor
    """What was chosen after the accepted drafts."""
    drafts_PD: Tensor
    """The drafts after these."""

    @classmethod
    def empty(cls, max_num_seqs: int, draft_tokens: int, device: torch.device) -> "LastStep":
        """Return zeros for a number of sequences and drafts."""
        shapes = ((max_num_seqs,), (max_num_seqs,), (max_num_seqs, draft_tokens))
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))


class VerificationTables(NamedTuple):
    """The tables of one step; the fields of ``ChunkTable``, ``RecurrentBatch`` and ``RerunBatch``.

    One sequence more than planned has the rows of none, and no chunks.
    """

    first_chunks: Tensor
    starts: Tensor
    lengths: Tensor
    cut_slots: Tensor
    state_dst: Tensor
    step_rows: Tensor
    logged_rows: Tensor
    logged_entries: Tensor
    draft_rows: Tensor
    draft_entries: Tensor
    source_rows: Tensor
    """Undefined for rows in no chunk; so is the next."""
    log_entries: Tensor


class AcceptedDrafts(NamedTuple):
    """What a step has found, and where the draft layer's further drafts stand."""

    num_accepted_N: Tensor
    last_row_N: Tensor
    """Each sequence's last row that counts."""
    next_tokens_T: Tensor
    """The token after each row; 0: none could be chosen."""
    rotary_FN: Tensor
    """Positions for rotary embeddings of the tokens that further drafts follow: the first draft, the second, and so on.
    Where no further draft is wanted, they do not increase: nothing lies beyond the blocks that are reserved."""
    context_lens_FN: Tensor
    write_blocks_FN: Tensor
    """The null block if the draft is not wanted."""
    write_offsets_FN: Tensor


@operation(triton("sampling.verification_triton"))
def resolve_pending(planned: PlannedStep, last: LastStep, log_tokens: int = 0) -> VerificationTables | None:
    """Complete sequences that were planned before the tokens of the last step were known; return the step's tables.

    Where a token is pending, it is filled in, and drafts after it are. Where it is one of the sequence's stop tokens,
    or none could be chosen, the sequence has ended: its ``state_dst`` becomes the null slot, so that it stores neither
    a state nor drafts. Its keys and values are stored after those that belong to it; instead of no token it gets token
    0, so that nothing is read from outside the vocabulary.

    A step with drafts was planned as if no draft of the last step were accepted. It begins after the accepted ones,
    which are logged: ``start``, ``end`` and ``num_logged`` are corrected in place.

    Args:
        log_tokens: tokens of a log; 0: the step verifies no drafts, and has no tables.
    """
    columns = planned.columns
    count = len(columns.start)
    is_pending_N = columns.pending != 0
    token_N = last.tokens_P[columns.source_row]
    is_stop_N = (columns.stop_ids == token_N[:, None]).any(-1) | (token_N == NO_TOKEN)
    columns.state_dst.masked_fill_(is_pending_N & is_stop_N, NULL_SLOT)
    taken_ND = torch.cat((token_N[:, None], last.drafts_PD[columns.source_row]), 1).clamp_min(0)
    row_ND = planned.query_starts_N1[:count, None] + torch.arange(taken_ND.shape[1], device=token_N.device)
    is_taken_ND = is_pending_N[:, None] & (row_ND < planned.query_starts_N1[1 : count + 1, None])
    planned.token_ids_T[row_ND[is_taken_ND]] = taken_ND[is_taken_ND]
    if not log_tokens:
        return None
    num_accepted_N = last.num_accepted_P[columns.source_row] * is_pending_N
    for column_N in (columns.start, columns.end, columns.num_logged):
        column_N.add_(num_accepted_N)
    return _tables(planned, log_tokens)


def _tables(planned: PlannedStep, log_tokens: int) -> VerificationTables:
    """Return the tables of chunks and of rerun rows, made from the data of each sequence."""
    columns, starts_N2 = planned.columns, planned.query_starts_N1
    count, num_rows = len(columns.start), len(planned.token_ids_T)
    end = num_rows + count * log_tokens + 1
    num_logged_N, num_drafts_N = columns.num_logged, columns.num_drafts
    first_row_N, num_rows_N = starts_N2[:count], starts_N2[1 : count + 1] - starts_N2[:count]
    index_D, index_L, index_N2, row_T = (
        torch.arange(number, device=starts_N2.device)
        for number in (num_rows // count - 1, log_tokens, count + 2, num_rows)
    )
    own_row_N = first_row_N + (index_N2[:count] + 1) * log_tokens
    is_real_N, has_drafts_N = num_rows_N > 0, num_drafts_N > 0
    certain_rows_N = num_rows_N - num_drafts_N
    parts_N2 = torch.stack((own_row_N - num_logged_N, own_row_N + certain_rows_N), 1)
    lengths_N2 = torch.stack((num_logged_N + certain_rows_N, num_drafts_N), 1)
    cut_N2 = torch.stack((columns.state_dst * has_drafts_N, torch.zeros_like(num_drafts_N)), 1)
    is_logged_NL = index_L < num_logged_N[:, None]
    is_draft_ND = index_D < num_drafts_N[:, None]
    first_entry_N1 = (columns.log * log_tokens)[:, None]
    is_kept_ND = is_draft_ND & (columns.state_dst != NULL_SLOT)[:, None]
    sequence_T = torch.searchsorted(starts_N2[1:], row_T, right=True)
    step_rows_T = torch.where(sequence_T < count, row_T + (sequence_T + 1) * log_tokens, end - 1)
    logged_rows_NL = torch.where(is_logged_NL, parts_N2[:, :1] + index_L, end - 1)
    logged_entries_NL = (first_entry_N1 + index_L) * is_logged_NL
    draft_rows_ND = (first_row_N[:, None] + 1 + index_D) * is_draft_ND
    draft_entries_ND = first_entry_N1 * is_kept_ND + index_D
    # Rows of no token share the last row, which is read by none.
    source_R = torch.zeros(end, dtype=torch.int64, device=starts_N2.device)
    source_R[step_rows_T] = row_T
    source_R[logged_rows_NL.flatten()] = -1 - logged_entries_NL.flatten()
    entry_R = torch.full_like(source_R, NO_ENTRY)
    entry_R[torch.where(is_kept_ND, step_rows_T[draft_rows_ND], end - 1)] = draft_entries_ND
    return VerificationTables(
        first_chunks=CHUNKS_OF_SEQUENCE * index_N2.minimum(is_real_N.sum()),
        starts=F.pad(torch.where(is_real_N[:, None], parts_N2, end).flatten(), (0, 1), value=end),
        lengths=F.pad(lengths_N2.flatten(), (0, 1)),
        cut_slots=F.pad(cut_N2.flatten(), (0, 1)),
        state_dst=F.pad(columns.state_dst * ~has_drafts_N, (0, 1)),
        step_rows=step_rows_T,
        logged_rows=logged_rows_NL.flatten(),
        logged_entries=logged_entries_NL.flatten(),
        draft_rows=draft_rows_ND.flatten(),
        draft_entries=draft_entries_ND.flatten(),
        source_rows=source_R,
        log_entries=entry_R,
    )


@operation(triton("sampling.verification_triton"))
def accept_drafts(
    sampled: PlannedStep,
    verdicts_T: Tensor,
    tokens_T: Tensor,
    last: LastStep,
    block_table_NM: Tensor,
    draft_tokens: int,
) -> AcceptedDrafts:
    """Count how many drafts of each sequence agree with what was chosen, before the first that does not.

    A stop token is not counted: nothing is chosen after it. What the next step needs of this one goes to ``last``, but
    for the next drafts.

    Args:
        sampled: sequences whose drafts are counted, and prompts: the token after each is chosen, or known. Drafts are
            the rows up to the last one; ``token_ids_T`` has all rows of the step.
        verdicts_T: a ``Verdict`` for each row.
        tokens_T: chosen after each row, or known there; a draft that is accepted by force takes its place.
        last: read by ``resolve_pending`` before.
        draft_tokens: most drafts of a sequence.
    """
    num_rows, count = len(tokens_T), len(sampled.columns.end)
    columns, draft_T = sampled.columns, sampled.token_ids_T.roll(-1)
    tokens_T.copy_(torch.where(verdicts_T == Verdict.ACCEPT, draft_T, tokens_T))
    agrees_T = (tokens_T == draft_T) & (verdicts_T != Verdict.REJECT)
    index_D = torch.arange(draft_tokens, device=tokens_T.device)
    first_row_N = columns.last_row - columns.num_drafts
    row_ND = (first_row_N[:, None] + index_D).clamp_max(num_rows - 1)
    is_stop_ND = (tokens_T[row_ND][:, :, None] == columns.stop_ids[:, None]).any(-1)
    agrees_ND = agrees_T[row_ND] & (index_D < columns.num_drafts[:, None]) & ~is_stop_ND
    num_accepted_N = agrees_ND.long().cumprod(1).sum(1)
    last_row_N = first_row_N + num_accepted_N
    last.num_accepted_P[:count] = num_accepted_N
    last.tokens_P[:count] = tokens_T[last_row_N]
    index_F1 = index_D[1:, None]
    num_further_N = (columns.next_drafts - 1).clamp_min(0)
    position_N = (columns.end - 1 - columns.num_drafts).clamp_min(0) + num_accepted_N
    positions_FN = position_N + num_further_N.minimum(index_F1)
    block_index_FN = (positions_FN // BLOCK_TOKENS).clamp_max(block_table_NM.shape[1] - 1)
    blocks_FN = block_table_NM[torch.arange(count, device=tokens_T.device), block_index_FN].long()
    return AcceptedDrafts(
        num_accepted_N=num_accepted_N,
        last_row_N=last_row_N,
        next_tokens_T=tokens_T.clamp_min(0),
        rotary_FN=positions_FN + columns.rotary_delta,
        context_lens_FN=positions_FN + 1,
        write_blocks_FN=blocks_FN * (index_F1 <= num_further_N),
        write_offsets_FN=positions_FN % BLOCK_TOKENS,
    )
