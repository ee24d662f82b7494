"""A step that verifies drafts, padded to a fixed size, so that a CUDA graph that was captured at that size can be
replayed for it.

Every sequence of such a step computes its certain token, and drafts behind it. The host says of each sequence what it
knows; the tables of rows and chunks are made of that on the device, where the step before may have to correct it first
(``kernels/sampling/verification.py``).

Where a step is smaller than the size,

- *sequences* are empty, but for one behind all others, the *filler*: it has the unused rows, and attends to the null
  block;
- empty sequences have no chunks, and no chunk has the filler's rows;
- the filler's rows, and unused places of logged tokens, are copied from the last of the replayed rows, which gives
  zeros; unused places of drafts go to the null log.

Shape suffixes as in ``kernels/batch.py`` and ``kernels/sampling/verification.py``; I integers of the buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np
from torch import Tensor

from strandline.device.batch import PLANNED_NAMES, HostReplay, SequenceColumns
from strandline.device.padded_step import TYPICAL_CONTEXT_TOKENS
from strandline.device.picture_rows import add_earlier_pictures, takes_picture
from strandline.device.upload import ALIGN_ITEMS
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, ReplayBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import Chunks
from strandline.kernels.recurrences.replay import insert_logged
from strandline.kernels.sampling.verification import (
    CHUNKS_OF_SEQUENCE,
    AcceptedDrafts,
    PlannedVerification,
    VerificationTables,
)
from strandline.kernels.step import locate_rows
from strandline.records.plan import SequencePlan

VERIFIED_NAMES: Final = (*PLANNED_NAMES, "num_drafts", "next_drafts")
VERIFIED_FIELDS: Final = attrgetter(*VERIFIED_NAMES)


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
        if len(sequences) > self.num_sequences or any(map(takes_picture, sequences)):
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

    def planned(self, buffer_I: Tensor) -> PlannedVerification:
        """Return the parts of a buffer that tables are made of: without the filler, but for its rows."""
        named, count = self.named(buffer_I), self.size.num_sequences
        whole = ("token_ids", "verdicts", "query_starts")
        names = PlannedVerification._fields
        return PlannedVerification(*(named[name] if name in whole else named[name][:count] for name in names))

    def batch(
        self,
        buffer_I: Tensor,
        tables: VerificationTables,
        block_table_NM: Tensor,
        max_context: int,
        kernels: Kernels,
    ) -> StepBatch:
        """Return the step whose integers lie in a buffer; its rows' places are computed on the device.

        Args:
            tables: made of the same integers.
            max_context: of any sequence, in tokens.
        """
        size, named = self.size, self.named(buffer_I)
        num_sequences = size.num_sequences + 1
        query_starts_N1, end_N = named["query_starts"], named["end"]
        ranges = (named["start"], end_N, named["kv_start"], named["rotary_delta"])
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
        chunks = Chunks((0,) * (num_sequences + 1), any_chunk, any_chunk, any_chunk, is_short=True).with_tensors(
            [tables.first_chunks, tables.starts, tables.lengths, tables.cut_slots]
        )
        replay = ReplayBatch(
            size.num_replayed_rows,
            *(getattr(tables, name) for name in HostReplay._fields),
            insert_logged=kernels[insert_logged],
            is_padded=True,
            source_R=tables.source_rows,
            place_R=tables.log_places,
        )
        recurrent = RecurrentBatch(named["state_src"], tables.state_dst, chunks, replay=replay)
        return StepBatch(named["token_ids"], rows.positions_T, 0, 0, attention, recurrent, rows.rotary_T)

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
        add_earlier_pictures(sequences, named["rotary_delta"])
        starts = named["query_starts"]
        np.cumsum(planned_NF[:, -2] + 1, out=starts[1 : count + 1])
        starts[count + 1 : -1] = num_rows
        starts[-1] = size.num_rows
        named["end"][-1] = size.num_rows - num_rows


def single_rows(
    batch: StepBatch, accepted: AcceptedDrafts, place: int, starts_N1: Tensor, token_N: Tensor
) -> StepBatch:
    """Return a step of one token of each sequence of another step but the filler, for layers without states.

    Args:
        place: of the tokens among the drafts; the first is 0.
        starts_N1: the integers from 0 to the number of sequences.
    """
    num_sequences = len(token_N)
    attention = batch.attention
    return StepBatch(
        token_N,
        accepted.rotary_FN[place],
        num_sequences,
        num_sequences,
        replace(
            attention,
            query_starts=tuple(range(num_sequences + 1)),
            context_lens=attention.context_lens[:num_sequences],
            query_starts_N1=starts_N1,
            context_lens_N=accepted.context_lens_FN[place],
            block_table_NM=attention.block_table_NM[:num_sequences],
            write_blocks_T=accepted.write_blocks_FN[place],
            write_offsets_T=accepted.write_offsets_FN[place],
            most_rows=None,
        ),
        batch.recurrent,
    )
