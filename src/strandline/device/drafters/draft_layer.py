"""Drafts by the model's own draft layer (multi-token prediction), made after a step for the next one.

The layer works on pairs: the hidden state after a position and the token that follows it. Its keys and values of a pair
are stored at that position, and depend on these two alone. So a step makes the pairs of the tokens that it has
computed; the last one ends with the token that was just sampled, and gives the first draft. Further drafts come from
pairs of drafts, whose keys and values the next step overwrites.

A sequence that resumes after position ``p - 1`` makes that position's pair again, with its own next token: the snapshot
holds the hidden state. Where ``p`` is a multiple of the block size, the pair is in a shared block and ends with the
token that was next when it was published; one key of the draft layer may differ then, and no token of the output.

A step that makes no drafts stores its pairs without attention, and the host does not wait: the token that ends a
sequence's last pair may be known on the device only.

Shape suffixes: X rows to choose from, T pairs, N sequences, E hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from strandline.device.batches.batch import block_tables, build_host_batch, to_device
from strandline.device.batches.padded_step import single_rows
from strandline.device.batches.picture_rows import place_pictures
from strandline.device.hardware.upload import upload_together
from strandline.device.sampling.divided_sampling import likeliest
from strandline.device.steps.drafter import Drafts, StepRows, Verified
from strandline.device.steps.host_step import reads_stored
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_LOG, PendingToken
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, StepBatch
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import plan_chunks
from strandline.kernels.sampling.verification import LastStep
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

    def rows(self) -> np.ndarray:
        """Return the row of the hidden state of each pair."""
        length = self.plan.end - self.plan.start
        if self.stored_row is None:
            return np.arange(self.first_row, self.first_row + length)
        return np.concatenate(([self.stored_row], np.arange(self.first_row, self.first_row + length - 1)))


def _pairs(
    index: int, sequence: SequencePlan, sampled: Sequence[int], first_row: int, stored_row: int | None
) -> Pairs | None:
    is_over = NO_TOKEN in sampled
    certain = sequence.token_ids[: sequence.num_certain]
    after = tuple(token for token in sampled or (sequence.next_id,) if token != NO_TOKEN)
    tokens, start, kv_start = (*certain, *after), sequence.start, sequence.kv_start
    if stored_row is None:
        tokens = tokens[1:]
    else:
        # The block that it resumes in is its own copy, unless it begins there.
        start, kv_start = start - 1, kv_start - (kv_start % BLOCK_TOKENS > 0)
    if not tokens:
        return None
    plan = _pair_plan(sequence, start, tokens, kv_start)
    return Pairs(index, plan, first_row, stored_row, 0 if is_over else sequence.next_drafts)


def pairs_of_step(
    sequences: Sequence[SequencePlan],
    sampled: Mapping[int, Sequence[int]] | None,
    first_rows: Mapping[int, int],
    stored_row_of: Mapping[int, int],
) -> list[Pairs]:
    """Return the pairs of all sequences of a step.

    Args:
        sampled: by index in the plan, tokens that were sampled after the certain ones; None: they are on the device,
            one of each sequence that is sampled.
        first_rows: by index, the row of a sequence's first hidden state; of those that compute something.
        stored_row_of: by index, the row of the hidden state from which a sequence resumes.
    """
    pairs = [
        _pairs(
            index,
            sequence,
            ((SAMPLED,) if sequence.is_sampled else ()) if sampled is None else sampled.get(index, ()),
            first_rows.get(index, 0),
            stored_row_of[index] if reads_stored(sequence) else None,
        )
        for index, sequence in enumerate(sequences)
    ]
    return [pair for pair in pairs if pair is not None]


def repeated_pairs(sequences: Sequence[SequencePlan], stored_row_of: Mapping[int, int]) -> list[Pairs]:
    """Return the pairs that end with the first tokens of sequences that compute something, and none after these.

    Args:
        stored_row_of: by index in the plan, the row of the hidden state from which a sequence resumes.
    """
    pairs = list[Pairs | None]()
    for index, row in stored_row_of.items():
        plan = sequences[index]
        hit = plan._replace(end=plan.start, token_ids=(), num_drafts=0, is_sampled=False, next_id=plan.token_ids[0])
        pairs.append(_pairs(index, hit, (), 0, row))
    return [each for each in pairs if each is not None]


def _pair_plan(sequence: SequencePlan, start: int, tokens: tuple[int, ...], kv_start: int) -> SequencePlan:
    return sequence._replace(
        start=start,
        end=start + len(tokens),
        token_ids=tokens,
        kv_start=kv_start,
        cuts=(),
        pending=PendingToken.NONE,
        is_prefill=False,
        log=NULL_LOG,
        num_logged=0,
        num_drafts=0,
        window_blocks=b"",
    )


def _columns(pairs: Sequence[Pairs]) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return columns of pairs, and what ``place_pictures`` returns of them.

    Returns:
        Each pair's token, position, block, offset in it and row of its hidden state; which end sampled; and each one's
        position for rotary embeddings, in text.
    """
    plans = [each.plan for each in pairs]
    fields = [(plan.start, plan.end, plan.kv_start, plan.rotary_delta) for plan in plans]
    start, end, kv_start, delta_N = np.array(fields, np.int64).T
    offsets = place_pictures(plans, delta_N)
    length = end - start
    last_pairs = length.cumsum() - 1
    run_T = np.repeat(np.arange(len(pairs)), length)
    positions_T = np.arange(len(run_T)) + (end - 1 - last_pairs)[run_T]
    tables = block_tables(plans, (-(-end // BLOCK_TOKENS)).tolist())
    columns = [
        np.array([token for plan in plans for token in plan.token_ids], np.int64),
        positions_T,
        tables[run_T, positions_T // BLOCK_TOKENS] * (positions_T >= kv_start[run_T]),
        positions_T % BLOCK_TOKENS,
        np.concatenate([each.rows() for each in pairs]),
        last_pairs[[plan.is_sampled for plan in plans]],
        positions_T + delta_N[run_T],
    ]
    return columns, offsets


class DraftLayer:
    """A ``StepDrafter``: the draft layer of one model.

    Args:
        memory: an arena as bound by the model.
        last: takes what a step samples.
    """

    def __init__(self, model: DraftingModel, memory: ModelMemory, last: LastStep, kernels: Kernels) -> None:
        self._model, self._memory, self._last, self._kernels = model, memory, last, kernels

    keeps_pairs = True

    def keep_resumed(self, rows: StepRows) -> None:
        """Store the pairs that end with the first tokens of sequences that resume."""
        self.keep_pairs(repeated_pairs(rows.sequences, rows.stored_rows), rows.hidden_XE)

    def keep(self, rows: StepRows) -> None:
        """Store the pairs of a step that drafts nothing."""
        self.keep_pairs(pairs_of_step(rows.sequences, None, rows.first_rows, rows.stored_rows), rows.hidden_XE)

    @torch.no_grad()
    def keep_pairs(self, pairs: Sequence[Pairs], hidden_XE: Tensor) -> None:
        """Store keys and values of pairs. Does not wait for the device.

        What the last step sampled is in the order of the pairs that end with it.
        """
        if not pairs:
            return
        columns, offsets = _columns(pairs)
        on_device = upload_together([*columns, () if offsets is None else offsets], hidden_XE.device)
        tokens_T, positions_T, blocks_T, offsets_T, rows_T, last_pairs_N, rotary_T, picture_offsets = on_device
        tokens_T.index_copy_(0, last_pairs_N, self._last.tokens_P[: len(last_pairs_N)].clamp_min(0))
        nothing = rows_T[:0]
        attention = AttentionBatch(
            (0,),
            (),
            nothing,
            nothing,
            nothing,
            write_blocks_T=blocks_T,
            write_offsets_T=offsets_T,
            is_all_written=False,
        )
        chunks = plan_chunks([], [])
        recurrent = RecurrentBatch(nothing, nothing, chunks.with_tensors([nothing] * len(chunks.columns)))
        offsets_3T = None if offsets is None else picture_offsets.view(3, -1)
        batch = StepBatch(tokens_T, positions_T, 0, 0, attention, recurrent, rotary_T, offsets_3T)
        self._model.keep_for_drafts(batch, hidden_XE.index_select(0, rows_T), self._memory)

    def keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Store keys and values of the pairs of decodes, each ending with the token that was sampled after it."""
        pairs = replace(batch, token_ids_T=self._last.tokens_P[: len(hidden_TE)].clamp_min(0))
        self._model.keep_for_drafts(pairs, hidden_TE, self._memory)

    def draft(self, rows: StepRows, sampled: Mapping[int, Sequence[int]]) -> Drafts:
        """Make pairs; return the drafts of sequences by their indices in the plan."""
        pairs, hidden_XE = pairs_of_step(rows.sequences, sampled, rows.first_rows, rows.stored_rows), rows.hidden_XE
        drafts: dict[int, list[int]] = {}
        while pairs:
            ordered = sorted(pairs, key=lambda pair: not pair.plan.is_decode)
            hidden_TE, last_rows = self._run(ordered, hidden_XE)
            wanted = [index for index, pair in enumerate(ordered) if pair.num_drafts]
            if not wanted:
                break
            (rows_N,) = upload_together([[last_rows[index] for index in wanted]], hidden_TE.device)
            hidden_XE = hidden_TE[rows_N]
            tokens = likeliest(self._model.draft_logits(hidden_XE), self._kernels).tolist()
            pairs = []
            for row, (index, token) in enumerate(zip(wanted, tokens, strict=True)):
                pair = ordered[index]
                if token == NO_TOKEN:
                    continue
                drafts.setdefault(pair.index, []).append(token)
                if pair.num_drafts > 1:
                    plan = _pair_plan(pair.plan, pair.plan.end, (token,), pair.plan.kv_start)
                    pairs.append(Pairs(pair.index, plan, row, num_drafts=pair.num_drafts - 1))
        return {index: tuple(tokens) for index, tokens in drafts.items()}

    @torch.no_grad()
    def _run(self, ordered: Sequence[Pairs], hidden_XE: Tensor) -> tuple[Tensor, list[int]]:
        """Run the layer; return its hidden states and each sequence's last row."""
        num_decodes = sum(pair.plan.is_decode for pair in ordered)
        host = build_host_batch([pair.plan for pair in ordered], num_decodes)
        batch = to_device(host, hidden_XE.device, self._kernels)
        (rows_T,) = upload_together([np.concatenate([pair.rows() for pair in ordered])], hidden_XE.device)
        return self._model.draft(batch.step, hidden_XE[rows_T], self._memory), host.columns.last_row.tolist()

    def draft_verified(self, verified: Verified, num_drafts: int) -> Tensor:
        """Make the pairs of all rows of a padded step, and draft after the last of each sequence; return the drafts.

        The layer's feed-forward part computes those last rows alone: it may be a mixture of experts. Pairs after
        rejected drafts are made, too; the next step overwrites their keys and values.
        """
        batch, _, _, accepted, hidden_TE, starts_N1 = verified
        pairs = replace(batch, token_ids_T=accepted.next_tokens_T)
        hidden_NE = self._model.draft(pairs, hidden_TE, self._memory, accepted.last_row_N)
        drafts = list[Tensor]()
        for index in range(num_drafts):
            if drafts:
                single = single_rows(batch, accepted, index - 1, starts_N1, drafts[-1].clamp_min(0))
                hidden_NE = self._model.draft(single, hidden_NE, self._memory)
            drafts.append(likeliest(self._model.draft_logits(hidden_NE), self._kernels))
        return torch.stack(drafts, dim=1)
