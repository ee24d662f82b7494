"""Drafts by the model's own draft layer (multi-token prediction), made after a step for the next one.

The layer works on pairs: the hidden state after a position and the token that follows it. Its keys and values of a pair
are stored at that position, and depend on these two alone. So a step makes the pairs of the tokens that it has
computed; the last one ends with the token that was just sampled, and gives the first draft. Further drafts come from
pairs of drafts, whose keys and values the next step overwrites.

A sequence that resumes after position ``p - 1`` makes that position's pair again, with its own next token: the snapshot
holds the hidden state. Where ``p`` is a multiple of the block size, the pair is in a shared block and ends with the
token that was next when it was published; one key of the draft layer may differ then, and no token of the output.

A step that makes no drafts stores its pairs without attention. The host never waits: the token that ends a sequence's
last pair may be known on the device only, and so are drafts.

Shape suffixes: X rows to choose from, T pairs, N sequences, F further drafts of a sequence, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from strandline.device.batches.batch import build_host_batch, to_device
from strandline.device.sampling.divided_sampling import likeliest
from strandline.device.steps.drafter import NextDrafts, StepRows, Verified
from strandline.ids import BLOCK_TOKENS, NO_TOKEN
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling.verification import AcceptedDrafts, LastStep
from strandline.models.layers.protocol import DraftingModel, ModelMemory
from strandline.records.plan import SequencePlan

SAMPLED = 0
"""Stands for a sampled token that is on the device."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs that a step makes of one sequence: consecutive ones."""

    index: int
    """The sequence's index in the plan."""
    plan: SequencePlan
    """Positions and, as ``token_ids``, the tokens after them."""
    first_row: int
    """The row of the hidden state after the first position that was computed; the others follow."""
    stored_row: int | None = None
    """The row of a stored hidden state, after the position before these; None: there is no such pair."""
    num_drafts: int = 0
    """Tokens to draft after the last pair."""
    is_open: bool = False
    """Whether the last pair ends with a sampled token that is on the device."""

    def rows(self) -> np.ndarray:
        """Return the row of the hidden state of each pair."""
        length = self.plan.end - self.plan.start
        if self.stored_row is None:
            return np.arange(self.first_row, self.first_row + length)
        return np.concatenate(([self.stored_row], np.arange(self.first_row, self.first_row + length - 1)))


def _pairs(index: int, rows: StepRows) -> Pairs | None:
    sequence, first_row = rows.sequences[index], rows.first_rows.get(index)
    sampled = (SAMPLED,) * sequence.is_sampled if rows.sampled is None else rows.sampled.get(index, ())
    after = tuple(token for token in sampled or (sequence.next_id,) if token != NO_TOKEN)
    tokens, start, kv_start = (*sequence.token_ids[: sequence.num_certain], *after), sequence.start, sequence.kv_start
    num_drafts, is_open = 0 if NO_TOKEN in sampled else sequence.next_drafts, sequence.is_sampled
    if first_row is None and sequence.end > sequence.start:
        tokens, num_drafts, is_open = tokens[:1], 0, False
    stored_row = rows.stored_rows[index] if sequence.reads_stored else None
    if stored_row is None:
        tokens = tokens[1:]
    else:
        # The block that it resumes in is its own copy, unless it begins there.
        start, kv_start = start - 1, kv_start - (kv_start % BLOCK_TOKENS > 0)
    if not tokens:
        return None
    plan = sequence.stateless(start, tokens, kv_start)
    return Pairs(index, plan, first_row or 0, stored_row, num_drafts, is_open and rows.sampled is None)


def pairs_of_step(rows: StepRows) -> list[Pairs]:
    """Return the pairs of all sequences of a step: of its computed rows, and those that are made again."""
    pairs = (_pairs(index, rows) for index in range(len(rows.sequences)))
    return [pair for pair in pairs if pair is not None]


def _further_plan(pair: Pairs, index: int) -> SequencePlan:
    """Return the pair of a draft, by its index; of a draft after which none is wanted, one that stores nothing."""
    last = pair.num_drafts - 2
    position = pair.plan.end + min(index, last)
    kv_start = pair.plan.kv_start if index <= last else position + 1
    return pair.plan.stateless(position, (SAMPLED,), kv_start)


def single_rows(
    batch: StepBatch, accepted: AcceptedDrafts, index: int, starts_N1: Tensor, token_N: Tensor
) -> StepBatch:
    """Return a step of one token of each sequence of another step but the filler, for layers without states.

    Args:
        index: index of the tokens among the drafts; the first is 0.
        starts_N1: the integers from 0 to the number of sequences.
    """
    num_sequences = len(token_N)
    attention = batch.attention
    return StepBatch(
        token_N,
        accepted.rotary_FN[index],
        num_sequences,
        num_sequences,
        replace(
            attention,
            query_starts=tuple(range(num_sequences + 1)),
            context_lens=attention.context_lens[:num_sequences],
            query_starts_N1=starts_N1,
            context_lens_N=accepted.context_lens_FN[index],
            block_table_NM=attention.block_table_NM[:num_sequences],
            write_blocks_T=accepted.write_blocks_FN[index],
            write_offsets_T=accepted.write_offsets_FN[index],
            most_rows=None,
            is_padded=False,
            parts=(),
        ),
        batch.recurrent,
    )


