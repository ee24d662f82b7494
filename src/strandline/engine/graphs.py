"""Decode steps recorded once per batch size, and replayed: hundreds of launches become one.

A recorded step reads its inputs from fixed places. Rows beyond the step's own are *padding*: null slots, null blocks,
an empty context; their results are dropped. Operations that a step records must not ask the host for anything.

Shape suffixes as in ``kernels/batch.py``; F fields, R rows of the recorded size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from strandline.engine.batch import HostBatch
from strandline.engine.pending import PendingTokens
from strandline.engine.upload import upload
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import AttentionBatch, LayerMemory, LogBatch, RecurrentBatch, StepBatch
from strandline.kernels.chunk_table import Chunks
from strandline.kernels.sampling import greedy
from strandline.kernels.step import resolve_pending, store_hidden

FIELDS: Final = (
    *("token_ids", "positions", "write_blocks", "write_offsets", "context_lens"),
    *("src", "dst", "window_src", "window_offset", "log", "log_tokens"),
    *("pending", "source_rows", "stop_sets"),
)
WARM_UP_RUNS: Final = 2

Forward = Callable[[StepBatch, Sequence[LayerMemory]], Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to record: close together where a step is short, so that padding costs little."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class _Recorded:
    """One batch size: its inputs, the graph, its outputs."""

    def __init__(self, num_rows: int, block_table_NM: Tensor) -> None:
        device = block_table_NM.device
        self.num_rows = num_rows
        self.fields_FR = torch.zeros(len(FIELDS), num_rows, dtype=torch.int64, device=device)
        self.rows_R1 = torch.arange(num_rows + 1, dtype=torch.int64, device=device)
        self.block_table_NM = block_table_NM[:num_rows]
        self.graph = torch.cuda.CUDAGraph()
        self.hidden_RE = self.logits_RV = torch.empty(0)

    def batch(self) -> StepBatch:
        named = dict(zip(FIELDS, self.fields_FR, strict=True))
        attention = AttentionBatch(
            query_starts=(),
            context_lens=(),
            query_starts_N1=self.rows_R1,
            context_lens_N=named["context_lens"],
            block_table_NM=self.block_table_NM,
            write_blocks_T=named["write_blocks"],
            write_offsets_T=named["write_offsets"],
            is_all_written=False,
        )
        no_chunks = Chunks((0,), (), (), ()).with_tensors([self.rows_R1[:0]] * 4)
        slots = (named["src"], named["dst"], named["window_src"], named["window_offset"])
        log = named["log"]
        logs = LogBatch(log, named["log_tokens"], rows=log, lens=(), folds=())
        recurrent = RecurrentBatch(*slots, no_chunks, logs)
        return StepBatch(named["token_ids"], named["positions"], self.num_rows, attention, recurrent)


class DecodeGraphs:
    """Recorded decode steps of one model."""

    def __init__(
        self,
        forward: Forward,
        logits: Callable[[Tensor], Tensor],
        arena: ArenaTensors,
        pending: PendingTokens,
        *,
        sizes: Iterable[int],
        max_blocks: int,
        progress: bool = False,
    ) -> None:
        """Record.

        Args:
            max_blocks: of the longest request.
        """
        self._arena = arena
        self._pending = pending
        self._forward, self._logits = forward, logits
        device = arena.bytes.device
        self.sizes = sorted(sizes)
        self._block_table_NM = torch.zeros(self.sizes[-1], max_blocks, dtype=torch.int32, device=device)
        self._recorded: dict[int, _Recorded] = {}
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its scratch memory.
        for size in tqdm(self.sizes[::-1], desc="Recording decode steps", disable=not progress):
            recorded = self._recorded[size] = _Recorded(size, self._block_table_NM)
            for _ in range(WARM_UP_RUNS):
                self._step(recorded)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(recorded.graph, pool=pool):
                self._step(recorded)

    @property
    def max_rows(self) -> int:
        return self.sizes[-1]

    def _step(self, recorded: _Recorded) -> None:
        batch = recorded.batch()
        named = dict(zip(FIELDS, recorded.fields_FR, strict=True))
        resolve_pending(
            batch.token_ids_T,
            batch.recurrent.dst_N,
            recorded.rows_R1[:-1],
            named["pending"],
            named["source_rows"],
            self._pending.sampled_M,
            named["stop_sets"],
            self._pending.stop_ids_XI,
        )
        recorded.hidden_RE = self._forward(batch, self._arena.layers)
        store_hidden(recorded.hidden_RE, recorded.rows_R1[:-1], self._arena.hidden_SE, batch.recurrent.dst_N)
        recorded.logits_RV = self._logits(recorded.hidden_RE)
        self._pending.sampled_M[: recorded.num_rows].copy_(greedy(recorded.logits_RV))

    def run(self, host: HostBatch, source_rows: np.ndarray, stop_sets: np.ndarray) -> Tensor:
        """Replay a step of decodes; return ``logits_NV``, which the next replay overwrites.

        The likeliest token of each row is then in ``PendingTokens.sampled_M``.

        Args:
            source_rows, stop_sets: as ``PendingTokens.places`` returns them.
        """
        num_rows = host.num_sequences
        recorded = self._recorded[next(size for size in self.sizes if size >= num_rows)]
        pinned_FR = torch.zeros(len(FIELDS), recorded.num_rows, dtype=torch.int64, pin_memory=True)
        fields_FR = pinned_FR.numpy()
        columns = (
            *(host.token_ids_T, host.positions_T, host.write_blocks_T, host.write_offsets_T, host.context_lens_N),
            *(host.src_N, host.dst_N, host.window_src_N, host.window_offset_N),
            *(host.log_D, host.log_tokens_D),
            *(host.pending_N, source_rows, stop_sets),
        )
        for row, column in zip(fields_FR, columns, strict=True):
            row[:num_rows] = column
        device = self._arena.bytes.device
        recorded.fields_FR.copy_(pinned_FR, non_blocking=True)
        tables_NM = upload(host.block_table_NM, device)
        self._block_table_NM[:num_rows, : tables_NM.shape[1]].copy_(tables_NM)
        recorded.graph.replay()
        return recorded.logits_RV[:num_rows]
