"""Sampling of the next tokens of a step's rows, each by its own request's parameters.

A draw depends on the request's seed and the token's position alone, never on the batch around it or on what
happened before (preemption, forks), so it needs no state. Order, as in vLLM: log-probabilities are of the raw
logits; then bans and biases, penalties, grammars, temperature, min-p, top-k, top-p.

Each rank has the logits of its part of the vocabulary, and of each request's tokens counts those that lie there.

Shape suffixes: N rows, M those with penalties, P the rank's part of the vocabulary (``columns_of``).
"""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.hardware.upload import download, upload, upload_together
from strandline.device.sampling.divided_sampling import Filters, choose_rows
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.grammar_mask import mask_logits
from strandline.device.sampling.sampling_state import SamplingState
from strandline.ids import NO_TOKEN
from strandline.kernels.binding import Kernels
from strandline.kernels.ranks import Ranks
from strandline.kernels.sampling.sampling import (
    apply_penalties,
    apply_temperature,
    gather_logprobs,
    logprobs_of,
    uniform_from_seed,
)
from strandline.records.plan import TokenLogprobs
from strandline.records.sampling_params import SamplingParams

BANNED: Final = float("-inf")


class LogprobTensors:
    """Log-probabilities of some rows' tokens and of those reported with them, being copied to the host."""

    def __init__(self, parts: Sequence[Tensor], num_reported: Sequence[int]) -> None:
        """
        Args:
            parts: tokens, and what ``gather_logprobs`` returns of them, on their way to the host; then the ranks of
                the reported tokens, unless these are the likeliest.
            num_reported: per row, how many tokens are reported.
        """
        self._num_reported, self._parts = num_reported, parts

    @classmethod
    def of(cls, logits_NP: Tensor, tokens_N: Tensor, num_top: Sequence[int], ranks: Ranks) -> "LogprobTensors":
        """Work them out from raw logits; report each row's likeliest tokens."""
        parts = gather_logprobs(logits_NP, tokens_N, max(num_top, default=0), ranks)
        return cls([download(part) for part in (tokens_N, *parts)], num_top)

    @classmethod
    def of_ids(
        cls, logits_NP: Tensor, tokens_N: Tensor, ids: Sequence[Collection[int]], ranks: Ranks
    ) -> "LogprobTensors":
        """Work them out from raw logits; report the given tokens of each row."""
        counts = [len(row) for row in ids]
        padded = np.array([[*row, *[0] * (max(counts) - len(row))] for row in ids], dtype=np.int64)
        ids_NK = upload(padded, logits_NP.device)
        logprob_NK, rank_NK = logprobs_of(logits_NP, torch.cat((tokens_N.unsqueeze(-1), ids_NK), dim=1), ranks)
        parts = (tokens_N, logprob_NK[:, 0], rank_NK[:, 0], ids_NK, logprob_NK[:, 1:], rank_NK[:, 1:])
        return cls([download(part.contiguous()) for part in parts], counts)

    def split(self) -> "list[LogprobTensors]":
        """Return those of each row."""
        parts = zip(*(part.split(1) for part in self._parts), strict=True)
        return [LogprobTensors(part, [count]) for part, count in zip(parts, self._num_reported, strict=True)]

    def read(self) -> list[TokenLogprobs]:
        """Return them; the device must be done."""
        *columns, ids_NK, reported_NK = (part.tolist() for part in self._parts[:5])
        if len(self._parts) > 5:
            ranks_NK = self._parts[5].tolist()
        else:
            ranks_NK = [range(1, count + 1) for count in self._num_reported]
        reported = zip(ids_NK, reported_NK, ranks_NK, strict=True)
        return [
            TokenLogprobs(*token, *(tuple(part[:count]) for part in row))
            for *token, row, count in zip(*columns, reported, self._num_reported, strict=True)
        ]


class SampledRows(NamedTuple):
    """The tokens sampled for the rows of a step."""

    tokens_N: Tensor
    """int64, on the device; ``NO_TOKEN`` where none can be sampled."""
    logprobs: dict[int, LogprobTensors]
    """Log-probabilities by row, where requested."""
    failures: dict[int, str]
    """By row, why no token could be chosen for it: an exception concerned it alone."""


