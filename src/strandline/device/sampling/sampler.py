"""Sampling of the next tokens of a step's rows, each by its own request's parameters.

A draw depends on the request's seed and the token's position alone, never on the batch around it or on what
happened before (preemption, forks), so it needs no state. Order, as in vLLM: log-probabilities are of the raw
logits; then bans and biases, penalties, grammars, temperature, min-p, top-k, top-p.

Each rank has the logits of its part of the vocabulary, and of each request's tokens counts those that lie there.

Shape suffixes: N rows, M those with penalties, P the rank's part of the vocabulary (``columns_of``).
"""

import logging
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.hardware.upload import download, upload, upload_together
from strandline.device.sampling.allowed_tokens import forbidden_mask
from strandline.device.sampling.divided_sampling import (
    Filters,
    draw_rows,
    likeliest,
    num_candidates,
)
from strandline.device.sampling.failures import catch_failure
from strandline.device.sampling.grammar_mask import GuardedMatcher, mask_logits
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
from strandline.records.failures import OUTPUT_FAILED
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.records.sampling_params import SamplingParams
from strandline.records.stop_strings import StopFinder

BANNED = float("-inf")
LOGGER: Final = logging.getLogger(__name__)


class SamplingState:
    """The sampler's state of one request: its parameters and its tokens so far.

    Args:
        columns: tokens whose logits this rank has.
        tokens_ahead: most tokens that are chosen before the matcher takes them (``num_tokens_ahead``).
    """

    def __init__(
        self,
        new: NewRequest,
        columns: range,
        device: torch.device,
        matcher: GuardedMatcher | None = None,
        stop_finder: StopFinder | None = None,
        tokens_ahead: int = 0,
    ) -> None:
        self.new = new
        self.matcher = matcher
        self.stop_finder = stop_finder
        self.stop_string: str | None = None
        """The stop string that the last token known to the host completes."""
        self.num_stop_tokens = 0
        """The last tokens known to the host that belong to a stop string, or may do so."""
        self.params = new.params
        self.output_ids: list[int] = []
        """Output tokens that the host has received."""
        self.num_sampled = 0
        """Number of sampled tokens; of a step whose tokens the host has not received yet, one."""
        self.num_verified = 0
        """Steps that verified drafts by chance."""
        self._tokens_ahead = tokens_ahead
        self._is_plain_greedy = _is_plain_greedy(new)
        self.has_bans_or_biases = bool(new.bad_words_ids or new.params.min_tokens or new.params.logit_bias)
        self.forbidden_P = forbidden_mask(new, columns, device)
        """Tokens that are not among those that the request allows; None: it allows all."""
        self.prompt_mask_P: Tensor | None = None
        self.output_counts_P: Tensor | None = None
        self._first_token = columns.start
        self.num_routed = 0
        """Tokens whose experts the host knows."""
        if new.params.has_penalties:
            held_ids = [token - columns.start for token in new.prompt_ids if token in columns]
            self.prompt_mask_P = torch.zeros(len(columns), dtype=torch.bool, device=device)
            self.prompt_mask_P.index_fill_(0, upload(np.array(held_ids, dtype=np.int64), device), 1)
            self.output_counts_P = torch.zeros(len(columns), dtype=torch.int64, device=device)

    @property
    def is_constrained(self) -> bool:
        """Whether a matcher chooses among the tokens that may come next."""
        return self.matcher is not None and self.matcher.num_free_tokens == 0

    @property
    def is_bound(self) -> bool:
        """Whether a matcher may have to choose one of the next tokens before it has taken those in flight."""
        return self.matcher is not None and self.matcher.num_free_tokens < self._tokens_ahead

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the likeliest one, whatever came before."""
        return self._is_plain_greedy and not self.is_constrained

    @property
    def is_independent(self) -> bool:
        """Whether the next tokens can be chosen together (``NewRequest.is_independent``)."""
        return self.new.is_independent and not self.is_bound

    @property
    def is_compared_on_device(self) -> bool:
        """Whether the device alone can tell which drafts agree, and whether one ends the request."""
        return self.is_independent and self.stop_finder is None

    @property
    def wants_hidden_state(self) -> bool:
        """Whether the hidden state from which the next token is sampled is to be returned: that of the prompt."""
        return self.new.params.returns_hidden_state and self.num_sampled == 0

    @property
    def position(self) -> int:
        """The position of the token to sample."""
        return len(self.new.prompt_ids) + self.num_sampled

    def count(self, token_1: Tensor) -> None:
        """Count a sampled token, which the host may not have received yet."""
        self.num_sampled += 1
        if self.output_counts_P is not None:
            last, column_1 = len(self.output_counts_P) - 1, token_1 - self._first_token
            is_held_1 = (column_1 >= 0) & (column_1 <= last)
            self.output_counts_P.index_add_(0, column_1.clamp(0, last), is_held_1.long())

    def append(self, token: int) -> None:
        """Append a token that the host has received."""
        self.output_ids.append(token)
        if self.matcher is not None:
            self.matcher.append(token)
        if self.stop_finder is not None:
            try:
                self.stop_string = self.stop_finder.append(token)
                self.num_stop_tokens = self.stop_finder.num_stop_tokens
            except Exception:  # the text part meets it at the same token, and ends the output with an error
                LOGGER.exception(OUTPUT_FAILED)
                self.stop_finder, self.stop_string, self.num_stop_tokens = None, None, 0

    @property
    def has_ended(self) -> bool:
        """Whether the last token known to the host is a stop token, or completes a stop string."""
        is_stop_token = self.new.stops_at(self.output_ids[-1], len(self.output_ids))
        return is_stop_token or self.stop_string is not None


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


class ChosenTokens(NamedTuple):
    """The tokens sampled for the rows of a step."""

    tokens_N: Tensor
    """int64, on the device; ``NO_TOKEN`` where none can be sampled."""
    logprobs: dict[int, LogprobTensors]
    """Log-probabilities by row, where requested."""
    failures: dict[int, str]
    """By row, why no token could be chosen for it: an exception concerned it alone."""


def choose_tokens(
    logits_NP: Tensor, states: Sequence[SamplingState], kernels: Kernels, greedy_N: Tensor | None = None
) -> ChosenTokens:
    """Sample one token per row, without waiting for the device.

    Args:
        logits_NP: may be overwritten.
        states: one per row; each counts its sampled token.
        greedy_N: the likeliest tokens, if they are known; may be overwritten.
    """
    failures: dict[int, str] = {}
    raw_logits = [(rows, _rows_of(logits_NP, rows)) for rows in _logprob_groups(states, kernels)]
    if all(state.is_plain_greedy for state in states):
        tokens_N = likeliest(logits_NP, kernels) if greedy_N is None else greedy_N
    else:
        tokens_N = _choose(logits_NP.float(), states, kernels, failures)
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
    for row, state in enumerate(states):
        state.count(tokens_N[row : row + 1])
    return ChosenTokens(tokens_N, logprobs, failures)


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


def _is_plain_greedy(new: NewRequest) -> bool:
    params = new.params
    has_extras = params.has_penalties or params.logit_bias or new.bad_words_ids or params.min_tokens
    has_extras = has_extras or params.structured_outputs is not None or params.allowed_token_ids is not None
    return params.is_greedy and not has_extras


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
        cls, states: Sequence[SamplingState], device: torch.device, changes: Sequence[tuple[int, int, float]] = ()
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
            [state.position for state in states],
        ]
        return cls(*upload_together(columns, device))


def _choose(logits_NP: Tensor, states: Sequence[SamplingState], kernels: Kernels, failures: dict[int, str]) -> Tensor:
    changes = _biases_and_bans(states, logits_NP.shape[1], kernels.ranks, failures)
    numbers = RowNumbers.of(states, logits_NP.device, changes)
    if changes:
        changed, values = (numbers.changed_rows, numbers.changed_columns), numbers.changes.float()
        logits_NP[changed] = torch.where(values == BANNED, values, logits_NP[changed] + values)
    for row, state in enumerate(states):
        if state.forbidden_P is not None:
            logits_NP[row].masked_fill_(state.forbidden_P, BANNED)
    _apply_penalties(logits_NP, states, numbers)
    constrained = [(row, state.matcher) for row, state in enumerate(states) if state.is_constrained]
    matchers = {row: matcher for row, matcher in constrained if matcher is not None}
    if matchers:
        mask_logits(logits_NP, list(matchers), list(matchers.values()), kernels.ranks)
        failures |= {row: matcher.error for row, matcher in matchers.items() if matcher.error is not None}
    return _draw(logits_NP, states, numbers, kernels)


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


def choose_independently(
    logits_NP: Tensor, states: Sequence[SamplingState], position_N: Tensor, kernels: Kernels
) -> Tensor:
    """Sample a token per row by temperature and masks alone; return int64, ``NO_TOKEN`` where none can be.

    Args:
        logits_NP: may be overwritten; float32 unless every state is greedy.
        states: one per row; nothing is counted.
        position_N: of the tokens to sample.
    """
    if all(state.params.is_greedy for state in states):
        return likeliest(logits_NP, kernels)
    numbers = RowNumbers.of(states, logits_NP.device)
    return _draw(logits_NP, states, numbers._replace(position_N=position_N), kernels)


def _draw(logits_NP: Tensor, states: Sequence[SamplingState], numbers: RowNumbers, kernels: Kernels) -> Tensor:
    """Sample a token per row by temperature and filters."""
    params = [state.params for state in states]
    if all(p.is_greedy for p in params):
        return likeliest(logits_NP, kernels)
    temperature_N, top_p_N, min_p_N = numbers.floats.float().view(3, -1)
    logits_NP = apply_temperature(logits_NP, temperature_N)
    filters = Filters(numbers.top_k_N, top_p_N, min_p_N, uniform_from_seed(numbers.seed_N, numbers.position_N))
    candidates = {row: num_candidates(p.top_k, p.top_p, p.min_p) for row, p in enumerate(params) if not p.is_greedy}
    greedy_N, drawn_N = draw_rows(logits_NP, filters, candidates, kernels)
    return torch.where(numbers.is_greedy_N.bool() | (greedy_N == NO_TOKEN), greedy_N, drawn_N)


def _banned(state: SamplingState) -> list[int]:
    banned: list[int] = []
    if state.num_sampled < state.params.min_tokens:
        banned.extend(state.new.stop_ids)
    for word in state.new.bad_words_ids:
        *head, last = word
        if not head or state.output_ids[-len(head) :] == head:
            banned.append(last)
    return banned


def _apply_penalties(logits_NP: Tensor, states: Sequence[SamplingState], numbers: RowNumbers) -> None:
    masks = [state.prompt_mask_P for state in states if state.prompt_mask_P is not None]
    if masks:
        counts = [state.output_counts_P for state in states if state.output_counts_P is not None]
        rows_MP = logits_NP[numbers.penalised_M]
        penalties = numbers.penalties.float().view(3, -1)
        logits_NP[numbers.penalised_M] = apply_penalties(rows_MP, torch.stack(masks), torch.stack(counts), *penalties)
