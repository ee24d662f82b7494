"""Choosing the next tokens of a step's rows, each by its own request's parameters.

A draw depends on the request's seed and the token's position alone, never on the batch around it or on what
happened before (preemption, forks), so it needs no state. Order, as in vLLM: log-probabilities are of the raw
logits; then bans and biases, penalties, grammars, temperature, min-p, top-k, top-p.

Shape suffixes: N rows, V vocabulary.
"""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strandline.device.failures import catch_failure
from strandline.device.grammar_mask import GuardedMatcher, mask_logits
from strandline.device.upload import download, upload
from strandline.ids import NO_TOKEN
from strandline.kernels.binding import Kernels
from strandline.kernels.sampling import (
    apply_penalties,
    apply_temperature,
    gather_logprobs,
    greedy,
    mask_top_k_top_p_min_p,
    sample,
    uniform_from_seed,
)
from strandline.records.failures import OUTPUT_FAILED
from strandline.records.plan import NewRequest, TokenLogprobs
from strandline.records.stop_strings import StopFinder

BANNED = float("-inf")
LOGGER: Final = logging.getLogger(__name__)


class SamplingState:
    """The sampler's state of one request: its parameters and its tokens so far."""

    def __init__(
        self,
        new: NewRequest,
        vocab_size: int,
        device: torch.device,
        matcher: GuardedMatcher | None = None,
        stop_finder: StopFinder | None = None,
    ) -> None:
        self.new = new
        self.matcher = matcher
        self.stop_finder = stop_finder
        self.stop_string: str | None = None
        """The stop string that the last token known to the host completes."""
        self.params = new.params
        self.output_ids: list[int] = []
        """As far as the host knows them."""
        self.num_sampled = 0
        """Tokens sampled, those included that the host does not know yet."""
        self.num_verified = 0
        """Steps that verified drafts by chance."""
        self.is_plain_greedy = _is_plain_greedy(new)
        self.has_bans_or_biases = bool(new.bad_words_ids or new.params.min_tokens or new.params.logit_bias)
        self.is_independent = new.is_independent
        self.prompt_mask_V: Tensor | None = None
        self.output_counts_V: Tensor | None = None
        if new.params.has_penalties:
            self.prompt_mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.prompt_mask_V.index_fill_(0, upload(np.array(new.prompt_ids, dtype=np.int64), device), 1)
            self.output_counts_V = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    @property
    def position(self) -> int:
        """The position of the token to sample."""
        return len(self.new.prompt_ids) + self.num_sampled

    def count(self, token_1: Tensor) -> None:
        """Count a sampled token, which the host need not know yet."""
        self.num_sampled += 1
        if self.output_counts_V is not None:
            self.output_counts_V.index_add_(0, token_1.clamp_min(0), torch.ones_like(token_1))

    def append(self, token: int) -> None:
        """Append a token that the host knows now."""
        self.output_ids.append(token)
        if self.matcher is not None:
            self.matcher.append(token)
        if self.stop_finder is not None:
            try:
                self.stop_string = self.stop_finder.append(token)
            except Exception:  # the text part meets it at the same token, and ends the output with an error
                LOGGER.exception(OUTPUT_FAILED)
                self.stop_finder = self.stop_string = None

    @property
    def has_ended(self) -> bool:
        """Whether the last token known to the host is a stop token, or completes a stop string."""
        is_stop_token = self.new.stops_at(self.output_ids[-1], len(self.output_ids))
        return is_stop_token or self.stop_string is not None


class LogprobTensors:
    """Log-probabilities of some rows' tokens and of their likeliest, being copied to the host."""

    def __init__(self, logits_NV: Tensor, tokens_N: Tensor, num_top: Sequence[int]) -> None:
        """
        Args:
            logits_NV: raw.
            num_top: per row, how many of the likeliest are asked for.
        """
        self._num_top = num_top
        parts = gather_logprobs(logits_NV, tokens_N, max(num_top, default=0))
        self._parts = [download(part) for part in (tokens_N, *parts)]

    def read(self) -> list[TokenLogprobs]:
        """Return them; the device must be done."""
        tokens, logprob_N, rank_N, ids_NK, top_NK = (part.tolist() for part in self._parts)
        return [
            TokenLogprobs(
                tokens[row], logprob_N[row], rank_N[row], tuple(ids_NK[row][:count]), tuple(top_NK[row][:count])
            )
            for row, count in enumerate(self._num_top)
        ]


class ChosenTokens(NamedTuple):
    """What was sampled for the rows of a step."""

    tokens_N: Tensor
    """int64, on the device; ``NO_TOKEN`` where none can be sampled."""
    logprobs: dict[int, LogprobTensors]
    """By row, where asked for."""
    failures: dict[int, str]
    """By row, why no token could be chosen for it: an exception concerned it alone."""

    @staticmethod
    def of_rows(parts: "Sequence[ChosenTokens]") -> "ChosenTokens":
        """Return what was sampled for rows, one at a time."""
        return ChosenTokens(
            torch.cat([part.tokens_N for part in parts]),
            {row: tensors for row, part in enumerate(parts) for tensors in part.logprobs.values()},
            {row: text for row, part in enumerate(parts) for text in part.failures.values()},
        )