def sample_rows(
    logits_NP: Tensor,
    states: Sequence[SamplingState],
    kernels: Kernels,
    *,
    position_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
) -> SampledRows:
    """Sample one token per row, without waiting for the device or counting the tokens.

    Args:
        logits_NP: may be overwritten.
        states: one per row. Several rows may have the same one, if it is independent of what is chosen before: those of
            consecutive tokens.
        position_N: positions of the tokens to sample; None: the states know them.
        greedy_N: the likeliest tokens, if they are known; may be overwritten.
    """
    failures: dict[int, str] = {}
    raw_logits = [(rows, _rows_of(logits_NP, rows)) for rows in _logprob_groups(states, kernels)]
    filters, are_plain = None, all(state.is_plain_greedy for state in states)
    if not are_plain:
        logits_NP, filters = _prepare(logits_NP.float(), states, position_N, kernels, failures)
    if are_plain and greedy_N is not None:
        tokens_N = greedy_N
    else:
        tokens_N = choose_rows(logits_NP, [state.params for state in states], filters, kernels)
    logprobs: dict[int, LogprobTensors] = {}
    for rows, logits_MP in raw_logits:
        failed: dict[None, str] = {}
        with catch_failure(failed, None):
            params = [states[row].params for row in rows]
            tensors = _logprobs(logits_MP, _rows_of(tokens_N, rows), params, kernels.ranks)
            logprobs |= dict(zip(rows, tensors.split(), strict=True))
        failures |= {row: text for text in failed.values() for row in rows}
    if failures:
        tokens_N[list(failures)] = NO_TOKEN
    return SampledRows(tokens_N, logprobs, failures)


def _logprob_groups(states: Sequence[SamplingState], kernels: Kernels) -> list[list[int]]:
    """Return the rows whose log-probabilities are wanted, grouped as they are computed together.

    That is all of them where ranks talk about them, those with given tokens apart, and else each for itself: so an
    exception concerns one alone, and the bits of a deterministic engine depend on no other row.
    """
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if kernels.ranks.size == 1 or kernels.workload.is_deterministic:
        return [[row] for row in rows]
    with_ids = [row for row in rows if states[row].params.logprob_token_ids is not None]
    return [group for group in ([row for row in rows if row not in with_ids], with_ids) if group]


def _logprobs(logits_NP: Tensor, tokens_N: Tensor, params: Sequence[SamplingParams], ranks: Ranks) -> LogprobTensors:
    """Work out the log-probabilities of a group of rows, which all have given tokens to report, or none has."""
    ids = [p.logprob_token_ids for p in params if p.logprob_token_ids is not None]
    if ids:
        return LogprobTensors.of_ids(logits_NP, tokens_N, ids, ranks)
    return LogprobTensors.of(logits_NP, tokens_N, [p.logprobs or 0 for p in params], ranks)


