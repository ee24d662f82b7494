"""Choosing tokens where each rank has the logits of its own part of the vocabulary (``Ranks.columns``).

No rank sees all logits. For each row the ranks exchange a few numbers: the keys of their likeliest tokens; the sums of
their chunks, which determine the part and the place that a draw falls into; and, for a row with top-k, their ``top_k``
likeliest tokens, which include those of the whole vocabulary. So the ranks choose the token that a single rank would,
up to the rounding of sums.

Whole rows are gathered only where filters may leave any number of tokens: top-p and min-p without top-k, or with a
large one. A single rank has whole rows anyway.

Shape suffixes: as in ``sampling.py``; R ranks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from strandline.device.hardware.upload import upload
from strandline.ids import NO_TOKEN
from strandline.kernels.binding import Kernels
from strandline.kernels.operation import Operation
from strandline.kernels.ranks import Ranks
from strandline.kernels.sampling.sampling import (
    chunk_sums,
    draw,
    greedy,
    mask_top_k_top_p_min_p,
    sample,
    token_of_keys,
    top_candidates,
    top_keys,
    unpack_candidates,
)
from strandline.records.sampling_params import SamplingParams

SAMPLING_OPERATIONS: Final[tuple[Operation[..., Any], ...]] = (
    greedy,
    mask_top_k_top_p_min_p,
    sample,
    top_keys,
    token_of_keys,
    top_candidates,
    chunk_sums,
    draw,
)
"""What tokens are chosen with."""

NUM_CANDIDATES: Final = (64, 1024)
"""How many of a row's likeliest tokens each rank may send: the least that suffices for the step. Rows with a larger
top-k are gathered whole."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left of each row's tokens, and the number to draw by."""

    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    uniform_N: Tensor
    is_greedy_N: Tensor
    """Whether the row takes its likeliest token instead."""

    def __getitem__(self, row_N: Tensor) -> "Filters":
        """Return those of some rows."""
        return Filters(*(getattr(self, each.name)[row_N] for each in fields(self)))


def likeliest(logits_NP: Tensor, kernels: Kernels) -> Tensor:
    """Return each row's likeliest token, int64; of equals, the first. ``NO_TOKEN`` where no maximum is finite."""
    ranks = kernels.ranks
    if ranks.size == 1:
        return kernels[greedy](logits_NP)
    keys_NS = kernels[top_keys](logits_NP, ranks.rank * logits_NP.shape[1])
    return kernels[token_of_keys](ranks.gather(keys_NS))


def num_candidates(top_k: int, top_p: float, min_p: float) -> int | None:
    """Return how many of its likeliest tokens each rank must send, to draw by these filters.

    0: none, since all tokens are left. None: filters leave any number of tokens, and the row must be whole.
    """
    if top_k > 0:
        return next((num for num in NUM_CANDIDATES if top_k <= num), None)
    return 0 if top_p >= 1 and min_p <= 0 else None


def choose_rows(
    logits_NP: Tensor, params: Sequence[SamplingParams], filters: Filters | None, kernels: Kernels
) -> Tensor:
    """Return a token for each row, int64; ``NO_TOKEN`` where there can be none.

    Args:
        logits_NP: temperature applied; float32 unless ``filters`` is None.
        filters: filters of rows to draw from; None: all rows take their likeliest token.
    """
    if filters is None:
        return likeliest(logits_NP, kernels)
    if kernels.ranks.size == 1:
        greedy_N, drawn_N = kernels[greedy](logits_NP), _draw_from_whole(logits_NP, filters, kernels)
    else:
        nums = {row: num_candidates(p.top_k, p.top_p, p.min_p) for row, p in enumerate(params) if not p.is_greedy}
        greedy_N, drawn_N = _draw_from_parts(
            logits_NP, filters, {num for num in nums.values() if num is not None}, kernels
        )
        if rows := [row for row, num in nums.items() if num is None]:
            row_M = upload(np.array(rows), logits_NP.device)
            whole_MV = kernels.ranks.gather(logits_NP[row_M])
            drawn_N = drawn_N.index_copy(0, row_M, _draw_from_whole(whole_MV, filters[row_M], kernels))
    return torch.where(filters.is_greedy_N.bool() | (greedy_N == NO_TOKEN), greedy_N, drawn_N)


def _draw_from_whole(logits_NV: Tensor, filters: Filters, kernels: Kernels) -> Tensor:
    masked_NV = kernels[mask_top_k_top_p_min_p](logits_NV, filters.top_k_N, filters.top_p_N, filters.min_p_N)
    return kernels[sample](masked_NV, filters.uniform_N)


def _draw_from_parts(
    logits_NP: Tensor, filters: Filters, candidates: Collection[int], kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return each row's likeliest token and, where it is to be drawn, a drawn one.

    There is one exchange, and a second one where a row has no filter.

    Args:
        candidates: the numbers of candidates that rows need; 0 stands for rows without a filter.
    """
    ranks, first = kernels.ranks, kernels.ranks.rank * logits_NP.shape[1]
    is_any_unfiltered, num_sent = 0 in candidates, max(candidates, default=0)
    sent = [kernels[top_keys](logits_NP, first)]
    if is_any_unfiltered:
        sent.append(kernels[chunk_sums](logits_NP).view(torch.int64).flatten(1))
    if num_sent:
        sent.append(kernels[top_candidates](logits_NP, filters.top_k_N.clamp(1, num_sent), first, num_sent))
    keys_NS, *received = _exchange(sent, ranks)
    greedy_N = drawn_N = kernels[token_of_keys](keys_NS)
    if is_any_unfiltered:
        sums_N2S = received.pop(0).view(torch.float64)
        sums_N2S = sums_N2S.view(len(sums_N2S), ranks.size, 2, -1).transpose(1, 2).flatten(2)
        drawn_N = ranks.sum(kernels[draw](logits_NP, sums_N2S, filters.uniform_N, ranks.rank))
    if num_sent:
        token_NC, logit_NC = unpack_candidates(received[0])
        # Columns in the order of their tokens, as in a whole row.
        column_N1 = _draw_from_whole(logit_NC, filters, kernels).clamp_min(0).unsqueeze(-1)
        drawn_N = torch.where(filters.top_k_N > 0, token_NC.gather(-1, column_N1).squeeze(-1), drawn_N)
    return greedy_N, drawn_N


def _exchange(sent: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return all ranks' int64 matrices, each kind concatenated along its columns, by one all-gather."""
    all_NRC = ranks.gather(torch.cat(list(sent), dim=1)).view(len(sent[0]), ranks.size, -1)
    return [part_NRC.flatten(1) for part_NRC in all_NRC.split([part.shape[1] for part in sent], dim=2)]
