"""Steps recorded once per size, and replayed: hundreds of launches become one.

Steps of decodes are recorded at a ladder of batch sizes, up to the likeliest tokens; small steps with prompts, which
the host takes longer to launch kernel by kernel than a GPU to run, at a ladder of rows beside some decodes, up to the
hidden states. A step is padded to the size that it is replayed at (``PaddedStep``). Operations that a step records must
not ask the host for anything.

Shape suffixes as in ``kernels/batch.py``; I integers of a buffer, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from strandline.device.batch import HostBatch
from strandline.device.padded_step import PaddedStep, StepSize
from strandline.device.pending import PendingTokens
from strandline.device.upload import upload, upload_together
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.sampling import greedy
from strandline.kernels.step import resolve_pending, store_hidden

PROMPT_ROWS: Final = (64, 128, 256, 512, 1024)
"""Beyond the last, a GPU takes longer to run a step than the host to launch it."""

DECODES_BESIDE_PROMPTS: Final = (0, 16, 64, 128)
"""And as many as there may be. Steps with fewer rows of prompts than of decodes are padded to as many."""

WARM_UP_RUNS: Final = 2

Forward = Callable[[StepBatch], Tensor]


def graph_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepSize]:
    """Return the sizes to record: close together where a step is short, so that padding costs little."""
    ladder = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, max_num_seqs, 32)]
    decodes = [*(count for count in ladder if count < max_num_seqs), max_num_seqs]
    beside = [*(count for count in DECODES_BESIDE_PROMPTS if count < max_num_seqs), max_num_seqs]
    rows = [count for count in PROMPT_ROWS if count < 2 * max_num_batched_tokens]
    mixed = [StepSize(count, num_rows) for count in beside for num_rows in rows if num_rows >= count]
    return [*map(StepSize, decodes), *mixed]


class _Recorded:
    """A step of one size: its inputs, the graph, its outputs."""

    def __init__(self, size: StepSize, block_table_NM: Tensor) -> None:
        device = block_table_NM.device
        self.padded = PaddedStep(size)
        self.buffer_I = torch.zeros(self.padded.num_integers, dtype=torch.int64, device=device)
        self.named = self.padded.named(self.buffer_I)
        self.block_table_NM = block_table_NM
        self.graph = torch.cuda.CUDAGraph()
        self.hidden_TE = self.last_NE = self.logits_NV = torch.empty(0)


class StepGraphs:
    """Recorded steps of one model."""

    def __init__(
        self,
        forward: Forward,
        logits: Callable[[Tensor], Tensor],
        arena: ArenaTensors,
        pending: PendingTokens,
        *,
        sizes: Iterable[StepSize],
        max_model_len: int,
        progress: bool = False,
    ) -> None:
        """Record.

        Args:
            max_model_len: of the longest request, in tokens.
        """
        self._arena = arena
        self._pending = pending
        self._forward, self._logits = forward, logits
        self._max_model_len = max_model_len
        self._tables: dict[int | None, Tensor] = {}
        device = arena.bytes.device
        by_rows = sorted(sizes, key=lambda size: (size.num_rows, size.num_decodes))
        self._most_decodes = max(size.num_decodes for size in by_rows)
        self._num_blocks = max(size.num_blocks(max_model_len) for size in by_rows)
        recorded = dict[StepSize, _Recorded]()
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its scratch memory.
        for size in tqdm(by_rows[::-1], desc="Recording steps", disable=not progress):
            step = recorded[size] = _Recorded(size, self._table(size))
            for _ in range(WARM_UP_RUNS):
                self._step(step)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(step.graph, pool=pool):
                self._step(step)
        self._decodes = [recorded[size] for size in by_rows if not size.num_prompt_rows]
        self._mixed = [recorded[size] for size in by_rows if size.num_prompt_rows]

    def _table(self, size: StepSize) -> Tensor:
        """Return zeroed ``block_table_NM``. Steps of decodes share one; so do all in which the filler has one place."""
        place = size.num_decodes if size.num_prompts else None
        if place not in self._tables:
            num_rows = size.num_sequences if size.num_prompts else self._most_decodes
            shape = (num_rows, self._num_blocks)
            self._tables[place] = torch.zeros(shape, dtype=torch.int32, device=self._arena.bytes.device)
        return self._tables[place][: size.num_sequences]

    def _step(self, recorded: _Recorded) -> None:
        named = recorded.named
        batch = recorded.padded.batch(recorded.buffer_I, recorded.block_table_NM, self._max_model_len)
        resolve_pending(
            batch.token_ids_T,
            batch.recurrent.dst_N,
            named["last_rows"],
            named["pending"],
            named["source_rows"],
            self._pending.sampled_M,
            named["stop_sets"],
            self._pending.stop_ids_XI,
        )
        hidden_TE = recorded.hidden_TE = self._forward(batch)
        store_hidden(hidden_TE, named["last_rows"], self._arena.hidden_SE, batch.recurrent.dst_N)
        if recorded.padded.size.num_prompts:
            store_hidden(hidden_TE, named["cut_rows"], self._arena.hidden_SE, named["cut_slots"])
            recorded.last_NE = hidden_TE.index_select(0, named["last_rows"])
        else:
            recorded.logits_NV = self._logits(hidden_TE)
            self._pending.sampled_M[: len(hidden_TE)].copy_(greedy(recorded.logits_NV))

    def decode(self, host: HostBatch, source_rows: np.ndarray, stop_sets: np.ndarray) -> Tensor | None:
        """Replay a step of decodes; return ``logits_NV``, which the next replay overwrites. None: none has room.

        The likeliest token of each row is then in ``PendingTokens.sampled_M``.

        Args:
            source_rows, stop_sets: as ``PendingTokens.places`` returns them.
        """
        recorded = _first_with_room(self._decodes, host)
        if recorded is None:
            return None
        self._replay(recorded, host, source_rows, stop_sets)
        return recorded.logits_NV[: host.num_sequences]

    def prefill(
        self, host: HostBatch, source_rows: np.ndarray, stop_sets: np.ndarray
    ) -> tuple[Tensor, Tensor, int] | None:
        """Replay a step with prompts. None: none has room.

        Returns:
            The final hidden states of all rows, which the next replay overwrites; the last one of each sequence,
            ``last_NE``; and how many rows lie between those of decodes and of prompts.
        """
        recorded = _first_with_room(self._mixed, host)
        if recorded is None:
            return None
        self._replay(recorded, host, source_rows, stop_sets)
        (places_N,) = upload_together([recorded.padded.places(host)], self._arena.bytes.device)
        gap = recorded.padded.size.num_decodes - host.num_decodes
        return recorded.hidden_TE, recorded.last_NE.index_select(0, places_N), gap

    def _replay(self, recorded: _Recorded, host: HostBatch, source_rows: np.ndarray, stop_sets: np.ndarray) -> None:
        padded, num_decodes = recorded.padded, host.num_decodes
        pinned_I = torch.zeros(padded.num_integers, dtype=torch.int64, pin_memory=True)
        padded.fill(pinned_I.numpy(), host, source_rows, stop_sets)
        recorded.buffer_I.copy_(pinned_I, non_blocking=True)
        tables_NM = upload(host.block_table_NM, self._arena.bytes.device)
        width = tables_NM.shape[1]
        for tables, place in ((tables_NM[:num_decodes], 0), (tables_NM[num_decodes:], padded.size.num_decodes)):
            if len(tables):
                recorded.block_table_NM[place : place + len(tables), :width].copy_(tables)
        recorded.graph.replay()


def _first_with_room(steps: Sequence[_Recorded], host: HostBatch) -> _Recorded | None:
    return next((step for step in steps if step.padded.size.has_room_for(host)), None)