def _rows_of(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows."""
    return torch.cat([x[row : row + 1] for row in rows])


class RowNumbers(NamedTuple):
    """What tokens of rows are chosen by, on the device: int64 and float64, from one copy."""

    changed_rows: Tensor
    changed_columns: Tensor
    changes: Tensor
    """What is added to single logits: biases, and minus infinity for banned tokens."""
    penalised_M: Tensor
    """Rows with penalties."""
    penalties: Tensor
    """Factors for repetition of these rows, then summands for presence, then for frequency."""
    floats: Tensor
    """Temperatures of all rows, then top-p, then min-p."""
    top_k_N: Tensor
    seed_N: Tensor
    is_greedy_N: Tensor
    position_N: Tensor
    """Positions of the tokens, as far as the host knows them."""

    @classmethod
    def of(
        cls, states: Sequence[SamplingState], device: torch.device, changes: Sequence[tuple[int, int, float]]
    ) -> "RowNumbers":
        """Collect them, given rows, columns and values of changes."""
        params = [state.params for state in states]
        penalised = [row for row, state in enumerate(states) if state.prompt_mask_P is not None]
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        floats = [1.0 if p.is_greedy else p.temperature for p in params]
        floats += [p.top_p for p in params] + [p.min_p for p in params]
        columns: list[Sequence[int] | np.ndarray] = [
            [row for row, _, _ in changes],
            [column for _, column, _ in changes],
            np.array([value for _, _, value in changes], dtype=np.float64),
            penalised,
            np.array([getattr(params[row], name) for name in names for row in penalised], dtype=np.float64),
            np.array(floats, dtype=np.float64),
            [max(p.top_k, 0) for p in params],
            [state.new.seed for state in states],
            [p.is_greedy for p in params],
            [state.position + row for _, rows in groupby(states, id) for row, state in enumerate(rows)],
        ]
        return cls(*upload_together(columns, device))


def _prepare(
    logits_NP: Tensor,
    states: Sequence[SamplingState],
    position_N: Tensor | None,
    kernels: Kernels,
    failures: dict[int, str],
) -> tuple[Tensor, Filters | None]:
    """Return the logits to choose by, and the filters of rows to draw from; None: all rows take the likeliest token."""
    changes = _biases_and_bans(states, logits_NP.shape[1], kernels.ranks, failures)
    numbers = RowNumbers.of(states, logits_NP.device, changes)
    if any(state.is_adjusted for state in states):
        _adjust(logits_NP, states, numbers, kernels, failures)
    if all(state.params.is_greedy for state in states):
        return logits_NP, None
    temperature_N, top_p_N, min_p_N = numbers.floats.float().view(3, -1)
    uniform_N = uniform_from_seed(numbers.seed_N, numbers.position_N if position_N is None else position_N)
    filters = Filters(numbers.top_k_N, top_p_N, min_p_N, uniform_N, numbers.is_greedy_N)
    return apply_temperature(logits_NP, temperature_N), filters


def _biases_and_bans(
    states: Sequence[SamplingState], num_columns: int, ranks: Ranks, failures: dict[int, str]
) -> list[tuple[int, int, float]]:
    """Return row, column and value of what requests add to logits of this rank, each logit once."""
    first, changes = ranks.rank * num_columns, list[tuple[int, int, float]]()
    for row, state in enumerate(states):
        if state.has_bans_or_biases:
            with catch_failure(failures, row):
                own = {**(state.params.logit_bias or {}), **dict.fromkeys(_banned(state), BANNED)}
                columns = ((token - first, value) for token, value in own.items())
                changes += [(row, column, value) for column, value in columns if 0 <= column < num_columns]
    return changes


def _banned(state: SamplingState) -> list[int]:
    banned: list[int] = []
    if state.num_sampled < state.params.min_tokens:
        banned.extend(state.new.stop_ids)
    for word in state.new.bad_words_ids:
        *head, last = word
        if not head or state.output_ids[-len(head) :] == head:
            banned.append(last)
    return banned


def _adjust(
    logits_NP: Tensor,
    states: Sequence[SamplingState],
    numbers: RowNumbers,
    kernels: Kernels,
    failures: dict[int, str],
) -> None:
    """Apply bans, biases, penalties and grammars in place."""
    if len(numbers.changes):
        changed, values = (numbers.changed_rows, numbers.changed_columns), numbers.changes.float()
        logits_NP[changed] = torch.where(values == BANNED, values, logits_NP[changed] + values)
    for row, state in enumerate(states):
        if state.forbidden_P is not None:
            logits_NP[row].masked_fill_(state.forbidden_P, BANNED)
    masks = [state.prompt_mask_P for state in states if state.prompt_mask_P is not None]
    if masks:
        counts = [state.output_counts_P for state in states if state.output_counts_P is not None]
        rows_MP = logits_NP[numbers.penalised_M]
        penalties = numbers.penalties.float().view(3, -1)
        logits_NP[numbers.penalised_M] = apply_penalties(rows_MP, torch.stack(masks), torch.stack(counts), *penalties)
    constrained = [(row, state.matcher) for row, state in enumerate(states) if state.is_constrained]
    matchers = {row: matcher for row, matcher in constrained if matcher is not None}
    if matchers:
        mask_logits(logits_NP, list(matchers), list(matchers.values()), kernels.ranks)
        failures |= {row: matcher.error for row, matcher in matchers.items() if matcher.error is not None}
