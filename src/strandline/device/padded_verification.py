"""A step that verifies drafts, padded to a fixed size, so that a CUDA graph that was captured at that size can be
replayed for it.

Every sequence of such a step computes its certain token, and drafts behind it. The host says of each sequence what it
knows; the tables of rows and chunks are made of that on the device, where the step before may have to correct it first
(``LastVerification``). Among the replayed rows each sequence has as many places for logged tokens as there can be, and
the logged ones are the last of these: where its own rows are does not depend on how many there are.

Where a step is smaller than the size,

- *sequences* are empty, but for one behind all others, the *filler*: it has the unused rows, and attends to the null
  block;
- empty sequences have no chunks, and no chunk has the filler's rows;
- the filler's rows, and unused places of logged tokens, are copied from the last of the replayed rows, which gives
  zeros; unused places of drafts go to the null log.

Shape suffixes as in ``kernels/batch.py``; I integers of the buffer, C chunks, D drafts of a sequence,
L places of its log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.device.batch import PLANNED_NAMES, HostReplay, SequenceColumns
from strandline.device.padded_step import TYPICAL_CONTEXT_TOKENS
from strandline.device.upload import ALIGN_ITEMS
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_SLOT
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, ReplayBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import Chunks
from strandline.kernels.replay import insert_logged
from strandline.kernels.step import locate_rows
from strandline.records.plan import SequencePlan

VERIFIED_NAMES: Final = (*PLANNED_NAMES, "num_drafts", "next_drafts")
VERIFIED_FIELDS: Final = attrgetter(*VERIFIED_NAMES)

CHUNKS_OF_SEQUENCE: Final = 2
"""Logged tokens and certain ones, then drafts. Kernels of a few tokens need no chunks on the 64-token grid."""


@dataclass(frozen=True, slots=True)
class VerificationSize:
    """What a padded step has room for."""

    num_sequences: int
    draft_tokens: int
    """Drafts of each."""
    log_tokens: int
    """Places of a log: the step before may have verified more drafts than this one."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * (1 + self.draft_tokens)

    @property
    def num_replayed_rows(self) -> int:
        """Logged and computed ones, and one of no token."""
        return self.num_rows + self.num_sequences * self.log_tokens + 1

    @property
    def num_chunks(self) -> int:
        """Chunks of all sequences, and one that stays empty, at which empty sequences begin."""
        return self.num_sequences * CHUNKS_OF_SEQUENCE + 1

    def num_blocks(self, max_model_len: int) -> int:
        """Return the columns of the step's block table: as many as the longest request has blocks, or the filler."""
        return -(-max(max_model_len, self.num_rows) // BLOCK_TOKENS)

    def has_room_for(self, sequences: Sequence[SequencePlan]) -> bool:
        """Whether a step of sequences that all verify drafts, and draft behind these, fits in."""
        if len(sequences) > self.num_sequences:
            return False
        return all(max(sequence.num_drafts, sequence.next_drafts) <= self.draft_tokens for sequence in sequences)


class PaddedVerification:
    """The places of a step of one size. The filler is the last sequence."""

    def __init__(self, size: VerificationSize) -> None:
        self.size = size
        lengths = {
            "token_ids": size.num_rows,
            **dict.fromkeys((*SequenceColumns._fields, "num_drafts", "next_drafts"), size.num_sequences + 1),
            "query_starts": size.num_sequences + 2,
            "sequence_of_row": size.num_rows,
            "verdicts": size.num_rows,
        }
        self._places = dict[str, slice]()
        start = 0
        for name, length in lengths.items():
            self._places[name] = slice(start, start + length)
            start += -(-length // ALIGN_ITEMS) * ALIGN_ITEMS
        self.num_integers = start

    def named(self, buffer_I: Tensor) -> dict[str, Tensor]:
        """Return the parts of a buffer."""
        return {name: buffer_I[place] for name, place in self._places.items()}

    def part(self, buffer_I: np.ndarray, name: str) -> np.ndarray:
        """Return one part of a buffer on the host."""
        return buffer_I[self._places[name]]

    def batch(self, buffer_I: Tensor, block_table_NM: Tensor, max_context: int, kernels: Kernels) -> StepBatch:
        """Return the step whose integers lie in a buffer; its rows' places are computed on the device.

        Args:
            max_context: of any sequence, in tokens.
        """
        size, named = self.size, self.named(buffer_I)
        num_sequences = size.num_sequences + 1
        query_starts_N1, end_N = named["query_starts"], named["end"]
        ranges = (named["start"], end_N, named["kv_start"])
        rows = kernels[locate_rows](query_starts_N1, *ranges, block_table_NM, size.num_rows)
        attention = AttentionBatch(
            # As many tiles of rows as there can be: each sequence's last one may hold a single row.
            query_starts=(*range(num_sequences), size.num_rows + size.num_sequences),
            context_lens=(min(TYPICAL_CONTEXT_TOKENS, max_context),) * num_sequences,
            query_starts_N1=query_starts_N1,
            context_lens_N=end_N,
            block_table_NM=block_table_NM,
            write_blocks_T=rows.write_blocks_T,
            write_offsets_T=rows.write_offsets_T,
            is_all_written=False,
            most_rows=1 + size.draft_tokens,
        )
        any_chunk = (1,) * size.num_chunks
        tables = self._tables(named)
        chunks = Chunks((0,) * (num_sequences + 1), any_chunk, any_chunk, any_chunk, is_short=True).with_tensors(
            [tables[name] for name in ("first_chunks", "starts", "lengths", "cut_slots")]
        )
        columns = (tables[name] for name in HostReplay._fields)
        insert = kernels[insert_logged]
        replay = ReplayBatch(size.num_replayed_rows, *columns, insert_logged=insert, is_padded=True)
        recurrent = RecurrentBatch(named["state_src"], tables["state_dst"], chunks, replay=replay)
        return StepBatch(named["token_ids"], rows.positions_T, 0, 0, attention, recurrent)

    def _tables(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tables of chunks and of replayed rows, made from the data of each sequence.

        A sequence that has ended, whose ``state_dst`` is the null slot, stores neither a state nor drafts.
        """
        size = self.size
        count, end = size.num_sequences, size.num_replayed_rows
        starts_N1 = named["query_starts"]
        first_row_N, num_rows_N = starts_N1[:count], starts_N1[1 : count + 1] - starts_N1[:count]
        num_logged_N, num_drafts_N = named["num_logged"][:count], named["num_drafts"][:count]
        slot_N, log_N = named["state_dst"][:count], named["log"][:count]
        place_D, place_L, index_N = (
            torch.arange(number, device=starts_N1.device) for number in (size.draft_tokens, size.log_tokens, count + 2)
        )
        own_row_N = first_row_N + (index_N[:count] + 1) * size.log_tokens
        is_real_N, has_drafts_N = num_rows_N > 0, num_drafts_N > 0
        certain_rows_N = num_rows_N - num_drafts_N
        parts_N2 = torch.stack((own_row_N - num_logged_N, own_row_N + certain_rows_N), 1)
        lengths_N2 = torch.stack((num_logged_N + certain_rows_N, num_drafts_N), 1)
        cut_N2 = torch.stack((slot_N * has_drafts_N, torch.zeros_like(slot_N)), 1)
        row_T, sequence_T = torch.arange(size.num_rows, device=starts_N1.device), named["sequence_of_row"]
        is_logged_NL = place_L < num_logged_N[:, None]
        is_draft_ND = place_D < num_drafts_N[:, None]
        first_place_N1 = (log_N * size.log_tokens)[:, None]
        is_kept_ND = is_draft_ND & (slot_N != NULL_SLOT)[:, None]
        return {
            "first_chunks": CHUNKS_OF_SEQUENCE * index_N.minimum(is_real_N.sum()),
            "starts": F.pad(torch.where(is_real_N[:, None], parts_N2, end).flatten(), (0, 1), value=end),
            "lengths": F.pad(lengths_N2.flatten(), (0, 1)),
            "cut_slots": F.pad(cut_N2.flatten(), (0, 1)),
            "state_dst": F.pad(slot_N * ~has_drafts_N, (0, 1)),
            "step_rows": torch.where(sequence_T < count, row_T + (sequence_T + 1) * size.log_tokens, end - 1),
            "logged_rows": torch.where(is_logged_NL, parts_N2[:, :1] + place_L, end - 1).flatten(),
            "logged_places": ((first_place_N1 + place_L) * is_logged_NL).flatten(),
            "draft_rows": ((first_row_N[:, None] + 1 + place_D) * is_draft_ND).flatten(),
            "draft_places": (first_place_N1 * is_kept_ND + place_D).flatten(),
        }

    def fill(self, buffer_I: np.ndarray, sequences: Sequence[SequencePlan]) -> None:
        """Write a step that there is room for into a buffer of zeros."""
        size, count = self.size, len(sequences)
        named = {name: buffer_I[place] for name, place in self._places.items()}
        token_ids = [token for sequence in sequences for token in sequence.token_ids]
        num_rows = len(token_ids)
        named["token_ids"][:num_rows] = token_ids
        planned_NF = np.array(list(map(VERIFIED_FIELDS, sequences)), dtype=np.int64).reshape(count, len(VERIFIED_NAMES))
        for name, column in zip(VERIFIED_NAMES, planned_NF.T, strict=True):
            named[name][:count] = column
        starts = named["query_starts"]
        np.cumsum(planned_NF[:, -2] + 1, out=starts[1 : count + 1])
        starts[count + 1 : -1] = num_rows
        starts[-1] = size.num_rows
        named["sequence_of_row"][:] = np.repeat(np.arange(size.num_sequences + 1), np.diff(starts))
        named["end"][-1] = size.num_rows - num_rows


class LastVerification:
    """What the last step that verified drafts left on the device, row by row of its sequences: the next step may have
    been planned without it. Its tensors stay where they are, for graphs.

    Shape suffixes: P rows; the others as above.
    """

    def __init__(self, max_num_seqs: int, draft_tokens: int, device: torch.device) -> None:
        self.num_accepted_P = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.tokens_P = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """What was chosen behind the accepted drafts."""
        self.drafts_PD = torch.zeros(max_num_seqs, draft_tokens, dtype=torch.int64, device=device)
        """Behind these."""

    def store(self, num_accepted_N: Tensor, tokens_N: Tensor, drafts_ND: Tensor) -> None:
        """Take what a step found; nothing reads the rows that pad it."""
        count = len(tokens_N)
        self.num_accepted_P[:count].copy_(num_accepted_N)
        self.tokens_P[:count].copy_(tokens_N)
        self.drafts_PD[:count, : drafts_ND.shape[1]].copy_(drafts_ND)

    def correct(self, padded: PaddedVerification, buffer_I: Tensor, stop_ids_XS: Tensor) -> None:
        """Complete sequences that were planned as if no draft of the step before were accepted, in place.

        They begin behind the accepted drafts, which are logged, with the token that was chosen there. Where that is one
        of the sequence's stop tokens, or none could be chosen, the sequence has ended: its slot becomes the null slot.
        """
        named, size = padded.named(buffer_I), padded.size
        count, depth = size.num_sequences, size.draft_tokens
        source_N, is_pending_N = named["source_row"][:count], named["pending"][:count] != 0
        token_N = self.tokens_P[source_N]
        num_accepted_N = self.num_accepted_P[source_N] * is_pending_N
        for name in ("start", "end", "num_logged"):
            named[name][:count] += num_accepted_N
        is_stop_N = (stop_ids_XS[named["stop_set"][:count]] == token_N[:, None]).any(-1) | (token_N == NO_TOKEN)
        named["state_dst"][:count].masked_fill_(is_pending_N & is_stop_N, NULL_SLOT)
        taken_ND = torch.cat((token_N[:, None], self.drafts_PD[source_N][:, :depth]), 1).clamp_min(0)
        starts_N1, token_ids_T, sequence_T = named["query_starts"], named["token_ids"], named["sequence_of_row"]
        is_real_T, sequence_T = sequence_T < count, sequence_T.clamp_max(count - 1)
        place_T = torch.arange(size.num_rows, device=buffer_I.device) - starts_N1[sequence_T]
        taken_T = taken_ND[sequence_T, place_T.clamp_max(depth)]
        token_ids_T.copy_(torch.where(is_pending_N[sequence_T] & is_real_T, taken_T, token_ids_T))


def single_rows(
    batch: StepBatch, position_N: Tensor, is_written_N: Tensor, token_N: Tensor, kernels: Kernels
) -> StepBatch:
    """Return a step of one token of each sequence of another step but the filler, for layers without states.

    Args:
        is_written_N: whether its keys and values are kept.
    """
    num_sequences = len(token_N)
    attention = batch.attention
    table_NM = attention.block_table_NM[:num_sequences]
    starts_N1 = torch.arange(num_sequences + 1, device=token_N.device)
    zero_N = torch.zeros_like(position_N)
    rows = kernels[locate_rows](starts_N1, position_N, position_N + is_written_N, zero_N, table_NM, num_sequences)
    return StepBatch(
        token_N,
        rows.positions_T,
        num_sequences,
        num_sequences,
        replace(
            attention,
            query_starts=tuple(range(num_sequences + 1)),
            context_lens=attention.context_lens[:num_sequences],
            query_starts_N1=starts_N1,
            context_lens_N=position_N + 1,
            block_table_NM=table_NM,
            write_blocks_T=rows.write_blocks_T,
            write_offsets_T=rows.write_offsets_T,
            most_rows=None,
        ),
        batch.recurrent,
    )