class DraftLayer:
    """A ``StepDrafter``: the draft layer of one model.

    Args:
        memory: an arena as bound by the model.
        last: takes what a step samples.
    """

    def __init__(self, model: DraftingModel, memory: ModelMemory, last: LastStep, kernels: Kernels) -> None:
        self._model, self._memory, self._last, self._kernels = model, memory, last, kernels

    keeps_pairs = True

    @torch.no_grad()
    def follow(self, rows: StepRows) -> NextDrafts | None:
        """Make pairs, and draft after those of sequences that want drafts."""
        pairs = sorted(pairs_of_step(rows), key=lambda pair: not pair.plan.is_decode)
        if not pairs:
            return None
        # Chunks are for attention, which only drafts need: without drafts, none are planned.
        num_single = sum(pair.plan.is_decode for pair in pairs) if any(p.num_drafts for p in pairs) else len(pairs)
        host = build_host_batch([pair.plan for pair in pairs], num_single)
        last_rows = list(zip(host.columns.last_row.tolist(), pairs, strict=True))
        drafting = [(row, pair) for row, pair in last_rows if pair.num_drafts]
        # What was sampled is in the order of the plan.
        ends = sorted((pair.index, row) for row, pair in last_rows if pair.is_open)
        hidden_rows = np.concatenate([pair.rows() for pair in pairs])
        others: list[Sequence[int] | np.ndarray] = [hidden_rows, [row for row, _ in drafting], [row for _, row in ends]]
        uploaded = to_device(host, rows.hidden_XE.device, self._kernels, others)
        batch, (rows_T, drafting_N, ends_N) = uploaded.step, uploaded.others
        batch.token_ids_T.index_copy_(0, ends_N, self._last.tokens_P[: len(ends)].clamp_min(0))
        hidden_TE = rows.hidden_XE.index_select(0, rows_T)
        if not drafting:
            self._model.keep_for_drafts(batch, hidden_TE, self._memory)
            return None

        def single(index: int, token_N: Tensor) -> StepBatch:
            plans = [_further_plan(pair, index) for _, pair in drafting]
            further = to_device(build_host_batch(plans, len(plans)), token_N.device, self._kernels)
            return replace(further.step, token_ids_T=token_N)

        num_drafts = max(pair.num_drafts for _, pair in drafting)
        tokens_ND = self._drafts(batch, hidden_TE, drafting_N, single, num_drafts)
        return NextDrafts({pair.index: row for row, (_, pair) in enumerate(drafting)}, tokens_ND)

    def keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Store keys and values of the pairs of decodes, each ending with the token that was sampled after it."""
        pairs = replace(batch, token_ids_T=self._last.tokens_P[: len(hidden_TE)].clamp_min(0))
        self._model.keep_for_drafts(pairs, hidden_TE, self._memory)

    def draft_verified(self, verified: Verified, num_drafts: int) -> Tensor:
        """Make the pairs of all rows of a padded step, and draft after the last of each sequence; return the drafts.

        The layer's feed-forward part computes those last rows alone: it may be a mixture of experts. Pairs after
        rejected drafts are made, too; the next step overwrites their keys and values.
        """
        batch, _, _, accepted, hidden_TE, starts_N1 = verified
        pairs = replace(batch, token_ids_T=accepted.next_tokens_T)

        def single(index: int, token_N: Tensor) -> StepBatch:
            return single_rows(batch, accepted, index, starts_N1, token_N)

        return self._drafts(pairs, hidden_TE, accepted.last_row_N, single, num_drafts)

    def _drafts(
        self,
        pairs: StepBatch,
        hidden_TE: Tensor,
        rows_N: Tensor,
        single: Callable[[int, Tensor], StepBatch],
        num_drafts: int,
    ) -> Tensor:
        """Make pairs, and draft one token after the other; return the drafts.

        Args:
            rows_N: rows of the pairs that are drafted after.
            single: returns the pairs of drafts by their index and tokens.
        """
        hidden_NE = self._model.draft(pairs, hidden_TE, self._memory, rows_N)
        drafts = [likeliest(self._model.draft_logits(hidden_NE), self._kernels)]
        for index in range(num_drafts - 1):
            hidden_NE = self._model.draft(single(index, drafts[-1].clamp_min(0)), hidden_NE, self._memory)
            drafts.append(likeliest(self._model.draft_logits(hidden_NE), self._kernels))
        return torch.stack(drafts, dim=1)
