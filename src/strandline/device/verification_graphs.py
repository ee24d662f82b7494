"""CUDA graphs of steps that verify drafts: what makes such a step a few launches, and lets the host wait for it once.

A step is two graphs. The first completes what the host did not know yet (``complete_verification``), and runs the model
over certain tokens and drafts, up to the final hidden states. Then tokens are chosen behind all of them. The second
counts on the device which drafts agree, stores the hidden states behind certain tokens and drafts, and drafts for the
next step with the model's draft layer. So the next step may be launched before the host knows what this one found.

Shape suffixes as in ``kernels/batch.py`` and ``verification.py``; I integers of a buffer, E hidden size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from tqdm import tqdm

from strandline.device.batch import block_tables
from strandline.device.divided_sampling import likeliest
from strandline.device.graphs import Forward, Graph, capture
from strandline.device.padded_verification import PaddedVerification, VerificationSize, single_rows
from strandline.device.upload import UploadedTable, upload_together
from strandline.device.verification import Verified
from strandline.ids import NO_TOKEN
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import (
    AcceptedDrafts,
    LastVerification,
    VerificationTables,
    accept_drafts,
    complete_verification,
)
from strandline.kernels.step import store_hidden
from strandline.models.layers.protocol import DraftingModel, LanguageModel, ModelMemory
from strandline.records.plan import SequencePlan

BLOCK_ID_BYTES: Final = 4


class VerificationStep:
    """A step of one size: its inputs, the graphs, their outputs. The next replay overwrites all of them."""

    def __init__(self, size: VerificationSize, block_table: UploadedTable) -> None:
        device = block_table.table_NM.device
        self.padded = PaddedVerification(size)
        empty_I = torch.zeros(self.padded.num_integers, dtype=torch.int64)
        self.padded.fill(empty_I.numpy(), [])
        self.buffer_I = empty_I.to(device)
        self.named = self.padded.named(self.buffer_I)
        self.planned = self.padded.planned(self.buffer_I)
        self.block_table, self.block_table_NM = block_table, block_table.table_NM
        self.verifying: Graph
        self.drafting: Graph
        self.hidden_TE = torch.empty(0)
        self.batch: StepBatch
        """Set by the first graph; its tables lie in the graphs' memory."""
        self.tokens_T = torch.zeros(size.num_rows, dtype=torch.int64, device=device)
        """What was chosen behind every row; to be filled in between the graphs."""
        self.single_starts_N1 = torch.arange(size.num_sequences + 1, device=device)
        """Where rows begin in a step of one token of each sequence."""
        self.drafts_ND = torch.full((size.num_sequences, 0), NO_TOKEN, dtype=torch.int64, device=device)
        """For the next step; as many columns as the model drafts."""
        self.num_accepted_N = torch.zeros(size.num_sequences, dtype=torch.int64, device=device)


