"""From logits to tokens, all rows of a batch at once and without waiting for the device.

Invariants: what happens to a row depends on that row and its parameters alone; a draw depends on the request's
seed and the token's position alone, so that batching, forks and preemption never change it; a token of
probability zero is never drawn; a row without a finite maximum (NaN, infinity, every token banned) gives ``NO_TOKEN``.

The order of the filters and their meaning are those of vLLM: temperature, min-p, top-k, top-p. Source of the
hash: Steele et al., "Fast splittable pseudorandom number generators", section 5 (SplitMix64).

Shape suffixes: N rows, V vocabulary, C candidates (a row's likeliest tokens, likeliest first), B tiles of the
vocabulary, I tokens of a tile, K reported tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NO_TOKEN
from strandline.kernels.operation import operation, triton

NUM_CANDIDATES_CPU = (512, 8192)
"""How many of a row's likeliest tokens a CPU tries to decide by before it sorts the vocabulary, 50 times as slow."""

TILE_TOKENS = 128
"""A draw chooses among the sums of tiles of this size, then within one. Most vocabularies are a multiple of it."""


ROWS_PER_PASS_CPU = 4
"""Rows that a CPU takes through all passes over the vocabulary together, so that they stay in cache."""


@operation(triton("sampling_triton"))
def greedy(logits_NV: Tensor) -> Tensor:
    """Return each row's likeliest token, int64; of equals, the first. ``NO_TOKEN`` where no maximum is finite."""
    # A CPU finds the largest value of a row with its place in a quarter of the time of argmax.
    top_N, token_N = logits_NV.max(dim=-1)
    return token_N.masked_fill_(~top_N.isfinite(), NO_TOKEN)


def apply_penalties(
    logits_NV: Tensor,
    prompt_mask_NV: Tensor,
    output_counts_NV: Tensor,
    repetition_N: Tensor,
    presence_N: Tensor,
    frequency_N: Tensor,
) -> Tensor:
    """Return logits made smaller for tokens that have occurred.

    The repetition penalty divides positive logits and multiplies negative ones, of tokens of prompt or output. The
    frequency penalty is subtracted once per occurrence in the output, the presence penalty once if there is any.

    Args:
        prompt_mask_NV: bool; which tokens the row's own prompt holds.
        output_counts_NV: integers; how often each token occurs in the row's own output.
    """
    is_in_output_NV = output_counts_NV > 0
    factor_NV = torch.where(prompt_mask_NV | is_in_output_NV, repetition_N.unsqueeze(-1), 1.0)
    logits_NV = torch.where(logits_NV > 0, logits_NV / factor_NV, logits_NV * factor_NV)
    logits_NV = logits_NV - frequency_N.unsqueeze(-1) * output_counts_NV
    return logits_NV - presence_N.unsqueeze(-1) * is_in_output_NV


