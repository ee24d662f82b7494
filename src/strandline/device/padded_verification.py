"""A step that verifies drafts, padded to a fixed size, so that a CUDA graph that was captured at that size can be
replayed for it.

Every sequence of such a step computes its certain token, and drafts behind it. As in ``padded_step.py`` all integers
lie in one buffer. Where a step is smaller than the size,

- *sequences* are empty, but for one behind all others, the *filler*: it has the unused rows, and attends to the null
  block;
- *chunks* are empty; no chunk has the filler's rows;
- logged tokens and the filler's rows are copied to the last of the replayed rows, which gives zeros, and drafts to the
  null log.

Shape suffixes as in ``kernels/batch.py``; I integers of the buffer, D drafts of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from strandline.device.batch import HostBatch, HostReplay, SequenceColumns
from strandline.device.padded_step import TYPICAL_CONTEXT_TOKENS
from strandline.device.upload import ALIGN_ITEMS
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, ReplayBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import Chunks
from strandline.kernels.replay import insert_logged
from strandline.kernels.step import locate_rows
from strandline.records.plan import SequencePlan

CHUNKS_OF_SEQUENCE = 3
"""Of a few tokens: they may lie across the grid, and there is a cut."""


@dataclass(frozen=True, slots=True)
class VerificationSize:
    """What a padded step has room for."""

    num_sequences: int
    draft_tokens: int
    """Drafts of each, and tokens in its log."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * (1 + self.draft_tokens)

    @property
    def num_replayed_rows(self) -> int:
        """Logged and computed ones, and one of no token."""
        return self.num_rows + self.num_sequences * self.draft_tokens + 1

    @property
    def num_chunks(self) -> int:
        """Of all sequences, and one that stays empty: empty sequences begin there."""
        return self.num_sequences * CHUNKS_OF_SEQUENCE + 1

    def num_blocks(self, max_model_len: int) -> int:
        """Return the columns of the step's block table: as many as the longest request has blocks, or the filler."""
        return -(-max(max_model_len, self.num_rows) // BLOCK_TOKENS)

    def has_room_for(self, host: HostBatch, sequences: Sequence[SequencePlan]) -> bool:
        """Whether a step of sequences that all verify drafts, and draft behind these, fits in."""
        if host.num_decodes or host.num_sequences > self.num_sequences:
            return False
        return all(
            max(sequence.num_drafts, sequence.num_logged, sequence.next_drafts) <= self.draft_tokens
            for sequence in sequences
        )


class PaddedVerification:
    """The places of a step of one size. The filler is the last sequence."""

    def __init__(self, size: VerificationSize) -> None:
        self.size = size
        num_drafts = size.num_sequences * size.draft_tokens
        of_sequences = (*SequenceColumns._fields, "num_drafts", "next_drafts", "hidden_slots")
        lengths = {
            "token_ids": size.num_rows,
            **dict.fromkeys(of_sequences, size.num_sequences + 1),
            **dict.fromkeys(("query_starts", "first_chunks"), size.num_sequences + 2),
            **dict.fromkeys(("starts", "lengths", "cut_slots"), size.num_chunks),
            **dict.fromkeys(("step_rows", "verdicts"), size.num_rows),
            **dict.fromkeys(("logged_rows", "logged_places", "draft_rows", "draft_places"), num_drafts),
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
        """Return the step whose integers lie in a buffer; its rows' places are worked out on the device.

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
        chunks = Chunks((0,) * (num_sequences + 1), any_chunk, any_chunk, any_chunk, is_short=True).with_tensors(
            [named[name] for name in ("first_chunks", "starts", "lengths", "cut_slots")]
        )
        tables = (named[name] for name in HostReplay._fields)
        insert = kernels[insert_logged]
        replay = ReplayBatch(size.num_replayed_rows, *tables, insert_logged=insert, is_padded=True)
        recurrent = RecurrentBatch(named["state_src"], named["state_dst"], chunks, replay=replay)
        return StepBatch(named["token_ids"], rows.positions_T, 0, 0, attention, recurrent)

    def fill(self, buffer_I: np.ndarray, host: HostBatch, sequences: Sequence[SequencePlan]) -> None:
        """Write a step that there is room for into a buffer of zeros."""
        size, count, num_rows = self.size, host.num_sequences, len(host.token_ids_T)
        named = {name: buffer_I[place] for name, place in self._places.items()}
        named["token_ids"][:num_rows] = host.token_ids_T
        for name, column in zip(SequenceColumns._fields, host.columns, strict=True):
            named[name][:count] = column
        named["num_drafts"][:count] = [sequence.num_drafts for sequence in sequences]
        named["next_drafts"][:count] = [sequence.next_drafts for sequence in sequences]
        named["hidden_slots"][:count] = [sequence.state_dst for sequence in sequences]
        named["query_starts"][: count + 1] = host.query_starts_N1
        named["query_starts"][count + 1 : -1] = num_rows
        named["query_starts"][-1] = size.num_rows
        named["end"][-1] = size.num_rows - num_rows

        num_chunks = len(host.chunks.starts)
        named["first_chunks"][: count + 1] = host.chunks.first_chunks
        named["first_chunks"][count + 1 :] = num_chunks
        named["starts"][:num_chunks] = host.chunks.starts
        named["starts"][num_chunks:] = size.num_replayed_rows
        named["lengths"][:num_chunks] = host.chunks.lengths
        named["cut_slots"][:num_chunks] = host.chunks.cut_slots
        self._fill_replay(named, host)

    def _fill_replay(self, named: dict[str, np.ndarray], host: HostBatch) -> None:
        """Write which rows are logged, and which are drafts."""
        num_rows, last = len(host.token_ids_T), self.size.num_replayed_rows - 1
        named["step_rows"][num_rows:] = named["logged_rows"][:] = last
        if host.replay is None:
            named["step_rows"][:num_rows] = np.arange(num_rows)
            return
        for name, column in zip(HostReplay._fields, host.replay, strict=True):
            named[name][: len(column)] = column


def is_verification(sequence: SequencePlan) -> bool:
    """Whether a sequence computes its certain token and drafts alone, from a state of its own."""
    num_rows = sequence.end - sequence.start
    is_certain_and_drafts = num_rows == 1 + sequence.num_drafts and not sequence.cuts
    return is_certain_and_drafts and sequence.has_own_state and sequence.is_sampled


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
