"""Drafts by the model's own draft layer (multi-token prediction), made behind a step for the next one.

The layer works on pairs: the hidden state behind a position and the token after it. What it keeps of a pair lies at
that position. So a step makes the pairs of the tokens that it has computed; the last one ends with the token that was
just sampled, and gives the first draft. Further drafts come from pairs of drafts, whose keys and values the next step
overwrites.

A sequence that resumes behind position ``p - 1`` makes that position's pair again, with its own next token: the hidden
state lies in the snapshot. Where ``p`` is a multiple of the block size, the pair is in a shared block and keeps the
token that was next when it was published; one key of the draft layer may differ then, and no token of the output.

A step that makes no drafts keeps the pairs alone: of decodes as here, of prompts as ``kept_pairs.py`` describes.

Shape suffixes: X rows to choose from, T pairs, N sequences, P tokens that the step sampled, E hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strandline.device.batch import build_host_batch, to_device
from strandline.device.divided_sampling import likeliest
from strandline.device.upload import upload_together
from strandline.ids import BLOCK_TOKENS, NO_TOKEN, NULL_LOG, PendingToken
from strandline.kernels.batch import StepBatch
from strandline.kernels.binding import Kernels
from strandline.models.layers.protocol import DraftingModel, ModelMemory
from strandline.records.plan import SequencePlan


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs that a step makes of one sequence."""

    index: int
    """The sequence's place in the plan."""
    plan: SequencePlan
    """Positions and, as ``token_ids``, the tokens after them."""
    hidden_rows: tuple[int, ...]
    """Where the hidden states behind the positions are."""
    num_drafts: int
    """Tokens to draft behind the last pair."""


def is_resumed(sequence: SequencePlan) -> bool:
    """Whether a sequence reads a shared snapshot: its last pair is made again, then."""
    return not sequence.has_own_state


def pairs_of(
    index: int, sequence: SequencePlan, sampled: Sequence[int], first_row: int, stored_row: int | None
) -> Pairs | None:
    """Return the pairs of a sequence; None: there are none.

    Args:
        index: the sequence's place in the plan.
        sampled: tokens that were sampled behind its certain ones; none: the token after these is ``next_id``.
        first_row: of the sequence's hidden states.
        stored_row: of the hidden state that it resumes from; None: it does not resume.
    """
    is_over = NO_TOKEN in sampled
    certain = sequence.token_ids[: len(sequence.token_ids) - sequence.num_drafts]
    after = tuple(token for token in sampled or (sequence.next_id,) if token != NO_TOKEN)
    tokens, start, kv_start = (*certain, *after), sequence.start, sequence.kv_start
    rows: tuple[int, ...] = tuple(range(first_row, first_row + len(tokens) - 1))
    if stored_row is None:
        tokens = tokens[1:]
    else:
        start, rows = start - 1, (stored_row, *rows)
        kv_start -= kv_start % BLOCK_TOKENS > 0
    if not tokens:
        return None
    return Pairs(index, _pair_plan(sequence, start, tokens, kv_start), rows, 0 if is_over else sequence.next_drafts)


def pairs_of_step(
    sequences: Sequence[SequencePlan],
    sampled: Mapping[int, Sequence[int]],
    ends: Mapping[int, int],
    stored_row_of: Mapping[int, int],
) -> list[Pairs]:
    """Return the pairs of all sequences of a step.

    Args:
        sampled: by place in the plan, tokens that were sampled behind the certain ones.
        ends: where the hidden states of a sequence's rows end; of those that compute something.
        stored_row_of: where the hidden state is from which a sequence resumes.
    """
    pairs = [
        pairs_of(
            index,
            sequence,
            sampled.get(index, ()),
            ends.get(index, 0) - (sequence.end - sequence.start),
            # The step before has made the pair that a pending token ends.
            None if sequence.pending else stored_row_of.get(index),
        )
        for index, sequence in enumerate(sequences)
    ]
    return [pair for pair in pairs if pair is not None]


def keep_decoded(
    model: DraftingModel, memory: ModelMemory, batch: StepBatch, hidden_TE: Tensor, sampled_P: Tensor
) -> None:
    """Make the pairs of decodes, each ending with the token that was sampled behind it."""
    pairs = replace(batch, token_ids_T=sampled_P[: len(hidden_TE)].clamp_min(0))
    model.keep_for_drafts(pairs, hidden_TE, memory)


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
    )


def make_drafts(
    model: DraftingModel, memory: ModelMemory, kernels: Kernels, pairs: Sequence[Pairs], hidden_XE: Tensor
) -> dict[int, tuple[int, ...]]:
    """Make the pairs; return the drafts of sequences by their places in the plan. Waits for the device."""
    drafts: dict[int, list[int]] = {}
    while pairs:
        ordered = sorted(pairs, key=lambda pair: not pair.plan.is_decode)
        hidden_TE, last_rows = _run(model, memory, kernels, ordered, hidden_XE)
        wanted = [place for place, pair in enumerate(ordered) if pair.num_drafts]
        if not wanted:
            break
        (rows_N,) = upload_together([[last_rows[place] for place in wanted]], hidden_TE.device)
        hidden_XE = hidden_TE[rows_N]
        tokens = likeliest(model.draft_logits(hidden_XE), kernels).tolist()
        pairs = []
        for row, (place, token) in enumerate(zip(wanted, tokens, strict=True)):
            pair = ordered[place]
            if token == NO_TOKEN:
                continue
            drafts.setdefault(pair.index, []).append(token)
            if pair.num_drafts > 1:
                plan = _pair_plan(pair.plan, pair.plan.end, (token,), pair.plan.kv_start)
                pairs.append(replace(pair, plan=plan, hidden_rows=(row,), num_drafts=pair.num_drafts - 1))
    return {index: tuple(tokens) for index, tokens in drafts.items()}


def _run(
    model: DraftingModel, memory: ModelMemory, kernels: Kernels, ordered: Sequence[Pairs], hidden_XE: Tensor
) -> tuple[Tensor, list[int]]:
    """Run the draft layer; return its hidden states and each sequence's last row."""
    num_decodes = sum(pair.plan.is_decode for pair in ordered)
    host = build_host_batch([pair.plan for pair in ordered], num_decodes)
    batch = to_device(host, hidden_XE.device, kernels)
    (rows_T,) = upload_together([[row for pair in ordered for row in pair.hidden_rows]], hidden_XE.device)
    with torch.no_grad():
        return model.draft(batch.step, hidden_XE[rows_T], memory), host.columns.last_row.tolist()
