"""From a plan to the tensors of the step.

Decodes come first (``StepBatch``); every index tensor is made here, once per step, and shared by all layers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strandline.engine.plan import SequencePlan
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, StepBatch
from strandline.kernels.chunk_table import build_chunk_table


def is_decode(sequence: SequencePlan) -> bool:
    """Whether a sequence is computed by the decode kernels: one token, no cut."""
    return sequence.end - sequence.start == 1 and not sequence.cuts


def build_batch(sequences: Sequence[SequencePlan], num_decodes: int, device: torch.device) -> StepBatch:
    """Make the step's tensors.

    Args:
        sequences: decodes first, then prefills; each computes one token or more.
        num_decodes: how many of them are decodes.
    """
    starts = np.array([sequence.start for sequence in sequences])
    ends = np.array([sequence.end for sequence in sequences])
    lengths = ends - starts
    query_starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(sequences)), lengths)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
    tables = _block_tables(sequences, ends)
    kv_starts = np.array([sequence.kv_start for sequence in sequences])
    is_written = positions >= kv_starts[rows]

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    attention = AttentionBatch(
        query_starts=tuple(query_starts.tolist()),
        context_lens=tuple(ends.tolist()),
        query_starts_N1=tensor(query_starts),
        context_lens_N=tensor(ends),
        block_table_NM=tensor(tables, torch.int32),
        write_blocks_T=tensor(np.where(is_written, tables[rows, positions // BLOCK_TOKENS], NULL_BLOCK)),
        write_offsets_T=tensor(positions % BLOCK_TOKENS),
        is_all_written=bool(is_written.all()),
    )
    prefills = sequences[num_decodes:]
    src, dst, window_src, window_offset = (
        torch.tensor(column, dtype=torch.int64, device=device)
        for column in zip(*((s.state_src, s.state_dst, s.window_src, s.window_offset) for s in sequences), strict=True)
    )
    recurrent = RecurrentBatch(
        src_N=src,
        dst_N=dst,
        window_src_N=window_src,
        window_offset_N=window_offset,
        chunks=build_chunk_table([(s.start, s.end) for s in prefills], [s.cuts for s in prefills], device),
    )
    token_ids = [token for sequence in sequences for token in sequence.token_ids]
    return StepBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=tensor(positions),
        num_decodes=num_decodes,
        attention=attention,
        recurrent=recurrent,
    )


def _block_tables(sequences: Sequence[SequencePlan], ends: np.ndarray) -> np.ndarray:
    """Return the tables as far as the step reads them, int32 ``[N, M]``, padded with the null block."""
    num_blocks = -(-ends // BLOCK_TOKENS)
    tables = np.zeros((len(sequences), int(num_blocks.max())), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : num_blocks[row]] = np.frombuffer(sequence.block_table, dtype=np.int32)[: num_blocks[row]]
    return tables
