"""From logits to tokens, all rows of a batch at once and without waiting for the device.

Invariants: what happens to a row depends on that row and its parameters alone; a draw depends on the request's
seed and the token's position alone, so that batching, forks and preemption never change it; a token of
probability zero is never drawn; a row without a finite maximum (NaN, infinity, every token banned) gives ``NO_TOKEN``.

The order of the filters and their meaning are those of vLLM: temperature, min-p, top-k, top-p. Source of the
hash: Steele et al., "Fast splittable pseudorandom number generators", section 5 (SplitMix64).

With several ranks each has the logits of a part of the vocabulary; all parts are equally wide. The ranks exchange keys,
sums and candidates, which number tokens by the whole vocabulary (``divided_sampling.py``).

Shape suffixes: N rows, V vocabulary, P the part of the vocabulary that a rank has, C candidates (a row's likeliest
tokens, likeliest first), B tiles of the vocabulary, I tokens of a tile, S chunks of a part, K reported tokens,
R ranks.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NO_TOKEN
from strandline.kernels.operation import operation, triton
from strandline.kernels.ranks import ONE_RANK, Ranks

NUM_CANDIDATES_CPU = (512, 8192)
"""How many of a row's likeliest tokens a CPU tries to decide by before it sorts the vocabulary, 50 times as slow."""

TILE_TOKENS = 128
"""A draw chooses among the sums of tiles of this size, then within one. Most vocabularies are a multiple of it."""


ROWS_PER_PASS_CPU = 4
"""Rows that a CPU takes through all passes over the vocabulary together, so that they stay in cache."""

ROWS_PER_SORT: Final = 16
"""Rows that are sorted at once: a sort needs three times the memory of its rows."""

KEY_TOKEN_BITS: Final = 31
"""Bits of a 64-bit key that hold the token; the others hold the logit."""

LAST_TOKEN: Final = (1 << KEY_TOKEN_BITS) - 1

NO_CANDIDATE: Final = ((1 << 31) - 1) << 32
"""Stands where a row has fewer candidates: after all others."""


@operation(triton("sampling.sampling_triton"))
def greedy(logits_NV: Tensor) -> Tensor:
    """Return each row's likeliest token, int64; of equals, the first. ``NO_TOKEN`` where no maximum is finite."""
    # A CPU finds the largest value of a row with its index in a quarter of the time of argmax.
    top_N, token_N = logits_NV.max(dim=-1)
    return token_N.masked_fill_(~top_N.isfinite(), NO_TOKEN)


@operation(triton("sampling.sampling_triton"))
def top_keys(logits_NP: Tensor, first: int) -> Tensor:
    """Return int64 keys, any number for a row. The largest is that of the row's likeliest token, among all ranks' too.

    A larger key is a larger logit's, and of equal ones a lower token's.

    Args:
        first: the token of the first column.
    """
    top_N, column_N = logits_NP.max(dim=-1)
    top_N = top_N.float().nan_to_num(torch.inf, torch.inf, -torch.inf)
    bits_N = torch.where(top_N == 0.0, 0.0, top_N).view(torch.int32)
    ordered_N = bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)
    return ((ordered_N.long() << KEY_TOKEN_BITS) + (LAST_TOKEN - first - column_N)).unsqueeze(-1)


