"""Conversion of a plan to the tensors of the step.

Decodes come first (``StepBatch``); every index tensor is made here, once per step, and shared by all layers. The host's
data of each sequence is passed in ``SequenceColumns``; the values for each row are derived from it on the device
(``locate_rows``).

Shape suffixes as in ``kernels/batch.py``; D decodes, F columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.batches.adapter_tiles import tile_rows
from strandline.device.batches.pending import PendingRows
from strandline.device.batches.picture_rows import rotary_offsets
from strandline.device.hardware.upload import upload_together
from strandline.ids import NO_TOKEN, NULL_SLOT
from strandline.kernels.batch import AttentionBatch, LogBatch, RecurrentBatch, RerunBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import Chunks, plan_chunks
from strandline.kernels.gemm.low_rank import NO_SLOT, TiledRows
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.step import PlannedStep, RowAddresses, SequenceColumns, locate_rows
from strandline.records.actions import FoldLog
from strandline.records.plan import MAX_STOP_IDS, SequencePlan

NUM_PLANNED: Final = SequenceColumns._fields.index("next_drafts") + 1
PLANNED_FIELDS: Final = attrgetter(*SequenceColumns._fields[:NUM_PLANNED])


@dataclass(frozen=True)
class HostBatch:
    """The step's indices on the host; one-dimensional arrays are int64. Tables are made when they are asked for."""

    sequences: Sequence[SequencePlan]
    """Decodes first, then prefills; each computes one token or more."""
    num_decodes: int
    """Number of decoding sequences, or of those that verify drafts."""
    num_decode_rows: int
    """Number of their rows, which come first."""
    columns: SequenceColumns[np.ndarray]
    token_ids_T: np.ndarray
    query_starts_N1: np.ndarray
    log_tokens: int
    """Room for drafts in a log."""
    picture_offsets: np.ndarray | None
    """``StepBatch.picture_offsets``, flat; None: all rows are of text."""
    adapter_slots_N: np.ndarray | None = None
    """The slot of each sequence's adapter; None: no sequence has one."""
    verdicts: Sequence[int] = ()
    """A ``Verdict`` for each row of a padded step that verifies drafts; empty: none is forced."""

    @cached_property
    def block_tables(self) -> tuple[np.ndarray, ...]:
        """``block_table_NM``, and for each size of windows ``window_table_NM``, int32.

        The first has all blocks of the sequences, with the null block after them: how far a step reads may be unknown.
        The others have window blocks by their index, with the null block for those passed.
        """
        tables = [np.frombuffer(sequence.block_table, dtype=np.int32) for sequence in self.sequences]
        table_NM = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for row, blocks in enumerate(tables):
            table_NM[row, : len(blocks)] = blocks
        sizes = zip(*(sequence.window_blocks for sequence in self.sequences), strict=True)
        windows = [[np.frombuffer(blocks, dtype=np.int32) for blocks in windows] for windows in sizes]
        return table_NM, *map(_window_table, windows)

    @property
    def adapter_slots_T(self) -> np.ndarray:
        """The slot of each row's adapter."""
        slots_N = np.full(self.num_sequences, NO_SLOT) if self.adapter_slots_N is None else self.adapter_slots_N
        return slots_N.repeat(np.diff(self.query_starts_N1))

    @cached_property
    def rerun(self) -> "HostRerun | None":
        """The logged tokens to compute again; None: no prefill has a log."""
        return _plan_rerun(self.prefills, self.log_tokens)

    @property
    def chunks(self) -> Chunks:
        return self._chunks_and_cuts[0]

    @property
    def cut_rows_C(self) -> np.ndarray:
        """Each chunk's last row, whose hidden state goes to the slot of the chunk's cut."""
        return self._chunks_and_cuts[1] + self.num_decode_rows

    @cached_property
    def _chunks_and_cuts(self) -> tuple[Chunks, np.ndarray]:
        if self.rerun is not None:
            return _chunks_with_logged(self.prefills, self.rerun)
        chunks = plan_chunks([(s.start, s.end) for s in self.prefills], [s.cuts for s in self.prefills])
        return chunks, np.array(chunks.starts, dtype=np.int64) + np.array(chunks.lengths, dtype=np.int64) - 1

    @property
    def next_ids_T(self) -> np.ndarray:
        """The token after each row of a prefill; 0 where it is to be sampled."""
        return np.concatenate([(*plan.token_ids[1:], max(plan.next_id, 0)) for plan in self.prefills] or [()])

    @property
    def prefills(self) -> Sequence[SequencePlan]:
        return self.sequences[self.num_decodes :]

    @property
    def num_sequences(self) -> int:
        return len(self.columns.start)

    @property
    def num_prompts(self) -> int:
        return self.num_sequences - self.num_decodes

    @property
    def num_prompt_rows(self) -> int:
        """Number of rows after those of the decodes."""
        return len(self.token_ids_T) - self.num_decode_rows

    @property
    def most_prefill_rows(self) -> int:
        """Number of rows of the longest prefill."""
        return int(np.diff(self.query_starts_N1[self.num_decodes :]).max())

    @property
    def has_pending(self) -> bool:
        return bool(self.columns.pending.any())


