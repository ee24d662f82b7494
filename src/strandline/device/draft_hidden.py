"""Final hidden states where sequences have drafts: a slot holds that of its last folded token, the log those of drafts.

So a slot into which accepted drafts are folded, as many as are wanted, gives the token after the last one.

Shape suffixes: X rows to choose from, N sequences, K drafts, E hidden size.
"""

from collections.abc import Sequence

from torch import Tensor

from strandline.device.upload import upload_together
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.binding import Kernels
from strandline.kernels.step import store_hidden
from strandline.records.actions import FoldLog
from strandline.records.plan import SequencePlan


def store_verified(
    arena: ArenaTensors, kernels: Kernels, sampled: Sequence[tuple[SequencePlan, int]], hidden_XE: Tensor
) -> None:
    """Store the hidden states of certain tokens in slots, and those of the drafts behind them in logs.

    Args:
        sampled: sequences, and where the hidden states of their certain tokens are; those of their drafts follow. What
            has no drafts is stored already.
    """
    certain = [(sequence, row) for sequence, row in sampled if sequence.num_drafts]
    if not certain:
        return
    drafts = [(sequence, row, place) for sequence, row in certain for place in range(sequence.num_drafts)]
    columns: list[list[int]] = [
        [row for _, row in certain],
        [sequence.state_dst for sequence, _ in certain],
        [row + 1 + place for _, row, place in drafts],
        [sequence.log * arena.draft_tokens + place for sequence, _, place in drafts],
    ]
    rows_N, slots_N, rows_K, places_K = upload_together(columns, hidden_XE.device)
    kernels[store_hidden](hidden_XE, rows_N, arena.hidden_SE, slots_N)
    if arena.hidden_drafts_JE is not None:
        kernels[store_hidden](hidden_XE, rows_K, arena.hidden_drafts_JE, places_K)


def fold_hidden(arena: ArenaTensors, kernels: Kernels, folds: Sequence[FoldLog]) -> None:
    """Store the hidden state of the last draft that each action folds in its slot."""
    if arena.hidden_drafts_JE is None:
        return
    places = [fold.log * arena.draft_tokens + fold.num_tokens - 1 for fold in folds]
    places_N, slots_N = upload_together([places, [fold.slot for fold in folds]], arena.bytes.device)
    kernels[store_hidden](arena.hidden_drafts_JE, places_N, arena.hidden_SE, slots_N)