@operation(triton("sampling.sampling_triton"))
def token_of_keys(keys_NS: Tensor) -> Tensor:
    """Return the token (int64) of each row's largest key. ``NO_TOKEN`` where its logit is not finite."""
    key_N = keys_NS.amax(dim=-1)
    ordered_N = (key_N >> KEY_TOKEN_BITS).int()
    top_N = (ordered_N ^ ((ordered_N >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return (LAST_TOKEN - (key_N & LAST_TOKEN)).masked_fill_(~top_N.isfinite(), NO_TOKEN)


@operation(triton("sampling.filters_triton"))
def top_candidates(logits_NP: Tensor, top_k_N: Tensor, first: int, num: int) -> Tensor:
    """Return each row's ``top_k`` likeliest possible tokens with their logits, by token; see ``unpack_candidates``.

    Args:
        logits_NP: float32.
        top_k_N: int64, from 1 to ``num``.
        first: the token of the first column.

    Returns:
        ``[N, num]`` int64; ``NO_CANDIDATE`` at the end of rows with fewer.
    """
    num_columns = logits_NP.shape[1]
    value_NK, column_NK = logits_NP.topk(min(num, num_columns), dim=-1)
    is_left_NK = torch.arange(value_NK.shape[1], device=logits_NP.device) < top_k_N.unsqueeze(-1)
    is_left_NK &= value_NK != -torch.inf
    packed_NK = pack_candidates(column_NK + first, value_NK).masked_fill_(~is_left_NK, NO_CANDIDATE)
    return F.pad(packed_NK.sort(dim=-1).values, (0, num - packed_NK.shape[1]), value=NO_CANDIDATE)


def pack_candidates(token_NK: Tensor, logit_NK: Tensor) -> Tensor:
    """Return int64 numbers that hold tokens, in their upper halves, and float32 logits."""
    return (token_NK << 32) | (logit_NK.view(torch.int32).long() & 0xFFFFFFFF)


def unpack_candidates(packed_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens (int64) and logits (float32) of candidates; minus infinity where there is none."""
    logit_NK = packed_NK.int().view(torch.float32)
    return packed_NK >> 32, logit_NK.masked_fill(packed_NK == NO_CANDIDATE, -torch.inf)


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


@operation(triton("sampling.filters_triton"))
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


@operation(triton("sampling.sampling_triton"))
def sample(logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return int64 tokens drawn by inverting each row's cumulated distribution at its uniform number.

    ``NO_TOKEN`` where a row has no finite maximum.
    """
    return draw.reference(logits_NV, chunk_sums.reference(logits_NV), uniform_N, 0)


@operation(triton("sampling.sampling_triton"))
def chunk_sums(logits_NP: Tensor) -> Tensor:
    """Return what ``draw`` needs to know of a part of the vocabulary.

    Returns:
        ``[N, 2, S]`` float64: of each chunk of the columns a number no smaller than its logits, which need not be its
        own, and the sum of ``exp(logit - number)``.
    """
    if logits_NP.device.type != "cpu":
        return _sum_tiles(logits_NP)
    return torch.cat([_sum_tiles(rows) for rows in logits_NP.split(ROWS_PER_PASS_CPU)])


@operation(triton("sampling.sampling_triton"))
def draw(logits_NP: Tensor, sums_N2S: Tensor, uniform_N: Tensor, rank: int) -> Tensor:
    """Return what this rank adds to the tokens (int64) that are drawn as by ``sample``.

    That is the token where it lies in the rank's part, and 0 elsewhere; the first rank adds ``NO_TOKEN``.

    Args:
        sums_N2S: sums of the chunks of all ranks, one rank's after the other's.
    """
    top_NS, sum_NS = sums_N2S.unbind(1)
    top_N1 = top_NS.amax(dim=-1, keepdim=True)
    weight_NS = sum_NS * (top_NS - top_N1).exp_()
    tile_N, before_N, total_N = _invert(weight_NS, uniform_N)
    num_columns = logits_NP.shape[1]
    num_tiles = -(-num_columns // TILE_TOKENS)
    own_N = tile_N - rank * num_tiles
    is_own_N = (own_N >= 0) & (own_N < num_tiles)
    offset_I = torch.arange(TILE_TOKENS, device=logits_NP.device)
    column_NI = own_N.clamp(0, num_tiles - 1).unsqueeze(-1) * TILE_TOKENS + offset_I
    inner_NI = logits_NP.gather(-1, column_NI.clamp_max(num_columns - 1))
    inner_NI = inner_NI.masked_fill_(column_NI >= num_columns, -torch.inf)
    inner_NI = (inner_NI - top_NS.gather(-1, tile_N.unsqueeze(-1)).float()).exp_().double()
    share_N = (uniform_N * total_N - before_N) / weight_NS.gather(-1, tile_N.unsqueeze(-1)).squeeze(-1)
    offset_N, _, _ = _invert(inner_NI, share_N)
    token_N = rank * num_columns + own_N * TILE_TOKENS + offset_N
    token_N = token_N.masked_fill_(~is_own_N, 0)
    return token_N.masked_fill_(~top_N1.squeeze(-1).isfinite(), NO_TOKEN if rank == 0 else 0)


def gather_logprobs(
    logits_NP: Tensor, token_N: Tensor, num_top: int, ranks: Ranks = ONE_RANK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, per row, the token's log-probability, its rank (from 1), and the likeliest tokens with theirs.

    Args:
        num_top: how many of the likeliest; no more than the vocabulary has.
        ranks: ranks that have the logits of the rest of the vocabulary. Two exchanges.

    Returns:
        float32 ``[N]``, int64 ``[N]``, int64 ``[N, num_top]``, float32 ``[N, num_top]``.
    """
    logits_NP = logits_NP.float()
    num_columns = logits_NP.shape[1]
    first = ranks.rank * num_columns
    total_N1 = logits_NP.logsumexp(dim=-1, keepdim=True)
    column_N1 = (token_N.clamp_min(0) - first).unsqueeze(-1)
    chosen_N1 = logits_NP.gather(-1, column_N1.clamp(0, num_columns - 1))
    top_NK, ids_NK = logits_NP.topk(min(num_top, num_columns), dim=-1)
    if ranks.size > 1:
        chosen_N1 = chosen_N1.masked_fill((column_N1 < 0) | (column_N1 >= num_columns), -torch.inf)
        own = torch.cat((total_N1.double(), chosen_N1.double(), top_NK.double(), (ids_NK + first).double()), dim=1)
        parts_NRC = ranks.gather(own).view(len(own), ranks.size, -1)
        total_N1 = parts_NRC[..., 0].logsumexp(-1, keepdim=True).float()
        chosen_N1 = parts_NRC[..., 1].amax(-1, keepdim=True).float()
        top_NC, ids_NC = (part.flatten(1) for part in parts_NRC[..., 2:].chunk(2, dim=2))
        top_NK, index_NK = top_NC.float().topk(min(num_top, top_NC.shape[1]), dim=-1)
        ids_NK = ids_NC.gather(-1, index_NK).long()
    rank_N = ranks.sum((logits_NP > chosen_N1).sum(dim=-1)) + 1
    return (chosen_N1 - total_N1).squeeze(-1), rank_N, ids_NK, top_NK - total_N1


def logprobs_of(logits_NP: Tensor, token_NK: Tensor, ranks: Ranks = ONE_RANK) -> tuple[Tensor, Tensor]:
    """Return, per row, the log-probabilities of the given tokens (float32) and their ranks (int64, from 1).

    Args:
        ranks: ranks that have the logits of the rest of the vocabulary. Two exchanges.
    """
    logits_NP = logits_NP.float()
    num_columns = logits_NP.shape[1]
    total_N1 = logits_NP.logsumexp(dim=-1, keepdim=True)
    column_NK = token_NK.clamp_min(0) - ranks.rank * num_columns
    chosen_NK = logits_NP.gather(-1, column_NK.clamp(0, num_columns - 1))
    if ranks.size > 1:
        chosen_NK = chosen_NK.masked_fill((column_NK < 0) | (column_NK >= num_columns), -torch.inf)
        own = torch.cat((total_N1.double(), chosen_NK.double()), dim=1)
        parts_NRC = ranks.gather(own).view(len(own), ranks.size, -1)
        total_N1 = parts_NRC[..., 0].logsumexp(-1, keepdim=True).float()
        chosen_NK = parts_NRC[..., 1:].amax(1).float()
    # One sort of each row, instead of a comparison of the whole row with each token.
    parts = zip(logits_NP.split(ROWS_PER_SORT), chosen_NK.split(ROWS_PER_SORT), strict=True)
    num_not_above_NK = torch.cat(
        [torch.searchsorted(rows.sort(dim=-1).values, chosen.contiguous(), right=True) for rows, chosen in parts]
    )
    return chosen_NK - total_N1, ranks.sum(num_columns - num_not_above_NK) + 1


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


def _sum_tiles(logits_NP: Tensor) -> Tensor:
    padding = -logits_NP.shape[1] % TILE_TOKENS
    top_N1 = logits_NP.amax(dim=-1, keepdim=True)
    # A part without a possible token has no largest logit to subtract.
    weight_NP = (logits_NP - top_N1.masked_fill(top_N1 == -torch.inf, 0.0)).exp_()
    weight_NP = F.pad(weight_NP, (0, padding)) if padding else weight_NP
    sum_NB = weight_NP.view(len(weight_NP), -1, TILE_TOKENS).sum(dim=-1, dtype=torch.float64)
    return torch.stack((top_N1.double().expand_as(sum_NB), sum_NB), dim=1)


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
