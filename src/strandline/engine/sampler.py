"""Choosing the next tokens of a step's rows, each by its own request's parameters.

A draw depends on the request's seed and the token's position alone, never on the batch around it or on what
happened before (preemption, forks), so it needs no state. Order, as in vLLM: log-probabilities are of the raw
logits; then bans and biases, penalties, grammars, temperature, min-p, top-k, top-p.

Shape suffixes: N rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from strandline.engine.plan import NewRequest, TokenLogprobs
from strandline.engine.structured import Matcher, mask_logits
from strandline.kernels.sampling import (
    apply_penalties,
    apply_temperature,
    gather_logprobs,
    mask_top_k_top_p_min_p,
    sample,
    uniform_from_seed,
)

BANNED = float("-inf")


class SamplingState:
    """What the sampler remembers of one request: its wishes and its tokens so far."""

    def __init__(self, new: NewRequest, vocab_size: int, device: torch.device, matcher: Matcher | None = None) -> None:
        self.new = new
        self.matcher = matcher
        self.params = new.params
        self.output_ids: list[int] = []
        self.is_plain_greedy = _is_plain_greedy(new)
        self.prompt_mask_V: Tensor | None = None
        self.output_counts_V: Tensor | None = None
        if new.params.has_penalties:
            self.prompt_mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.prompt_mask_V[torch.tensor(new.prompt_ids, dtype=torch.int64, device=device)] = True
            self.output_counts_V = torch.zeros(vocab_size, dtype=torch.int64, device=device)

    @property
    def position(self) -> int:
        """Tokens known, prompt and output: the position of the token to sample."""
        return len(self.new.prompt_ids) + len(self.output_ids)

    def append(self, token: int) -> None:
        self.output_ids.append(token)
        if self.matcher is not None:
            self.matcher.append(token)
        if self.output_counts_V is not None:
            self.output_counts_V[token] += 1


def choose_tokens(logits_NV: Tensor, states: Sequence[SamplingState]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Sample one token per row.

    Args:
        logits_NV: float32; overwritten.
        states: one per row. The chosen tokens are appended to them.

    Returns:
        The tokens, and the log-probabilities of the rows that asked for them.
    """
    wants = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    raw_logits_WV = logits_NV[wants] if wants else None
    if all(state.is_plain_greedy for state in states):
        tokens_N = logits_NV.argmax(dim=-1)
    else:
        tokens_N = _choose(logits_NV, states)
    tokens = tokens_N.tolist()
    for state, token in zip(states, tokens, strict=True):
        state.append(token)
    logprobs: dict[int, TokenLogprobs] = {}
    if raw_logits_WV is not None:
        num_top = [states[row].params.logprobs or 0 for row in wants]
        logprobs = dict(zip(wants, token_logprobs(raw_logits_WV, tokens_N[wants], num_top), strict=True))
    return tokens, logprobs


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return each row's log-probability of its token, and of its ``num_top`` likeliest."""
    logprob_N, rank_N, ids_NK, top_NK = (
        part.tolist() for part in gather_logprobs(logits_NV, tokens_N, max(num_top, default=0))
    )
    tokens = tokens_N.tolist()
    return [
        TokenLogprobs(tokens[row], logprob_N[row], rank_N[row], tuple(ids_NK[row][:count]), tuple(top_NK[row][:count]))
        for row, count in enumerate(num_top)
    ]


def _is_plain_greedy(new: NewRequest) -> bool:
    params = new.params
    has_extras = params.has_penalties or params.logit_bias or new.bad_words_ids or params.min_tokens
    has_extras = has_extras or params.structured_outputs is not None
    return params.is_greedy and not has_extras


def _choose(logits_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    device = logits_NV.device
    _apply_bans_and_biases(logits_NV, states)
    _apply_penalties(logits_NV, states)
    matchers = {row: state.matcher for row, state in enumerate(states) if state.matcher is not None}
    if matchers:
        mask_logits(logits_NV, list(matchers), list(matchers.values()))
    greedy_N = logits_NV.argmax(dim=-1)
    if all(state.params.is_greedy for state in states):
        return greedy_N
    params = [state.params for state in states]
    floats = torch.tensor(
        [(1.0 if p.is_greedy else p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float32, device=device
    )
    integers = torch.tensor(
        [(max(p.top_k, 0), state.new.seed, state.position) for p, state in zip(params, states, strict=True)],
        dtype=torch.int64,
        device=device,
    )
    logits_NV = apply_temperature(logits_NV, floats[:, 0])
    logits_NV = mask_top_k_top_p_min_p(logits_NV, integers[:, 0], floats[:, 1], floats[:, 2])
    drawn_N = sample(logits_NV, uniform_from_seed(integers[:, 1], integers[:, 2]))
    is_greedy_N = torch.tensor([p.is_greedy for p in params], device=device)
    return torch.where(is_greedy_N, greedy_N, drawn_N)


def _apply_bans_and_biases(logits_NV: Tensor, states: Sequence[SamplingState]) -> None:
    biases = [
        (row, token, bias)
        for row, state in enumerate(states)
        for token, bias in (state.params.logit_bias or {}).items()
    ]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        logits_NV[list(rows), list(tokens)] += torch.tensor(values, device=logits_NV.device)
    bans = [(row, token) for row, state in enumerate(states) for token in _banned(state)]
    if bans:
        rows, tokens = zip(*bans, strict=True)
        logits_NV[list(rows), list(tokens)] = BANNED


def _banned(state: SamplingState) -> list[int]:
    banned: list[int] = []
    if len(state.output_ids) < state.params.min_tokens:
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
    factors = torch.tensor(
        [(s.params.repetition_penalty, s.params.presence_penalty, s.params.frequency_penalty) for s in penalised],
        dtype=torch.float32,
        device=logits_NV.device,
    )
    logits_NV[rows] = apply_penalties(
        logits_NV[rows],
        torch.stack([s.prompt_mask_V for s in penalised if s.prompt_mask_V is not None]),
        torch.stack([s.output_counts_V for s in penalised if s.output_counts_V is not None]),
        factors[:, 0],
        factors[:, 1],
        factors[:, 2],
    )