def apply_temperature(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Return logits divided by their row's temperature, which must be above 0."""
    return logits_NV / temperature_N.unsqueeze(-1)


@operation(triton("sampling_triton"))
def mask_top_k_top_p_min_p(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Return logits with the tokens that a row's filters leave out at minus infinity.

    First go tokens whose probability is below ``min_p`` times the likeliest one's. Of the rest stay the ``top_k``
    likeliest, and of these the smallest set whose share of their probability reaches ``top_p``; at least one.

    Args:
        logits_NV: float32, temperature applied.
        top_k_N: int64; 0 or below: off.
        top_p_N: float32; 1 or above: off.
        min_p_N: float32; 0: off.
    """
    if logits_NV.device.type != "cpu":
        return _mask_rows(logits_NV, top_k_N, top_p_N, min_p_N)
    masked_NV = torch.empty_like(logits_NV)
    for first in range(0, len(logits_NV), ROWS_PER_PASS_CPU):
        rows = slice(first, first + ROWS_PER_PASS_CPU)
        masked_NV[rows] = _mask_rows(logits_NV[rows], top_k_N[rows], top_p_N[rows], min_p_N[rows])
    return masked_NV


def uniform_from_seed(seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Return a float64 in ``[0, 1)`` for each seed and position (int64), the same for the same pair everywhere."""
    bits_N = _mix(_mix(seed_N + _GOLDEN_GAMMA) + position_N * _GOLDEN_GAMMA)
    return _shift_right(bits_N, 11).double() * 2.0**-53


@operation(triton("sampling_triton"))
def sample(logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return int64 tokens drawn by inverting each row's cumulated distribution at its uniform number.

    ``NO_TOKEN`` where a row has no finite maximum.
    """
    if logits_NV.device.type != "cpu":
        return _draw(logits_NV, uniform_N)
    groups = zip(logits_NV.split(ROWS_PER_PASS_CPU), uniform_N.split(ROWS_PER_PASS_CPU), strict=True)
    return torch.cat([_draw(logits, uniform) for logits, uniform in groups])


def gather_logprobs(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, per row, the token's log-probability, its rank (from 1), and the likeliest tokens with theirs.

    Args:
        num_top: how many of the likeliest; no more than the vocabulary has.

    Returns:
        float32 ``[N]``, int64 ``[N]``, int64 ``[N, num_top]``, float32 ``[N, num_top]``.
    """
    logits_NV = logits_NV.float()
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    chosen_N1 = logits_NV.gather(-1, token_N.clamp_min(0).unsqueeze(-1))
    rank_N = (logits_NV > chosen_N1).sum(dim=-1) + 1
    top_NK, ids_NK = logits_NV.topk(min(num_top, logits_NV.shape[1]), dim=-1)
    return (chosen_N1 - total_N1).squeeze(-1), rank_N, ids_NK, top_NK - total_N1


def _mask_rows(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    least_N1 = logits_NV.amax(dim=-1, keepdim=True) + min_p_N.log().unsqueeze(-1)
    logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    is_on_N = (top_k_N > 0) | (top_p_N < 1)
    if logits_NV.device.type == "cpu":
        _narrow_rows(logits_NV, top_k_N, top_p_N, is_on_N.nonzero().squeeze(-1))
        return logits_NV
    token_NC, value_NC, _ = _nucleus(logits_NV, top_k_N, top_p_N, logits_NV.shape[1])
    masked_NV = torch.full_like(logits_NV, -torch.inf).scatter_(-1, token_NC, value_NC)
    return torch.where(is_on_N.unsqueeze(-1), masked_NV, logits_NV)


def _narrow_rows(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, row_N: Tensor) -> None:
    """Apply top-k and top-p to some rows in place, looking at as few candidates as each row allows."""
    vocab_size = logits_NV.shape[1]
    for num_candidates in (*(c for c in NUM_CANDIDATES_CPU if c < vocab_size), vocab_size):
        if not len(row_N):
            return
        token_NC, value_NC, is_decided_N = _nucleus(
            logits_NV if len(row_N) == len(logits_NV) else logits_NV[row_N],
            top_k_N[row_N],
            top_p_N[row_N],
            num_candidates,
        )
        decided_N1 = row_N[is_decided_N].unsqueeze(-1)
        logits_NV[decided_N1.squeeze(-1)] = -torch.inf
        logits_NV[decided_N1, token_NC[is_decided_N]] = value_NC[is_decided_N]
        row_N = row_N[~is_decided_N]


def _nucleus(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k, then top-p, to each row's likeliest candidates.

    Returns:
        The candidates, their logits with minus infinity where left out, and for which rows they are enough.
    """
    value_NC, token_NC = logits_NV.topk(num_candidates, dim=-1)
    is_k_on_N1, top_p_N1 = (top_k_N > 0).unsqueeze(-1), top_p_N.unsqueeze(-1)
    rank_C = torch.arange(num_candidates, device=logits_NV.device)
    is_within_k_NC = (rank_C < top_k_N.unsqueeze(-1)) | ~is_k_on_N1
    log_total_N1 = value_NC.masked_fill(~is_within_k_NC, -torch.inf).logsumexp(dim=-1, keepdim=True)
    if logits_NV.device.type != "cpu" or not is_k_on_N1.all():
        log_total_N1 = torch.where(is_k_on_N1, log_total_N1, logits_NV.logsumexp(dim=-1, keepdim=True))
    share_NC = (value_NC - log_total_N1).double().exp()
    sum_NC = share_NC.cumsum(dim=-1)
    is_kept_NC = is_within_k_NC & ((sum_NC - share_NC < top_p_N1) | (top_p_N1 >= 1))
    is_kept_NC[:, 0] = True

    is_decided_N = torch.where(is_k_on_N1.squeeze(-1), top_k_N <= num_candidates, sum_NC[:, -1] >= top_p_N)
    is_decided_N |= num_candidates == logits_NV.shape[1]
    return token_NC, value_NC.masked_fill(~is_kept_NC, -torch.inf), is_decided_N


def _draw(logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
    padding = -logits_NV.shape[1] % TILE_TOKENS
    top_N1 = logits_NV.amax(dim=-1, keepdim=True)
    weight_NV = (logits_NV - top_N1).exp_()
    weight_NV = F.pad(weight_NV, (0, padding)) if padding else weight_NV
    weight_NBI = weight_NV.view(len(weight_NV), -1, TILE_TOKENS)
    tile_sum_NB = weight_NBI.sum(dim=-1, dtype=torch.float64)
    tile_N, before_N, total_N = _invert(tile_sum_NB, uniform_N)
    inner_NI = weight_NBI[torch.arange(len(tile_N), device=tile_N.device), tile_N].double()
    target_N = uniform_N * total_N - before_N
    offset_N, _, _ = _invert(inner_NI, target_N / inner_NI.sum(dim=-1))
    return (tile_N * TILE_TOKENS + offset_N).masked_fill_(~top_N1.squeeze(-1).isfinite(), NO_TOKEN)


def _invert(weight_NC: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index at which the cumulated weight first exceeds a share of its total, the sum before it, the total.

    The weight at the index is above zero, also where rounding has brought the share to 1 or below 0.
    """
    sum_NC = weight_NC.cumsum(dim=-1)
    total_N = sum_NC[:, -1]
    target_N = (uniform_N * total_N).clamp_min(0.0)
    target_N = torch.minimum(target_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    # Past the end only where a weight is NaN.
    index_N1 = torch.searchsorted(sum_NC, target_N.unsqueeze(-1), right=True).clamp_max_(sum_NC.shape[1] - 1)
    before_N1 = torch.where(index_N1 > 0, sum_NC.gather(-1, (index_N1 - 1).clamp_min(0)), 0.0)
    return index_N1.squeeze(-1), before_N1.squeeze(-1), total_N


def _signed(word: int) -> int:
    """Return the int64 that has the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(word_N: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of each int64; its arithmetic wraps around."""
    word_N = (word_N ^ _shift_right(word_N, 30)) * _MIX_1
    word_N = (word_N ^ _shift_right(word_N, 27)) * _MIX_2
    return word_N ^ _shift_right(word_N, 31)


def _shift_right(word_N: Tensor, num_bits: int) -> Tensor:
    """Shift zeros in from the left: torch's own shift of an int64 repeats its sign."""
    return (word_N >> num_bits) & ((1 << (64 - num_bits)) - 1)