class VerificationGraphs:
    """CUDA graphs of one model's steps that verify drafts.

    Args:
        memory: what the model makes of the arena.
        stop_ids_XS: stop tokens, for ``stop_set``.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: ModelMemory,
        forward: Forward,
        arena: ArenaTensors,
        stop_ids_XS: Tensor,
        kernels: Kernels,
        *,
        sizes: Iterable[VerificationSize],
        max_model_len: int,
        progress: bool = False,
    ) -> None:
        """Capture."""
        self._model, self._memory, self._forward = model, memory, forward
        self._arena, self._kernels = arena, kernels
        self._stop_ids_XS = stop_ids_XS
        self._max_model_len = max_model_len
        device = arena.bytes.device
        by_rows = sorted(sizes, key=lambda size: (size.num_rows, size.num_sequences))
        most, deepest = max(size.num_sequences for size in by_rows), max(size.draft_tokens for size in by_rows)
        self._last = LastVerification.empty(most, deepest, device)
        num_blocks = max(size.num_blocks(max_model_len) for size in by_rows)
        tables = dict[int, UploadedTable]()
        captured = list[VerificationStep]()
        self._pool: Any = None
        # The largest first: the smaller ones then fit into its scratch memory.
        for size in tqdm(by_rows[::-1], desc="Capturing CUDA graphs of drafts", disable=not progress):
            # The filler's row of the table must stay zero.
            count = size.num_sequences + 1
            if count not in tables:
                tables[count] = UploadedTable((count, num_blocks), device)
            step = VerificationStep(size, tables[count])
            captured.append(step)
            step.verifying = self._captured(partial(self._verify, step))
            step.drafting = self._captured(partial(self._draft, step))
        self._steps = captured[::-1]

    def _captured(self, run: Callable[[], None]) -> Graph:
        """Return what does the same as a function, as often as it is replayed."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(run, self._pool, self._kernels)

    def _batch(self, step: VerificationStep, tables: VerificationTables) -> StepBatch:
        return step.padded.batch(step.buffer_I, tables, step.block_table_NM, self._max_model_len, self._kernels)

    def _verify(self, step: VerificationStep) -> None:
        complete = self._kernels[complete_verification]
        tables = complete(step.planned, self._last, self._stop_ids_XS, step.padded.size.log_tokens)
        step.batch = self._batch(step, tables)
        step.hidden_TE = self._forward(step.batch)

    def _draft(self, step: VerificationStep) -> None:
        accept = self._kernels[accept_drafts]
        accepted = accept(step.planned, step.tokens_T, self._last, self._stop_ids_XS, step.block_table_NM)
        step.num_accepted_N = accepted.num_accepted_N
        self._store_hidden(step)
        if self._memory.draft is not None:
            self._make_pairs(step, accepted)

    def _store_hidden(self, step: VerificationStep) -> None:
        """Store final hidden states: of certain tokens in slots, of all drafts in logs."""
        store, planned, replay = self._kernels[store_hidden], step.planned, step.batch.recurrent.replay
        first_rows_N = planned.query_starts[: len(planned.state_dst)]
        store(step.hidden_TE, first_rows_N, self._arena.hidden_SE, planned.state_dst)
        if self._arena.hidden_drafts_JE is not None and replay is not None:
            store(step.hidden_TE, replay.draft_rows_K, self._arena.hidden_drafts_JE, replay.draft_places_K)

    def _make_pairs(self, step: VerificationStep, accepted: AcceptedDrafts) -> None:
        """Make the pairs of all rows, and draft behind the last of each sequence (``draft_layer.py``).

        The layer's feed-forward part computes those last rows alone: it may be a mixture of experts. Pairs behind
        rejected drafts are made, too; the next step overwrites their keys and values.
        """
        model = cast(DraftingModel, self._model)
        batch = step.batch
        pairs = replace(batch, token_ids_T=accepted.next_tokens_T)
        hidden_NE = model.draft(pairs, step.hidden_TE, self._memory, accepted.last_row_N)
        drafts = list[Tensor]()
        for place in range(step.padded.size.draft_tokens):
            if drafts:
                single = single_rows(batch, accepted, place - 1, step.single_starts_N1, drafts[-1].clamp_min(0))
                hidden_NE = model.draft(single, hidden_NE, self._memory)
            drafts.append(likeliest(model.draft_logits(hidden_NE), self._kernels))
        if drafts:
            step.drafts_ND = torch.stack(drafts, dim=1)
            self._last.drafts_PD[: len(step.drafts_ND), : len(drafts)].copy_(step.drafts_ND)

    def take_sampled(self, tokens_P: Tensor) -> None:
        """Take what a step without drafts has sampled: the next step continues as if it had verified none."""
        self._last.tokens_P[: len(tokens_P)].copy_(tokens_P)
        self._last.num_accepted_P[: len(tokens_P)].zero_()

    def verify(
        self,
        sequences: Sequence[SequencePlan],
        source_rows: Sequence[int],
        stop_sets: Sequence[int],
        verdicts: Sequence[int] | None = None,
    ) -> VerificationStep | None:
        """Replay the first graph; None: none has room.

        Args:
            source_rows: each sequence's row in the last step that verified drafts, if its token is pending.
            stop_sets: which stop tokens may end each sequence.
            verdicts: a ``Verdict`` for each row; None: none is forced.
        """
        step = next((step for step in self._steps if step.padded.size.has_room_for(sequences)), None)
        if step is None:
            return None
        is_pinned = step.buffer_I.device.type == "cuda"
        pinned_I = torch.zeros(step.padded.num_integers, dtype=torch.int64, pin_memory=is_pinned)
        integers, count = pinned_I.numpy(), len(sequences)
        step.padded.fill(integers, sequences)
        step.padded.part(integers, "source_row")[:count] = source_rows
        step.padded.part(integers, "stop_set")[:count] = stop_sets
        if verdicts is not None:
            step.padded.part(integers, "verdicts")[: len(verdicts)] = verdicts
        step.buffer_I.copy_(pinned_I, non_blocking=True)
        # Whole tables: how far the step reads them may be unknown.
        num_blocks = [len(sequence.block_table) // BLOCK_ID_BYTES for sequence in sequences]
        step.block_table.write(block_tables(sequences, num_blocks))
        step.verifying.replay()
        return step

    @staticmethod
    def take_chosen(step: VerificationStep, verified: Sequence[Verified]) -> None:
        """Take over what the host has chosen and compared, before the second graph is replayed."""
        tokens = [
            token
            for sequence in verified
            for token in sequence.token_ids + [NO_TOKEN] * (sequence.num_rows - len(sequence.token_ids))
        ]
        num_accepted = [len(sequence.token_ids) - 1 for sequence in verified]
        tokens_T, num_accepted_N = upload_together([tokens, num_accepted], step.buffer_I.device)
        step.tokens_T[: len(tokens)].copy_(tokens_T)
        step.named["num_drafts"][: len(verified)].copy_(num_accepted_N)
