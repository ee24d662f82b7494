"""The model's pass over a step, as it is launched and as it is captured.

Shape suffixes as in ``kernels/batch.py``; E hidden size.
"""

from torch import Tensor

from strandline.device.batches.batch import StoredRows
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.low_rank import TiledRows
from strandline.kernels.step import store_hidden
from strandline.models.layers.protocol import LanguageModel, ModelMemory


class Forward:
    """Runs a model, and stores the hidden states that sequences are resumed from.

    Args:
        memory: the arena as bound by the model.
    """

    def __init__(
        self, model: LanguageModel, memory: ModelMemory, arena: ArenaTensors, adapters: AdapterPool, kernels: Kernels
    ) -> None:
        self.model, self.arena, self.kernels = model, arena, kernels
        self._memory, self._adapters, self._store = memory, adapters, kernels[store_hidden]

    def run(self, batch: StepBatch, stored: StoredRows, tiled: TiledRows | None) -> Tensor:
        """Return the final hidden states; those of some rows are stored in slots, those of drafts in logs.

        Args:
            tiled: rows with adapters; None: no row has one.
        """
        self._adapters.compute_with(tiled)
        hidden_TE, arena = self.hidden(batch), self.arena
        for rows_N, slots_N in stored:
            self._store(hidden_TE, rows_N, arena.hidden_SE, slots_N)
        replay, num_before = (batch.verified or batch.recurrent).replay, batch.num_decode_rows
        if replay is not None and arena.hidden_drafts_JE is not None:
            rows_K = replay.draft_rows_K + num_before if num_before else replay.draft_rows_K
            self._store(hidden_TE, rows_K, arena.hidden_drafts_JE, replay.draft_places_K)
        return hidden_TE

    def hidden(self, batch: StepBatch) -> Tensor:
        """Return the final hidden states alone."""
        return self.model.forward(batch, self._memory)
