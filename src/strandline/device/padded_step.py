"""A step padded to a fixed size, so that a CUDA graph that was captured at that size can be replayed for it.

All integers of a step but the block tables lie in one buffer, so that one copy brings them to the device. Where a step
is smaller than the size,

- *decodes* read and write null slots and have an empty context;
- *prompts* are empty;
- unused rows of prompts belong to one more prompt, the *filler*, behind all others: it starts from zeros, attends to
  the null block, and is stored nowhere. So no row that a later operation reads is left unwritten;
- *chunks* are empty.

Shape suffixes as in ``kernels/batch.py``; D decodes, I integers of the buffer.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from strandline.device.batch import HostBatch, SequenceColumns
from strandline.device.upload import ALIGN_ITEMS
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, LogBatch, RecurrentBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import CHUNK_TOKENS, Chunks
from strandline.kernels.step import locate_rows

MAX_PROMPTS: Final = 15
"""Prompts of a padded step: sixteen sequences with the filler, as many as attention searches at once."""

SPARE_CHUNKS: Final = 48
"""Chunks beyond one per 64 rows: what cuts and the two ends of prompts add."""

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

    @property
    def num_prompts(self) -> int:
        """Prompts, the filler included."""
        return MAX_PROMPTS + 1 if self.num_prompt_rows else 0

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_decode_rows(self) -> int:
        """Rows of the decodes: one each."""
        return self.num_decodes

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + self.num_prompt_rows

    @property
    def num_chunks(self) -> int:
        return -(-self.num_prompt_rows // CHUNK_TOKENS) + SPARE_CHUNKS if self.num_prompt_rows else 0

    def num_blocks(self, max_model_len: int) -> int:
        """Return the columns of the step's block table: as many as the longest request has blocks, or the filler."""
        return -(-max(max_model_len, self.num_prompt_rows) // BLOCK_TOKENS)

    def has_room_for(self, host: HostBatch) -> bool:
        """Whether a step fits in. A step without prompts fits where there is no room for any, and only there."""
        num_prompts = host.num_prompts
        if host.replay is not None or (host.picture_offsets is not None and not self.takes_pictures):
            return False
        if host.num_decodes > self.num_decodes or (num_prompts == 0) != (self.num_prompts == 0):
            return False
        num_free_rows = self.num_prompt_rows - host.num_prompt_rows
        num_chunks = len(host.chunks.starts) + -(-num_free_rows // CHUNK_TOKENS)
        # One chunk stays empty: empty prompts begin there.
        return not num_prompts or (num_prompts <= MAX_PROMPTS and num_free_rows >= 0 and num_chunks < self.num_chunks)


class PaddedStep:
    """The places of a step of one size."""

    def __init__(self, size: StepSize) -> None:
        self.size = size
        lengths = {
            "token_ids": size.num_rows,
            **dict.fromkeys(SequenceColumns._fields, size.num_sequences),
            "query_starts": size.num_sequences + 1,
            "first_chunks": size.num_prompts + 1,
            **dict.fromkeys(("starts", "lengths", "cut_slots", "cut_rows"), size.num_chunks),
            "token_address": 0 if size.num_prompts else 1,
            "picture_offsets": 3 * size.num_rows if size.takes_pictures else 0,
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

    def columns(self, buffer_I: Tensor) -> SequenceColumns[Tensor]:
        """Return the parts of a buffer that hold an integer of every sequence."""
        return SequenceColumns(*(buffer_I[self._places[name]] for name in SequenceColumns._fields))

    def batch(self, buffer_I: Tensor, block_table_NM: Tensor, max_context: int, kernels: Kernels) -> StepBatch:
        """Return the step whose integers lie in a buffer; its rows' places are computed on the device.

        What it has on the host says how much room there is: it is for kernels that look there for numbers of programs,
        not for those that loop over sequences.

        Args:
            max_context: of any sequence, in tokens.
        """
        size, named, columns = self.size, self.named(buffer_I), self.columns(buffer_I)
        num_prompts = size.num_prompts
        # As many tiles of rows as there can be: each prompt's last one may hold a single row.
        most_rows = [*range(size.num_decodes + max(num_prompts, 1)), size.num_rows + max(num_prompts - 1, 0)]
        query_starts_N1 = named["query_starts"]
        ranges = (columns.start, columns.end, columns.kv_start, columns.rotary_delta)
        are_single = not num_prompts
        rows = kernels[locate_rows](query_starts_N1, *ranges, block_table_NM, size.num_rows, are_single=are_single)
        attention = AttentionBatch(
            query_starts=tuple(most_rows) if num_prompts else (),
            context_lens=(min(TYPICAL_CONTEXT_TOKENS, max_context),) * size.num_sequences,
            query_starts_N1=query_starts_N1,
            context_lens_N=columns.end,
            block_table_NM=block_table_NM,
            write_blocks_T=rows.write_blocks_T,
            write_offsets_T=rows.write_offsets_T,
            is_all_written=False,
            is_padded=True,
        )
        # Most likely, the first prompt has most rows.
        num_full = -(-size.num_prompt_rows // CHUNK_TOKENS)
        places, any_chunk = (0, *(num_full,) * num_prompts), (1,) * size.num_chunks
        parts = [named[name] for name in ("first_chunks", "starts", "lengths", "cut_slots")]
        chunks = Chunks(places, any_chunk, any_chunk, any_chunk).with_tensors(parts)
        log_D = columns.log[: size.num_decodes]
        num_logged_D, num_folded_D = columns.num_logged[: size.num_decodes], columns.num_folded[: size.num_decodes]
        logs = LogBatch(log_D, num_logged_D, log_D, (), num_folded_D, ())
        recurrent = RecurrentBatch(columns.state_src, columns.state_dst, chunks, logs)
        counts = (size.num_decodes, size.num_decode_rows)
        offsets_3T = named["picture_offsets"].view(3, -1) if size.takes_pictures else None
        return StepBatch(named["token_ids"], rows.positions_T, *counts, attention, recurrent, rows.rotary_T, offsets_3T)

    def fill(self, buffer_I: np.ndarray, host: HostBatch) -> None:
        """Write a step that there is room for into a buffer of zeros."""
        size, num_decodes, num_decode_rows = self.size, host.num_decodes, host.num_decode_rows
        named = {name: buffer_I[place] for name, place in self._places.items()}
        named["token_ids"][:num_decode_rows] = host.token_ids_T[:num_decode_rows]
        named["token_ids"][size.num_decode_rows :][: host.num_prompt_rows] = host.token_ids_T[num_decode_rows:]
        for name, column in zip(SequenceColumns._fields, host.columns, strict=True):
            named[name][:num_decodes] = column[:num_decodes]
            named[name][size.num_decodes :][: host.num_prompts] = column[num_decodes:]
        named["last_row"][size.num_decodes :][: host.num_prompts] += self.gap(host)
        named["query_starts"][: size.num_decodes + 1] = np.arange(size.num_decodes + 1)
        if size.num_prompts:
            self._fill_prompts(named, host)
        if host.picture_offsets is not None:
            offsets_3T, own_3T = named["picture_offsets"].reshape(3, -1), host.picture_offsets.reshape(3, -1)
            offsets_3T[:, :num_decode_rows] = own_3T[:, :num_decode_rows]
            offsets_3T[:, size.num_decode_rows :][:, : host.num_prompt_rows] = own_3T[:, num_decode_rows:]

    def gap(self, host: HostBatch) -> int:
        """Return how many free rows lie between those of decodes and of prompts."""
        return self.size.num_decode_rows - host.num_decode_rows

    def _fill_prompts(self, named: dict[str, np.ndarray], host: HostBatch) -> None:
        """Write where prompts and chunks begin, and the filler."""
        size, num_decodes, num_rows = self.size, host.num_decodes, host.num_prompt_rows
        num_prompts = host.num_prompts
        starts = named["query_starts"][size.num_decodes :]
        starts[: num_prompts + 1] = host.query_starts_N1[num_decodes:] + self.gap(host)
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
        named["cut_rows"][:num_chunks] = host.cut_rows_C + self.gap(host)