def choose_tokens(
    logits_NV: Tensor, states: Sequence[SamplingState], kernels: Kernels, greedy_N: Tensor | None = None
) -> ChosenTokens:
    """Sample one token per row, without waiting for the device.

    Args:
        logits_NV: may be overwritten.
        states: one per row; each counts its sampled token.
        greedy_N: the likeliest tokens, if they are known; may be overwritten.
    """
    wants = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    failures: dict[int, str] = {}
    raw_logits = {row: logits_NV[row : row + 1].clone() for row in wants}
    if all(state.is_plain_greedy for state in states):
        tokens_N = kernels[greedy](logits_NV) if greedy_N is None else greedy_N
    else:
        tokens_N = _choose(logits_NV.float(), states, kernels, failures)
    logprobs: dict[int, LogprobTensors] = {}
    for row, logits_1V in raw_logits.items():
        with catch_failure(failures, row):
            logprobs[row] = LogprobTensors(logits_1V, tokens_N[row : row + 1], [states[row].params.logprobs or 0])
    if failures:
        tokens_N[list(failures)] = NO_TOKEN
    for row, state in enumerate(states):
        state.count(tokens_N[row : row + 1])
    return ChosenTokens(tokens_N, logprobs, failures)


def _is_plain_greedy(new: NewRequest) -> bool:
    params = new.params
    has_extras = params.has_penalties or params.logit_bias or new.bad_words_ids or params.min_tokens
    has_extras = has_extras or params.structured_outputs is not None
    return params.is_greedy and not has_extras


def _choose(logits_NV: Tensor, states: Sequence[SamplingState], kernels: Kernels, failures: dict[int, str]) -> Tensor:
    _apply_bans_and_biases(logits_NV, states, failures)
    _apply_penalties(logits_NV, states)
    matchers = {row: state.matcher for row, state in enumerate(states) if state.matcher is not None}
    if matchers:
        mask_logits(logits_NV, list(matchers), list(matchers.values()))
        failures |= {row: matcher.error for row, matcher in matchers.items() if matcher.error is not None}
    return choose_independently(logits_NV, states, [state.position for state in states], kernels)


def choose_independently(
    logits_NV: Tensor, states: Sequence[SamplingState], positions: Sequence[int] | Tensor, kernels: Kernels
) -> Tensor:
    """Sample a token per row by temperature and masks alone; return int64, ``NO_TOKEN`` where none can be.

    Args:
        logits_NV: may be overwritten; float32 unless every state is greedy.
        states: one per row; nothing is counted.
        positions: of the tokens to sample; int64 on the device, if they are known there alone.
    """
    device = logits_NV.device
    greedy_N = kernels[greedy](logits_NV)
    if all(state.params.is_greedy for state in states):
        return greedy_N
    params = [state.params for state in states]
    temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
    floats = np.array([temperatures, [p.top_p for p in params], [p.min_p for p in params]], dtype=np.float32)
    seeds = [state.new.seed for state in states]
    integers = np.array([[max(p.top_k, 0) for p in params], seeds], dtype=np.int64)
    temperature_N, top_p_N, min_p_N = upload(floats, device)
    top_k_N, seed_N = upload(integers, device)
    position_N = positions
    if not isinstance(position_N, Tensor):
        position_N = upload(np.array(position_N, dtype=np.int64), device)
    logits_NV = apply_temperature(logits_NV, temperature_N)
    logits_NV = kernels[mask_top_k_top_p_min_p](logits_NV, top_k_N, top_p_N, min_p_N)
    drawn_N = kernels[sample](logits_NV, uniform_from_seed(seed_N, position_N))
    is_greedy_N = upload(np.array([p.is_greedy for p in params]), device)
    return torch.where(is_greedy_N | (greedy_N == NO_TOKEN), greedy_N, drawn_N)


def _apply_bans_and_biases(logits_NV: Tensor, states: Sequence[SamplingState], failures: dict[int, str]) -> None:
    biases, bans = list[tuple[int, int, float]](), list[tuple[int, int]]()
    for row, state in enumerate(states):
        if state.has_bans_or_biases:
            with catch_failure(failures, row):
                biases += [(row, token, bias) for token, bias in (state.params.logit_bias or {}).items()]
                bans += [(row, token) for token in _banned(state)]
    if biases:
        rows, tokens, values = (upload(np.array(column), logits_NV.device) for column in zip(*biases, strict=True))
        logits_NV[rows, tokens] += values.float()
    if bans:
        rows, tokens = (upload(np.array(column), logits_NV.device) for column in zip(*bans, strict=True))
        logits_NV.index_put_((rows, tokens), logits_NV.new_full((), BANNED))


def _banned(state: SamplingState) -> list[int]:
    banned: list[int] = []
    if state.num_sampled < state.params.min_tokens:
        banned.extend(state.new.stop_ids)
    for word in state.new.bad_words_ids:
        *head, last = word
        if not head or state.output_ids[-len(head) :] == head:
            banned.append(last)
    return banned


def _apply_penalties(logits_NV: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.prompt_mask_V is not None]
    if not rows:
        return
    penalised = [states[row] for row in rows]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    factors = np.array([[getattr(s.params, name) for s in penalised] for name in names], dtype=np.float32)
    repetition_N, presence_N, frequency_N = upload(factors, logits_NV.device)
    row_N = upload(np.array(rows), logits_NV.device)
    logits_NV[row_N] = apply_penalties(
        logits_NV[row_N],
        torch.stack([s.prompt_mask_V for s in penalised if s.prompt_mask_V is not None]),
        torch.stack([s.output_counts_V for s in penalised if s.output_counts_V is not None]),
        repetition_N,
        presence_N,
        frequency_N,
    )
