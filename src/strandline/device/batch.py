"""From a plan to the tensors of the step.

Decodes come first (``StepBatch``); every index tensor is made here, once per step, and shared by all layers.

Shape suffixes as in ``kernels/batch.py``; F fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strandline.device.upload import upload, upload_together
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.batch import AttentionBatch, LogBatch, RecurrentBatch, StepBatch
from strandline.kernels.chunk_table import Chunks, plan_chunks
from strandline.records.plan import SequencePlan


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The step's indices on the host; one-dimensional arrays are int64."""

    num_decodes: int
    token_ids_T: np.ndarray
    positions_T: np.ndarray
    write_blocks_T: np.ndarray
    write_offsets_T: np.ndarray
    query_starts_N1: np.ndarray
    context_lens_N: np.ndarray
    src_N: np.ndarray
    dst_N: np.ndarray
    pending_N: np.ndarray
    block_table_NM: np.ndarray
    """int32."""
    chunks: Chunks
    log_D: np.ndarray
    log_tokens_D: np.ndarray
    num_folded_D: np.ndarray

    @property
    def num_sequences(self) -> int:
        return len(self.dst_N)

    @property
    def num_prompt_rows(self) -> int:
        """Rows behind those of the decodes."""
        return len(self.token_ids_T) - self.num_decodes

    @property
    def has_pending(self) -> bool:
        return bool(self.pending_N.any())


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The step on the device, and the rows that the runner picks from it."""

    step: StepBatch
    last_rows_N: Tensor
    pending_N: Tensor


def build_host_batch(sequences: Sequence[SequencePlan], num_decodes: int) -> HostBatch:
    """Collect the step's indices.

    Args:
        sequences: decodes first, then prefills; each computes one token or more.
        num_decodes: how many of them are decodes.
    """
    columns = zip(
        *(
            (
                *(s.start, s.end, s.kv_start, s.state_src, s.state_dst),
                *(s.log, s.num_logged, s.num_folded),
            )
            for s in sequences
        ),
        strict=True,
    )
    starts, ends, kv_starts, src, dst, logs, num_logged, num_folded = np.array(list(columns), dtype=np.int64)
    lengths = ends - starts
    query_starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    if num_decodes == len(sequences):
        rows = np.arange(len(sequences))
        positions = starts
        token_ids = np.array([sequence.token_ids[0] for sequence in sequences], dtype=np.int64)
    else:
        rows = np.repeat(np.arange(len(sequences)), lengths)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
        token_ids = np.concatenate([np.asarray(sequence.token_ids, dtype=np.int64) for sequence in sequences])
    tables = _block_tables(sequences, ends)
    prefills = sequences[num_decodes:]
    return HostBatch(
        num_decodes=num_decodes,
        token_ids_T=token_ids,
        positions_T=positions,
        write_blocks_T=np.where(positions >= kv_starts[rows], tables[rows, positions // BLOCK_TOKENS], NULL_BLOCK),
        write_offsets_T=positions % BLOCK_TOKENS,
        query_starts_N1=query_starts,
        context_lens_N=ends,
        src_N=src,
        dst_N=dst,
        pending_N=np.array([sequence.pending for sequence in sequences], dtype=np.int64),
        block_table_NM=tables,
        chunks=plan_chunks([(s.start, s.end) for s in prefills], [s.cuts for s in prefills]),
        log_D=logs[:num_decodes],
        log_tokens_D=num_logged[:num_decodes],
        num_folded_D=num_folded[:num_decodes],
    )


def to_device(host: HostBatch, device: torch.device) -> DeviceBatch:
    """Make the step's tensors."""
    arrays = (
        *(host.token_ids_T, host.positions_T, host.write_blocks_T, host.write_offsets_T),
        *(host.query_starts_N1, host.context_lens_N),
        *(host.src_N, host.dst_N),
        *(host.query_starts_N1[1:] - 1, host.pending_N),
        *(np.array(column, dtype=np.int64) for column in host.chunks.columns),
    )
    tokens, positions, blocks, offsets, starts, lens, src, dst, last, pending, *chunks = upload_together(arrays, device)
    attention = AttentionBatch(
        query_starts=tuple(host.query_starts_N1.tolist()),
        context_lens=tuple(host.context_lens_N.tolist()),
        query_starts_N1=starts,
        context_lens_N=lens,
        block_table_NM=upload(host.block_table_NM, device),
        write_blocks_T=blocks,
        write_offsets_T=offsets,
        is_all_written=bool(host.write_blocks_T.all()),
    )
    log = _logs(host, device) if host.log_D.any() else None
    recurrent = RecurrentBatch(src, dst, host.chunks.with_tensors(chunks), log)
    return DeviceBatch(StepBatch(tokens, positions, host.num_decodes, attention, recurrent), last, pending)


def _logs(host: HostBatch, device: torch.device) -> LogBatch:
    first = int(host.log_D[0])
    counts_up = bool((host.log_D == np.arange(first, first + len(host.log_D))).all())
    log_D, len_D, num_folded_D = upload_together([host.log_D, host.log_tokens_D, host.num_folded_D], device)
    return LogBatch(
        log_D,
        len_D,
        slice(first, first + len(host.log_D)) if counts_up else log_D,
        tuple(host.log_tokens_D.tolist()),
        num_folded_D,
        tuple(host.num_folded_D.tolist()),
    )


def _block_tables(sequences: Sequence[SequencePlan], ends: np.ndarray) -> np.ndarray:
    """Return the tables as far as the step reads them, int32 ``[N, M]``, padded with the null block."""
    num_blocks = (-(-ends // BLOCK_TOKENS)).tolist()
    tables = np.zeros((len(sequences), max(num_blocks)), dtype=np.int32)
    for row, (sequence, count) in enumerate(zip(sequences, num_blocks, strict=True)):
        tables[row, :count] = np.frombuffer(sequence.block_table, dtype=np.int32, count=count)
    return tables
