"""A step padded to a fixed size, so that a CUDA graph that was captured at that size can be replayed for it.

All integers of a step but the block tables are in one buffer, so that one copy brings them to the device. Where a step
is smaller than the size,

- *decodes* read and write null slots and have an empty context; where they have drafts, they are empty;
- *prompts* are empty;
- unused rows of decodes with drafts belong to one more sequence, the *filler*, after these, and those of prompts to
  another one, after all others: it starts from zeros, attends to the null block, and is stored nowhere. So no row that
  a later operation reads is left unwritten;
- *chunks* are empty, and tiles of rows with adapters have no slot.

A decode with drafts computes its certain token, and drafts after it. The host says of each what it knows; the tables of
rows and chunks are made of that on the device, where the step before may have to correct it first
(``kernels/sampling/verification.py``). No chunk has the filler's rows then: they, and unused rows of logged tokens, are
copied from the last of the rerun rows, which gives zeros; unused rows of drafts go to the null log.

Shape suffixes as in ``kernels/batch.py`` and ``kernels/sampling/verification.py``; I integers of the buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import numpy as np
from torch import Tensor

from strandline.device.batches.adapter_tiles import most_tiles, tile_rows
from strandline.device.batches.batch import (
    DeviceBatch,
    HostBatch,
    HostLengths,
    HostRerun,
    address_rows,
    build_host_batch,
)
from strandline.device.batches.prompt_room import MAX_PROMPTS, SPARE_CHUNKS
from strandline.device.hardware.upload import ALIGN_ITEMS
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, LogBatch, RecurrentBatch, RerunBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import CHUNK_TOKENS, Chunks, ChunkTable
from strandline.kernels.gemm.low_rank import NO_SLOT, TILE_ROWS, TiledRows
from strandline.kernels.recurrences.rerun import insert_logged
from strandline.kernels.sampling.verification import CHUNKS_OF_SEQUENCE, VerificationTables
from strandline.kernels.step import Column, PlannedStep, SequenceColumns
from strandline.records.plan import MAX_STOP_IDS

ADAPTER_COLUMNS: Final = ("adapter_rows", "adapter_slots", "adapter_slots_of_rows")
"""Names of ``TiledRows`` in the buffer."""

TYPICAL_CONTEXT_TOKENS: Final = 8192
"""Context length that attention's grid is chosen for; results are right for any."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a padded step has room for."""

    num_decodes: int
    num_prompt_rows: int = 0
    """Tokens of prompts in all; 0: none are computed."""
    takes_pictures: bool = False
    """Whether tokens of pictures may be among those of prompts."""
    num_adapters: int = 0
    """Slots of adapters; 0: no row has an adapter, else some must."""
    draft_tokens: int = 0
    """Drafts of each decode."""
    log_tokens: int = 0
    """Drafts that a log has room for: the step before may have verified more of them than this one. 0: the step neither
    verifies nor makes drafts."""

    @property
    def has_drafts(self) -> bool:
        """Whether decodes may have drafts, and are computed as prefills."""
        return self.log_tokens > 0

    @property
    def num_prompts(self) -> int:
        """Prompts, the filler included."""
        return MAX_PROMPTS + 1 if self.num_prompt_rows else 0

    @property
    def has_filler(self) -> bool:
        return self.has_drafts or self.num_prompts > 0

    @property
    def num_results(self) -> int:
        """Integers that graphs store on the host: each row's token and, with drafts, how many of each sequence's are
        accepted and its next ones. With prompts, none.
        """
        if self.num_prompts:
            return 0
        return self.num_rows + self.num_decodes * (1 + self.draft_tokens) * self.has_drafts

    @property
    def first_prompt(self) -> int:
        """Index of the first prompt among the sequences."""
        return self.num_decodes + self.has_drafts

    @property
    def num_sequences(self) -> int:
        return self.first_prompt + self.num_prompts

    @property
    def num_decode_rows(self) -> int:
        """Rows of the decodes."""
        return self.num_decodes * (1 + self.draft_tokens)

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_prompt_rows

    @property
    def num_rerun_rows(self) -> int:
        """With drafts: logged and computed rows of decodes, and one of no token."""
        return self.num_decode_rows + self.num_decodes * self.log_tokens + 1

    @property
    def num_verified_chunks(self) -> int:
        """Chunks of decodes with drafts, and one that stays empty."""
        return self.num_decodes * CHUNKS_OF_SEQUENCE + 1

    @property
    def num_chunks(self) -> int:
        """Chunks of prompts, with at least one that stays empty: empty sequences begin there."""
        return -(-self.num_prompt_rows // CHUNK_TOKENS) + SPARE_CHUNKS if self.num_prompt_rows else 0

    def num_blocks(self, max_model_len: int) -> int:
        """Return the columns of the step's block table: as many as the longest request has blocks, or a filler."""
        return -(-max(max_model_len, self.num_decode_rows, self.num_prompt_rows) // BLOCK_TOKENS)

    def has_room_for(self, host: HostBatch) -> bool:
        """Whether a step fits in; with drafts, if ``has_drafts``, else without. One without prompts fits where there is
        no room for any, and only there.
        """
        if host.picture_offsets is not None and not self.takes_pictures:
            return False
        if (host.adapter_slots_N is None) != (self.num_adapters == 0):
            return False
        num_prompts = host.num_prompts
        if (num_prompts == 0) != (self.num_prompts == 0):
            return False
        if self.has_drafts and max(host.columns.num_drafts.max(), host.columns.next_drafts.max()) > self.draft_tokens:
            return False
        if host.num_decodes > self.num_decodes:
            return False
        if not num_prompts:
            return True
        num_free_rows = self.num_prompt_rows - host.num_prompt_rows
        if num_prompts > MAX_PROMPTS or num_free_rows < 0 or host.columns.log[host.num_decodes :].any():
            return False
        return len(host.chunks.starts) + -(-num_free_rows // CHUNK_TOKENS) < self.num_chunks

    def address_sequences(self, host: HostBatch) -> tuple[list[int], list[int]]:
        """Return the first row of each sequence of a step in the padded one, and its index there."""
        starts_N = host.query_starts_N1[:-1].copy()
        starts_N[host.num_decodes :] += self.num_decode_rows - host.num_decode_rows
        prompts = range(self.first_prompt, self.first_prompt + host.num_prompts)
        return starts_N.tolist(), [*range(host.num_decodes), *prompts]

    @property
    def num_integers(self) -> int:
        """Size of the buffer."""
        return buffer_layout(self)[1]


@cache
def buffer_layout(size: StepSize) -> tuple[Mapping[str, slice], int]:
    """Return the parts of a step's buffer by their names, and its size."""
    lengths = {
        "token_ids": size.num_rows,
        **dict.fromkeys(SequenceColumns._fields, size.num_sequences),
        "stop_ids": size.num_sequences * MAX_STOP_IDS,
        "query_starts": size.num_sequences + 1,
        "first_chunks": size.num_prompts + 1 if size.num_prompts else 0,
        **dict.fromkeys(("starts", "lengths", "cut_slots", "cut_rows"), size.num_chunks),
        **dict.fromkeys(("verdicts", "next_ids"), size.num_rows if size.has_drafts else 0),
        "results_address": int(size.num_results > 0),
        "picture_offsets": 3 * size.num_rows if size.takes_pictures else 0,
        "adapter_rows": TILE_ROWS * (num_tiles := most_tiles(size.num_rows, size.num_adapters)),
        "adapter_slots": num_tiles,
        "adapter_slots_of_rows": size.num_rows if size.num_adapters else 0,
    }
    slices, start = dict[str, slice](), 0
    for name, length in lengths.items():
        slices[name] = slice(start, start + length)
        start += -(-length // ALIGN_ITEMS) * ALIGN_ITEMS
    return slices, start


def named_parts(size: StepSize, buffer_I: Column) -> dict[str, Column]:
    """Return the parts of a step's buffer by their names."""
    parts = {name: buffer_I[part] for name, part in buffer_layout(size)[0].items()}
    return {**parts, "stop_ids": parts["stop_ids"].reshape(-1, MAX_STOP_IDS)}


class PaddedStep:
    """A step whose integers are in a buffer on the device. The filler of the last rows is the last sequence.

    Args:
        buffer_I: filled by ``fill_buffer`` and completed by the device, whenever the step is computed.
    """

    def __init__(self, size: StepSize, buffer_I: Tensor) -> None:
        self.size, self.buffer_I = size, buffer_I
        self.named = named_parts(size, buffer_I)

    def columns(self, sequences: slice = slice(None)) -> SequenceColumns[Tensor]:
        """Return what every sequence has, or what consecutive ones have."""
        return SequenceColumns(*(self.named[name][sequences] for name in SequenceColumns._fields))

    def planned(self, sequences: slice = slice(None)) -> PlannedStep:
        """Return all sequences, or consecutive ones."""
        return PlannedStep(self.named["token_ids"], self.named["query_starts"], self.columns(sequences))

    def planned_parts(self) -> list[PlannedStep]:
        """Return what the device completes: all sequences or, in a step with drafts, decodes and then prompts."""
        size = self.size
        if not size.has_drafts:
            return [self.planned()]
        tokens_T, starts_N1, decodes = self.planned(slice(size.num_decodes))
        parts = [PlannedStep(tokens_T[: size.num_decode_rows], starts_N1[: size.num_decodes + 2], decodes)]
        if size.num_prompts:
            prompts = self.columns(slice(size.first_prompt, None))
            parts.append(PlannedStep(tokens_T, starts_N1[size.first_prompt :], prompts))
        return parts

    def batch(
        self,
        block_tables: Sequence[Tensor],
        max_context: int,
        kernels: Kernels,
        tables: VerificationTables | None = None,
    ) -> DeviceBatch:
        """Return the step as a model computes it; its rows' positions and blocks are computed on the device.

        What it has on the host says how much room there is: it is for kernels that look there for numbers of programs,
        not for those that loop over sequences.

        Args:
            block_tables: as of ``HostBatch.block_tables``, with rows of all sequences.
            max_context: longest context of a sequence, in tokens.
            tables: made of the same integers; None: the step has no drafts.
        """
        size, named, planned = self.size, self.named, self.planned()
        columns = planned.columns
        num_single = 0 if size.has_drafts else size.num_decodes
        room = room_of(size.num_sequences - num_single, size.num_rows - num_single)
        lengths = HostLengths(
            (*range(num_single), *(num_single + row for row in room)) if size.has_filler else (),
            (min(TYPICAL_CONTEXT_TOKENS, max_context),) * size.num_sequences,
            is_padded=True,
        )
        rows, attention = address_rows(planned, block_tables, kernels, lengths, are_single=not size.has_filler)
        offsets_3T = named["picture_offsets"].view(3, -1) if size.takes_pictures else None
        whole = partial(
            StepBatch,
            named["token_ids"],
            rows.positions_T,
            num_single,
            num_single,
            rotary=rows.rotary_T,
            picture_offsets=offsets_3T,
        )
        short, most_rows = (slice(0, size.first_prompt), slice(0, size.num_decode_rows)), 1 + size.draft_tokens
        if tables is None:
            step = whole(attention=attention, recurrent=self._logged(columns))
        elif not size.num_prompts:
            attention = _part(attention, *short, most_rows)
            step = whole(attention=attention, recurrent=self._rerun(columns, tables, kernels))
        else:
            prompts = slice(size.first_prompt, size.num_sequences), slice(size.num_decode_rows, size.num_rows)
            parts = _part(attention, *short, most_rows), _part(attention, *prompts, None)
            src_N, dst_N = columns.state_src[prompts[0]], columns.state_dst[prompts[0]]
            step = whole(
                attention=replace(attention, parts=parts),
                recurrent=RecurrentBatch(src_N, dst_N, self._chunks()),
                verified=self._rerun(columns, tables, kernels),
                num_verified_rows=size.num_decode_rows,
            )
        tiled = TiledRows(*(named[name] for name in ADAPTER_COLUMNS)) if size.num_adapters else None
        # Tokens are chosen after all sequences but, with drafts, the last filler.
        chosen_after = self.planned(slice(-1)) if size.has_drafts else planned
        return DeviceBatch(step, chosen_after, self._stored(columns), tiled)

    def _stored(self, columns: SequenceColumns[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the rows whose hidden states are stored: of sequences' ends, before drafts, and of cuts."""
        size, named, stored = self.size, self.named, list[tuple[Tensor, Tensor]]()
        if size.has_drafts:
            stored.append((named["query_starts"][: size.num_decodes], columns.state_dst[: size.num_decodes]))
        if size.num_prompts or not size.has_drafts:
            ends = slice(size.first_prompt if size.has_drafts else 0, None)
            stored.append((columns.last_row[ends], columns.state_dst[ends]))
        if size.num_prompts:
            stored.append((named["cut_rows"], named["cut_slots"]))
        return stored

    def _logged(self, columns: SequenceColumns[Tensor]) -> RecurrentBatch:
        """Return decodes with logs of decoded tokens, and the chunks of prompts."""
        log_D, num_logged_D, num_folded_D = (
            column[: self.size.num_decodes] for column in (columns.log, columns.num_logged, columns.num_folded)
        )
        logs = LogBatch(log_D, num_logged_D, log_D, (), num_folded_D, ())
        return RecurrentBatch(columns.state_src, columns.state_dst, self._chunks(), logs)

    def _chunks(self) -> ChunkTable:
        """Return the chunks of prompts."""
        size = self.size
        # Most likely, the first prompt has most rows.
        num_full = -(-size.num_prompt_rows // CHUNK_TOKENS)
        first_chunks, any_chunk = (0, *(num_full,) * size.num_prompts), (1,) * size.num_chunks
        parts = [self.named[name] for name in ("first_chunks", "starts", "lengths", "cut_slots")]
        return Chunks(first_chunks, any_chunk, any_chunk, any_chunk).with_tensors(parts)

    def _rerun(self, columns: SequenceColumns[Tensor], tables: VerificationTables, kernels: Kernels) -> RecurrentBatch:
        """Return decodes with drafts, and the logged tokens before them."""
        size = self.size
        any_chunk = (1,) * size.num_verified_chunks
        first_chunks = (0,) * (size.first_prompt + 1)
        chunks = Chunks(first_chunks, any_chunk, any_chunk, any_chunk, is_short=True).with_tensors(
            [tables.first_chunks, tables.starts, tables.lengths, tables.cut_slots]
        )
        rerun = RerunBatch(
            size.num_rerun_rows,
            *(getattr(tables, name) for name in HostRerun._fields),
            insert_logged=kernels[insert_logged],
            is_padded=True,
            source_R=tables.source_rows,
            entry_R=tables.log_entries,
        )
        return RecurrentBatch(columns.state_src[: size.first_prompt], tables.state_dst, chunks, rerun=rerun)


def fill_buffer(size: StepSize, buffer_I: np.ndarray, host: HostBatch | None, results_address: int = 0) -> None:
    """Write a step that there is room for into a buffer of zeros.

    Args:
        host: None: without drafts, all integers of the step are zeros; with drafts, it has no sequence.
        results_address: memory on the host for what graphs store there.
    """
    named = named_parts(size, buffer_I)
    named["results_address"][:] = results_address
    if host is None:
        if not size.has_drafts:
            return
        host = build_host_batch([], 0)
    num_decodes, num_rows = host.num_decodes, host.num_decode_rows
    named["token_ids"][:num_rows] = host.token_ids_T[:num_rows]
    for name, column in zip(SequenceColumns._fields, host.columns, strict=True):
        named[name][:num_decodes] = column[:num_decodes]
        named[name][size.first_prompt :][: host.num_prompts] = column[num_decodes:]
    starts = named["query_starts"]
    if size.has_drafts:
        starts[: num_decodes + 1] = host.query_starts_N1[: num_decodes + 1]
        starts[num_decodes + 1 : size.first_prompt] = num_rows
        starts[size.first_prompt] = size.num_decode_rows
        named["end"][size.num_decodes] = size.num_decode_rows - num_rows
        named["verdicts"][: len(host.verdicts)] = host.verdicts
    else:
        starts[: size.num_decodes + 1] = np.arange(size.num_decodes + 1)
    if size.num_prompts:
        _fill_prompts(size, named, host)
    if host.picture_offsets is not None:
        offsets_3T, own_3T = named["picture_offsets"].reshape(3, -1), host.picture_offsets.reshape(3, -1)
        offsets_3T[:, :num_rows] = own_3T[:, :num_rows]
        offsets_3T[:, size.num_decode_rows :][:, : host.num_prompt_rows] = own_3T[:, num_rows:]

    if size.num_adapters:
        slots_T = np.full(size.num_rows, NO_SLOT)
        own_T = host.adapter_slots_T
        slots_T[:num_rows] = own_T[:num_rows]
        slots_T[size.num_decode_rows :][: len(own_T) - num_rows] = own_T[num_rows:]
        named["adapter_slots"].fill(NO_SLOT)
        for name, values in zip(ADAPTER_COLUMNS, tile_rows(slots_T), strict=True):
            named[name][: len(values)] = values


def _fill_prompts(size: StepSize, named: dict[str, np.ndarray], host: HostBatch) -> None:
    """Write the tokens of prompts, where these and their chunks begin, and the filler."""
    num_decodes, num_rows = host.num_decodes, host.num_prompt_rows
    num_prompts, num_free_rows = host.num_prompts, size.num_decode_rows - host.num_decode_rows
    named["token_ids"][size.num_decode_rows :][:num_rows] = host.token_ids_T[host.num_decode_rows :]
    if size.has_drafts:
        named["next_ids"][size.num_decode_rows :][:num_rows] = host.next_ids_T
    named["last_row"][size.first_prompt :][:num_prompts] += num_free_rows
    starts = named["query_starts"][size.first_prompt :]
    starts[: num_prompts + 1] = host.query_starts_N1[num_decodes:] + num_free_rows
    starts[num_prompts + 1 : -1] = size.num_decode_rows + num_rows
    starts[-1] = size.num_rows
    named["end"][-1] = size.num_prompt_rows - num_rows

    chunks = host.chunks
    num_chunks = len(chunks.starts)
    filler = np.arange(num_rows, size.num_prompt_rows, CHUNK_TOKENS)
    end = num_chunks + len(filler)
    named["first_chunks"][: num_prompts + 1] = chunks.first_chunks
    named["first_chunks"][num_prompts + 1 : -1] = num_chunks
    named["first_chunks"][-1] = end
    named["starts"][:num_chunks] = chunks.starts
    named["starts"][num_chunks:end] = filler
    named["starts"][end:] = size.num_prompt_rows
    named["lengths"][:num_chunks] = chunks.lengths
    named["lengths"][num_chunks:end] = np.minimum(size.num_prompt_rows - filler, CHUNK_TOKENS)
    named["cut_slots"][:num_chunks] = chunks.cut_slots
    named["cut_rows"][:num_chunks] = host.cut_rows_C + num_free_rows


def room_of(num_sequences: int, num_rows: int) -> tuple[int, ...]:
    """Return where sequences begin that have as many tiles of rows as there can be: each one's last tile may hold a
    single row.
    """
    return (*range(num_sequences), num_rows + num_sequences - 1)


def _part(whole: AttentionBatch, sequences: slice, rows: slice, most_rows: int | None) -> AttentionBatch:
    """Return a part of a padded step whose sequences and rows follow each other.

    Args:
        most_rows: maximum number of rows of a sequence, if all but the filler are short.
    """
    starts_N1 = whole.query_starts_N1[sequences.start : sequences.stop + 1]
    if rows.start:
        starts_N1 = starts_N1 - rows.start
    num_sequences = len(starts_N1) - 1
    return replace(
        whole,
        query_starts=room_of(num_sequences, rows.stop - rows.start),
        context_lens=whole.context_lens[sequences],
        query_starts_N1=starts_N1,
        context_lens_N=whole.context_lens_N[sequences],
        block_table_NM=whole.block_table_NM[sequences],
        write_blocks_T=whole.write_blocks_T[rows],
        write_offsets_T=whole.write_offsets_T[rows],
        most_rows=most_rows,
        is_padded=most_rows is None,
        gathers={},
        windowed=tuple(_part(each, sequences, rows, most_rows) for each in whole.windowed),
    )