class HostRerun(NamedTuple):
    """The index columns of a ``RerunBatch`` on the host."""

    step_rows: np.ndarray
    logged_rows: np.ndarray
    logged_entries: np.ndarray
    draft_rows: np.ndarray
    draft_entries: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.step_rows) + len(self.logged_rows)

    def with_tensors(self, tensors: Sequence[Tensor], kernels: Kernels) -> RerunBatch:
        """Return the batch, given its columns on the device."""
        return RerunBatch(self.num_rows, *tensors, insert_logged=kernels[insert_logged])


class HostLengths(NamedTuple):
    """The fields of an ``AttentionBatch`` that the host fills in."""

    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    is_all_written: bool = False
    most_rows: int | None = None
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step on the device: what a model computes, and what of it is stored."""

    step: StepBatch
    planned: PlannedStep
    """The sequences that tokens are chosen after, as kernels complete them and count their drafts."""
    stored: Sequence[tuple[Tensor, Tensor]]
    """Rows whose final hidden states are stored, and the slots that take them; int64."""
    tiled: TiledRows | None
    """The rows that have adapters; None: no row has one."""
    others: Sequence[Tensor] = ()
    """What came to the device with the step."""


def build_host_batch(
    sequences: Sequence[SequencePlan],
    num_decodes: int,
    pending: PendingRows | None = None,
    draft_tokens: int = 0,
) -> HostBatch:
    """Collect the step's indices.

    Args:
        sequences: decodes first, then prefills; each computes one token or more.
        num_decodes: how many of them are decodes.
        pending: None: no token is pending.
        draft_tokens: number of drafts that a log has room for.
    """
    columns_FN = np.zeros((NUM_PLANNED + 2, len(sequences)), dtype=np.int64)
    columns_FN[:NUM_PLANNED] = np.array(list(map(PLANNED_FIELDS, sequences)), dtype=np.int64).T
    stop_ids_NS = np.full((len(sequences), MAX_STOP_IDS), NO_TOKEN) if pending is None else pending.stop_ids_NS
    columns: SequenceColumns[np.ndarray] = SequenceColumns(*[*columns_FN, stop_ids_NS])
    if pending is not None:
        columns.source_row[:] = pending.source_row_N
    query_starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(columns.end - columns.start, out=query_starts[1:])
    offsets = rotary_offsets(sequences, columns.rotary_delta)
    columns.last_row[:] = query_starts[1:] - 1
    if query_starts[-1] == len(sequences):
        token_ids = np.array([sequence.token_ids[0] for sequence in sequences], dtype=np.int64)
    else:
        token_ids = np.concatenate([np.asarray(sequence.token_ids, dtype=np.int64) for sequence in sequences])
    return HostBatch(
        sequences,
        num_decodes=num_decodes,
        num_decode_rows=int(query_starts[num_decodes]),
        columns=columns,
        token_ids_T=token_ids,
        query_starts_N1=query_starts,
        log_tokens=draft_tokens,
        picture_offsets=offsets,
    )


def fold_batch(folds: Sequence[FoldLog], device: torch.device, kernels: Kernels, draft_tokens: int) -> StepBatch:
    """Return the batch that advances states over logged drafts alone."""
    slots = [fold.slot for fold in folds]
    entries = [np.arange(fold.num_tokens) + fold.log * draft_tokens for fold in folds]
    logged = np.arange(sum(fold.num_tokens for fold in folds))
    none = logged[:0]
    host_rerun = HostRerun(none, logged, np.concatenate(entries), none, none)
    chunks = plan_chunks([(0, fold.num_tokens) for fold in folds], [()] * len(folds))
    [slots_N], columns, rerun_columns = _upload_groups([[slots], chunks.columns, host_rerun], device)
    rerun = host_rerun.with_tensors(rerun_columns, kernels)
    recurrent = RecurrentBatch(slots_N, slots_N, chunks.with_tensors(columns), None, rerun)
    nothing = slots_N[:0]
    attention = AttentionBatch((0,), (), nothing, nothing, nothing, nothing, nothing, is_all_written=True)
    return StepBatch(nothing, nothing, 0, 0, attention, recurrent)


def _plan_rerun(prefills: Sequence[SequencePlan], draft_tokens: int) -> HostRerun | None:
    """Say which logged tokens come before which rows, and which rows are drafts; None: no sequence has a log."""
    if not any(sequence.log for sequence in prefills):
        return None
    step_rows, logged_rows, logged_entries, draft_rows, draft_entries = parts = [list[np.ndarray]() for _ in range(5)]
    row = step_row = 0
    for sequence in prefills:
        num_logged, num_rows, num_drafts = sequence.num_logged, sequence.end - sequence.start, sequence.num_drafts
        first_entry = sequence.log * draft_tokens
        logged_rows.append(np.arange(row, row + num_logged))
        logged_entries.append(np.arange(first_entry, first_entry + num_logged))
        row += num_logged
        step_rows.append(np.arange(row, row + num_rows))
        row, step_row = row + num_rows, step_row + num_rows
        draft_rows.append(np.arange(step_row - num_drafts, step_row))
        draft_entries.append(np.arange(first_entry, first_entry + num_drafts))
    return HostRerun(*map(np.concatenate, parts))


def _chunks_with_logged(prefills: Sequence[SequencePlan], rerun: HostRerun) -> tuple[Chunks, np.ndarray]:
    """Plan the chunks of logged and new tokens together; also return the step's row at the end of each.

    A sequence with drafts gets a cut before them, to its own slot.
    """
    cuts = [((s.end - s.num_drafts, s.state_dst),) if s.num_drafts else s.cuts for s in prefills]
    chunks = plan_chunks([(s.start - s.num_logged, s.end) for s in prefills], cuts)
    chunks = replace(chunks, is_short=all(s.end - s.start == 1 + s.num_drafts for s in prefills))
    step_row_R = np.zeros(rerun.num_rows, dtype=np.int64)
    step_row_R[rerun.step_rows] = np.arange(len(rerun.step_rows))
    return chunks, step_row_R[np.array(chunks.starts, dtype=np.int64) + np.array(chunks.lengths, dtype=np.int64) - 1]


def to_device(
    host: HostBatch, device: torch.device, kernels: Kernels, others: Sequence[Sequence[int] | np.ndarray] = ()
) -> DeviceBatch:
    """Make the step's tensors, by one copy.

    Args:
        others: what the copy is to bring as well.
    """
    # The state after drafts is not stored: it is that of tokens which may be rejected.
    state_dst = np.where(host.columns.num_drafts > 0, NULL_SLOT, host.columns.state_dst)
    of_sequences = host.columns._replace(state_dst=state_dst)
    offsets = () if host.picture_offsets is None else host.picture_offsets
    tiles = () if host.adapter_slots_N is None else tile_rows(host.adapter_slots_T)
    whole, sequences, chunk_columns, tables, rerun_columns, tiled, others_T = _upload_groups(
        [
            (host.token_ids_T, host.query_starts_N1, host.cut_rows_C, offsets),
            of_sequences,
            host.chunks.columns,
            host.block_tables,
            host.rerun or (),
            tiles,
            others,
        ],
        device,
    )
    token_ids_T, query_starts_N1, cut_rows_C, offsets_3T = whole
    columns: SequenceColumns[Tensor] = SequenceColumns(*sequences)
    planned = PlannedStep(token_ids_T, query_starts_N1, columns)
    lengths = HostLengths(
        tuple(host.query_starts_N1.tolist()),
        tuple(host.columns.end.tolist()),
        is_all_written=bool((host.columns.start >= host.columns.kv_start).all()),
        most_rows=host.most_prefill_rows if host.chunks.is_short else None,
    )
    rows, attention = address_rows(planned, tables, kernels, lengths)
    log = _logs(host, columns) if host.columns.log[: host.num_decodes].any() else None
    chunks = host.chunks.with_tensors(chunk_columns)
    rerun = None if host.rerun is None else host.rerun.with_tensors(rerun_columns, kernels)
    recurrent = RecurrentBatch(columns.state_src, columns.state_dst, chunks, log, rerun)
    counts = (host.num_decodes, host.num_decode_rows)
    pictures = None if host.picture_offsets is None else offsets_3T.view(3, -1)
    step = StepBatch(token_ids_T, rows.positions_T, *counts, attention, recurrent, rows.rotary_T, pictures)
    stored = [(columns.last_row, columns.state_dst)]
    if any(host.chunks.cut_slots):
        stored.append((cut_rows_C, chunks.cut_slots_C))
    return DeviceBatch(step, planned, stored, TiledRows(*tiled) if tiles else None, others_T)


def _upload_groups(
    groups: Sequence[Sequence[Sequence[int] | np.ndarray]], device: torch.device
) -> Iterator[list[Tensor]]:
    """Return groups of arrays on the device, by a single copy of all."""
    tensors = iter(upload_together([values for group in groups for values in group], device))
    return ([next(tensors) for _ in group] for group in groups)


def address_rows(
    planned: PlannedStep,
    tables: Sequence[Tensor],
    kernels: Kernels,
    lengths: HostLengths,
    *,
    are_single: bool = False,
) -> tuple[RowAddresses, AttentionBatch]:
    """Return the addresses of a step's rows, and what layers attend to: with windows, each size writes all rows.

    Args:
        tables: ``block_table_NM``, then ``window_table_NM`` of each size.
        are_single: see ``locate_rows``.
    """
    block_table_NM, *window_tables = tables
    columns, locate_in = planned.columns, kernels[locate_rows]
    rows = locate_in(planned, block_table_NM, are_single=are_single)
    attention = AttentionBatch(
        **lengths._asdict(),
        query_starts_N1=planned.query_starts_N1,
        context_lens_N=columns.end,
        block_table_NM=block_table_NM,
        write_blocks_T=rows.write_blocks_T,
        write_offsets_T=rows.write_offsets_T,
    )
    windowed = list[AttentionBatch]()
    for table_NM in window_tables:
        all_written = planned._replace(columns=columns._replace(kv_start=columns.start))
        written = locate_in(all_written, table_NM)
        own = replace(attention, block_table_NM=table_NM, write_blocks_T=written.write_blocks_T, gathers={})
        windowed.append(replace(own, is_all_written=not own.is_padded))
    return rows, replace(attention, windowed=tuple(windowed))


def _window_table(windows: Sequence[np.ndarray]) -> np.ndarray:
    """Return a table with a row for each window, which is given as in ``SequencePlan.window_blocks``."""
    table_NM = np.zeros((len(windows), max(window[0] + len(window) - 1 for window in windows)), dtype=np.int32)
    for row, window in enumerate(windows):
        table_NM[row, window[0] : window[0] + len(window) - 1] = window[1:]
    return table_NM


def _logs(host: HostBatch, columns: SequenceColumns[Tensor]) -> LogBatch:
    decodes = slice(host.num_decodes)
    log_D = host.columns.log[decodes]
    first = int(log_D[0])
    counts_up = bool((log_D == np.arange(first, first + len(log_D))).all())
    return LogBatch(
        columns.log[decodes],
        columns.num_logged[decodes],
        slice(first, first + len(log_D)) if counts_up else columns.log[decodes],
        tuple(host.columns.num_logged[decodes].tolist()),
        columns.num_folded[decodes],
        tuple(host.columns.num_folded[decodes].tolist()),
    )
