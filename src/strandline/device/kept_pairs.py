"""Pairs that the draft layer keeps behind a step that makes no drafts (``draft_layer.py``), for drafts in later steps.

The layer's keys and values of a pair depend on its hidden state and its token alone. So they are stored without
attention, and the host does not wait: the token that ends a sequence's last pair may be known on the device only.

Shape suffixes: X rows to choose from, T pairs, N sequences whose last token was just sampled, P tokens that the step
sampled, E hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.batch import block_tables
from strandline.device.draft_layer import is_resumed
from strandline.device.upload import upload_together
from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, RecurrentBatch, StepBatch
from strandline.kernels.chunk_table import plan_chunks
from strandline.models.layers.protocol import DraftingModel, ModelMemory
from strandline.records.plan import SequencePlan

SAMPLED = 0
"""Stands for a token that is on the device."""


class KeptRun(NamedTuple):
    """Consecutive pairs of one sequence."""

    sequence: SequencePlan
    start: int
    """Position of the first pair."""
    token_ids: tuple[int, ...]
    """The tokens after the positions."""
    first_row: int
    """Where the hidden state behind the first position is; the others follow."""
    kv_start: int
    """Pairs before this position are in shared blocks: not written."""
    ends_sampled: bool
    """Whether the last token was just sampled."""


def repeats_pair(sequence: SequencePlan) -> bool:
    """Whether a sequence makes the pair again that ends with its first token.

    It does behind a shared snapshot, unless that token is pending: then the step before has made the pair.
    """
    return is_resumed(sequence) and not sequence.pending


def runs_of(
    sequences: Sequence[SequencePlan], ends: Mapping[int, int], stored_row_of: Mapping[int, int]
) -> list[KeptRun]:
    """Return all pairs of a step.

    Args:
        ends: by place in the plan, where the hidden states of a sequence's rows end; of those that compute something.
        stored_row_of: by place in the plan, where the hidden state is from which a sequence resumes.
    """
    runs = list[KeptRun]()
    for index, sequence in enumerate(sequences):
        is_sampled, num_tokens = sequence.is_sampled, sequence.end - sequence.start
        is_whole_hit = num_tokens == 0
        tokens = (*sequence.token_ids, SAMPLED if is_sampled else sequence.next_id)
        if repeats_pair(sequence):
            runs.append(_repeated(sequence, tokens[0], stored_row_of[index], ends_sampled=is_whole_hit))
        if not is_whole_hit:
            first_row = ends[index] - num_tokens
            runs.append(KeptRun(sequence, sequence.start, tokens[1:], first_row, sequence.kv_start, is_sampled))
    return runs


def repeated_runs(sequences: Sequence[SequencePlan]) -> list[KeptRun]:
    """Return the pairs that end with the first tokens of sequences that compute something.

    The hidden states are, in this order, those from which the sequences resume.
    """
    return [_repeated(sequence, sequence.token_ids[0], row) for row, sequence in enumerate(sequences)]


def _repeated(sequence: SequencePlan, token: int, row: int, *, ends_sampled: bool = False) -> KeptRun:
    # The block that it resumes in is its own copy, unless it begins there.
    kv_start = sequence.kv_start - (sequence.kv_start % BLOCK_TOKENS > 0)
    return KeptRun(sequence, sequence.start - 1, (token,), row, kv_start, ends_sampled)


def keep_pairs(
    model: DraftingModel, memory: ModelMemory, runs: Sequence[KeptRun], hidden_XE: Tensor, sampled_P: Tensor
) -> None:
    """Store what the draft layer keeps of pairs. Does not wait for the device.

    Args:
        sampled_P: the tokens that were just sampled, in the order of the runs that end with them.
    """
    if not runs:
        return
    columns = upload_together(_columns(runs), hidden_XE.device)
    tokens_T, positions_T, blocks_T, offsets_T, rows_T, last_pairs_N = columns
    tokens_T.index_copy_(0, last_pairs_N, sampled_P[: len(last_pairs_N)].clamp_min(0))
    nothing = rows_T[:0]
    attention = AttentionBatch(
        (0,), (), nothing, nothing, nothing, write_blocks_T=blocks_T, write_offsets_T=offsets_T, is_all_written=False
    )
    chunks = plan_chunks([], [])
    recurrent = RecurrentBatch(nothing, nothing, chunks.with_tensors([nothing] * len(chunks.columns)))
    with torch.no_grad():
        batch = StepBatch(tokens_T, positions_T, 0, 0, attention, recurrent)
        model.keep_for_drafts(batch, hidden_XE.index_select(0, rows_T), memory)


def _columns(runs: Sequence[KeptRun]) -> list[np.ndarray]:
    """Return each pair's token, position, block, offset in it and row of its hidden state; and which end sampled."""
    tokens = [token for run in runs for token in run.token_ids]
    numbers_F4 = np.array([(run.start, len(run.token_ids), run.first_row, run.kv_start) for run in runs], np.int64)
    start, length, first_row, kv_start = numbers_F4.T
    ends = length.cumsum()
    run_T = np.repeat(np.arange(len(runs)), length)
    place_T = np.arange(len(tokens)) - (ends - length)[run_T]
    positions_T = start[run_T] + place_T
    tables = block_tables([run.sequence for run in runs], (-(-(start + length) // BLOCK_TOKENS)).tolist())
    blocks_T = tables[run_T, positions_T // BLOCK_TOKENS] * (positions_T >= kv_start[run_T])
    last_pairs = ends[[run.ends_sampled for run in runs]] - 1
    return [
        np.array(tokens, np.int64),
        positions_T,
        blocks_T,
        positions_T % BLOCK_TOKENS,
        first_row[run_T] + place_T,
        last_pairs,
    ]
