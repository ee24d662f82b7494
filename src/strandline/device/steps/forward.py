"""The model's pass over a step, as it is launched and as it is captured.

Shape suffixes as in ``kernels/batch.py``; E hidden size.
"""

from torch import Tensor

from strandline.device.batches.batch import DeviceBatch
from strandline.device.steps.adapter_pool import AdapterPool
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
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

    def run(self, batch: DeviceBatch) -> Tensor:
        """Return the final hidden states; those of some rows are stored in slots, those of drafts in logs."""
        self._adapters.compute_with(batch.tiled)
        step, arena = batch.step, self.arena
        hidden_TE = self.model.forward(step, self._memory)
        for rows_N, slots_N in batch.stored:
            self._store(hidden_TE, rows_N, arena.hidden_SE, slots_N)
        rerun, num_before = (step.verified or step.recurrent).rerun, step.num_decode_rows
        if rerun is not None and arena.hidden_drafts_JE is not None:
            rows_K = rerun.draft_rows_K + num_before if num_before else rerun.draft_rows_K
            self._store(hidden_TE, rows_K, arena.hidden_drafts_JE, rerun.draft_entries_K)
        return hidden_TE
