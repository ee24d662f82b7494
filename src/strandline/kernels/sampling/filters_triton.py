"""Filters on a GPU, without sorting the vocabulary and without waiting for the device.

Masses are the integers ``exp(logit - max) 2^44``: their sums depend on no order. The tokens that can matter are usually
a few thousand: those from the bound upwards that as many tiles reach as wanted. Among them the lowest key
(``keys_triton.py``) that a row's filters leave is found by bisection; a row whose filters need more of its tokens
bisects over the whole row, which takes some tens of times longer.

A kernel is compiled per dtype and vocabulary: any number of rows runs it, wherever the slices of small tables start.

Shape suffixes: as in ``sampling.py``; M tiles' maxima, C candidates.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.sampling.keys_triton import CHUNK, key_of, logit_of, with_dense_rows
from strandline.kernels.sampling.sampling import NO_CANDIDATE, pack_candidates
from strandline.kernels.sizes import cdiv, next_power_of_2

TILE = 128
"""Tokens per maximum that is kept."""

BOUND_TILES = 1280
"""Tiles whose maxima reach the candidates' bound: a row has at least this many candidates, and rarely twice as many."""

MAX_CANDIDATES = 4096
"""Candidates of a row; with more it is bisected whole."""

MASS_SCALE = tl.constexpr(2.0**44)
"""The mass of the likeliest token. 2^18 tokens of that mass still fit into an int64."""

NO_KEY = -(2**63)
"""Lower than all keys."""


@triton.jit
def _mass(logit, top):
    return (tl.exp(logit - top).to(tl.float64) * MASS_SCALE).to(tl.int64)


@triton.jit
def _tile_max_kernel(logits_ptr, tile_max_ptr, stride_n, V, M, CHUNK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    TILES: tl.constexpr = CHUNK // TILE
    tile_M = tl.program_id(1) * TILES + tl.arange(0, TILES)
    token_MV = tile_M[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logit_MV = tl.load(logits_ptr + row * stride_n + token_MV, mask=token_MV < V, other=float("-inf"))
    tl.store(tile_max_ptr + row * M + tile_M, tl.max(logit_MV, axis=1), mask=tile_M < M)


@triton.jit(do_not_specialize_on_alignment=["min_p_ptr", "least_ptr", "bound_ptr", "total_ptr"])
def _bound_kernel(
    tile_max_ptr,
    min_p_ptr,
    top_ptr,
    least_ptr,
    bound_ptr,
    count_ptr,
    total_ptr,
    M,
    BOUND_TILES: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write a row's largest logit, its lowest key under min-p, and its candidates' lowest key; clear its sums."""
    row = tl.program_id(0).to(tl.int64)
    tile_M = tl.arange(0, BLOCK_M)
    max_M = tl.load(tile_max_ptr + row * M + tile_M, mask=tile_M < M, other=float("-inf"))
    top = tl.max(max_M, axis=0)
    # As a logit's key with the highest index: the lowest of all tokens with this logit.
    last = (1 << INDEX_BITS) - 1
    least = key_of(top + tl.log(tl.load(min_p_ptr + row)), last, INDEX_BITS)
    key_M = tl.where(tile_M < M, key_of(max_M, last, INDEX_BITS) >> INDEX_BITS, -0x80000000)
    low = tl.min(key_M, axis=0)
    high = tl.max(key_M, axis=0)
    # The largest bound that BOUND_TILES tiles reach.
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        is_reached = tl.sum((key_M >= middle).to(tl.int32), axis=0) >= BOUND_TILES
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, tl.maximum(middle - 1, low))
    tl.store(top_ptr + row, top)
    tl.store(least_ptr + row, least)
    tl.store(bound_ptr + row, tl.maximum(low << INDEX_BITS, least))
    tl.store(count_ptr + row, 0)
    tl.store(total_ptr + row, tl.zeros([], dtype=tl.int64))


@triton.jit(do_not_specialize_on_alignment=["least_ptr", "bound_ptr", "total_ptr"])
def _gather_kernel(
    logits_ptr,
    top_ptr,
    least_ptr,
    bound_ptr,
    candidates_ptr,
    count_ptr,
    total_ptr,
    stride_n,
    V,
    INDEX_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Add up the mass that min-p leaves, and append the candidates' keys."""
    row = tl.program_id(0).to(tl.int64)
    token_V = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit_V = tl.load(logits_ptr + row * stride_n + token_V, mask=token_V < V, other=float("-inf"))
    key_V = key_of(logit_V, token_V, INDEX_BITS)
    mass_V = _mass(logit_V, tl.load(top_ptr + row))
    is_left_V = (token_V < V) & (key_V >= tl.load(least_ptr + row))
    tl.atomic_add(total_ptr + row, tl.sum(tl.where(is_left_V, mass_V, 0), axis=0), sem="relaxed")
    is_candidate_V = (is_left_V & (key_V >= tl.load(bound_ptr + row))).to(tl.int32)
    start = tl.atomic_add(count_ptr + row, tl.sum(is_candidate_V, axis=0), sem="relaxed")
    index_V = start + tl.cumsum(is_candidate_V, axis=0) - 1
    is_stored_V = (is_candidate_V > 0) & (index_V < MAX_CANDIDATES)
    tl.store(candidates_ptr + row * MAX_CANDIDATES + index_V, key_V, mask=is_stored_V)


@triton.jit
def _count_and_mass(
    logits_ptr, candidates_ptr, num, is_whole, least, above, top, INDEX_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return how many keys, not below ``least``, lie above a key, and their mass."""
    count_C = tl.zeros([BLOCK], dtype=tl.int32)
    mass_C = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, num, BLOCK):
        index_C = start + tl.arange(0, BLOCK)
        is_in_C = index_C < num
        logit_C = tl.load(logits_ptr + index_C, mask=is_in_C & is_whole, other=float("-inf"))
        key_C = tl.load(candidates_ptr + index_C, mask=is_in_C & (not is_whole), other=0)
        key_C = tl.where(is_whole, key_of(logit_C, index_C, INDEX_BITS), key_C)
        is_above_C = is_in_C & (key_C > above) & (key_C >= least)
        count_C += is_above_C.to(tl.int32)
        mass_C += tl.where(is_above_C, _mass(logit_of(key_C, INDEX_BITS), top), 0)
    return tl.sum(count_C, axis=0), tl.sum(mass_C, axis=0)


@triton.jit(do_not_specialize_on_alignment=["total_ptr", "least_ptr", "bound_ptr", "top_k_ptr", "top_p_ptr"])
def _threshold_kernel(
    logits_ptr,
    candidates_ptr,
    count_ptr,
    total_ptr,
    top_ptr,
    least_ptr,
    bound_ptr,
    top_k_ptr,
    top_p_ptr,
    stride_n,
    V,
    INDEX_BITS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):
    """Raise a row's lowest key to what top-k and top-p leave."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_n
    candidates_ptr += row * MAX_CANDIDATES
    least = tl.load(least_ptr + row)
    lowest = least
    top = tl.load(top_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    count = tl.load(count_ptr + row)
    total = tl.load(total_ptr + row)
    last = (1 << INDEX_BITS) - 1
    highest = key_of(top, tl.zeros([], dtype=tl.int32), INDEX_BITS)
    is_whole = count > MAX_CANDIDATES
    num = tl.where(is_whole, V, count)
    if (top_k > 0) | (top_p < 1.0):
        if not is_whole:
            _, mass = _count_and_mass(
                logits_ptr, candidates_ptr, num, is_whole, least, least - 1, top, INDEX_BITS, MAX_CANDIDATES
            )
            is_enough = tl.where(top_k > 0, count >= top_k, mass.to(tl.float64) >= top_p * total.to(tl.float64))
            # A bound no higher than min-p's lowest key lets nothing out.
            is_whole = not (is_enough | (tl.load(bound_ptr + row) <= least))
            num = tl.where(is_whole, V, count)
        if top_k > 0:
            # The lowest key above which there are fewer than k.
            low = least
            high = highest
            while low < high:
                middle = low + ((high - low) >> 1)
                num_above, _ = _count_and_mass(
                    logits_ptr, candidates_ptr, num, is_whole, least, middle, top, INDEX_BITS, MAX_CANDIDATES
                )
                is_few = num_above < top_k
                low = tl.where(is_few, low, middle + 1)
                high = tl.where(is_few, middle, high)
            lowest = tl.maximum(low, lowest)
            _, total = _count_and_mass(
                logits_ptr, candidates_ptr, num, is_whole, lowest, lowest - 1, top, INDEX_BITS, MAX_CANDIDATES
            )
        if top_p < 1.0:
            # The lowest key above which there is less than the share; the likeliest token always stays.
            wanted = top_p * total.to(tl.float64)
            low = lowest
            high = tl.maximum(highest - last, lowest)
            if wanted > 0.0:
                high = tl.maximum(highest, lowest)
            while low < high:
                middle = low + ((high - low) >> 1)
                _, mass = _count_and_mass(
                    logits_ptr, candidates_ptr, num, is_whole, lowest, middle, top, INDEX_BITS, MAX_CANDIDATES
                )
                is_less = mass.to(tl.float64) < wanted
                low = tl.where(is_less, low, middle + 1)
                high = tl.where(is_less, middle, high)
            lowest = low
    tl.store(least_ptr + row, lowest)


@triton.jit(do_not_specialize_on_alignment=["least_ptr"])
def _apply_kernel(logits_ptr, least_ptr, out_ptr, stride_n, V, INDEX_BITS: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token_V = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit_V = tl.load(logits_ptr + row * stride_n + token_V, mask=token_V < V, other=float("-inf"))
    is_kept_V = key_of(logit_V, token_V, INDEX_BITS) >= tl.load(least_ptr + row)
    tl.store(out_ptr + row * V + token_V, tl.where(is_kept_V, logit_V, float("-inf")), mask=token_V < V)


def mask_top_k_top_p_min_p(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Return logits with the tokens that a row's filters leave out at minus infinity, in five launches.

    At most 2^18 tokens: masses are counted in 64 bits.
    """
    logits_NV = with_dense_rows(logits_NV)
    num_rows, vocab_size = logits_NV.shape
    _, least_N = _lowest_keys(logits_NV, top_k_N, top_p_N, min_p_N)
    masked_NV = torch.empty((num_rows, vocab_size), dtype=logits_NV.dtype, device=logits_NV.device)
    options = {"INDEX_BITS": _index_bits(vocab_size), "CHUNK": CHUNK, "num_warps": 8}
    chunks = (num_rows, cdiv(vocab_size, CHUNK))
    _apply_kernel[chunks](logits_NV, least_N, masked_NV, logits_NV.stride(0), vocab_size, **options)
    return masked_NV


def top_candidates(logits_NP: Tensor, top_k_N: Tensor, first: int, num: int) -> Tensor:
    """Return each row's ``top_k`` likeliest tokens with their logits, by token; of equal logits the lowest tokens."""
    logits_NP = with_dense_rows(logits_NP)
    (num_rows, num_columns), device = logits_NP.shape, logits_NP.device
    ones_N, zeros_N = (torch.full((num_rows,), value, device=device) for value in (1.0, 0.0))
    top_N, least_N = _lowest_keys(logits_NP, top_k_N, ones_N, zeros_N)
    index_bits = _index_bits(num_columns)
    keys_NK = torch.full((num_rows, num), NO_KEY, dtype=torch.int64, device=device)
    count_N = torch.zeros(num_rows, dtype=torch.int32, device=device)
    total_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
    tensors = (logits_NP, top_N, least_N, least_N, keys_NK, count_N, total_N)
    sizes = (logits_NP.stride(0), num_columns)
    options = {"INDEX_BITS": index_bits, "CHUNK": CHUNK, "MAX_CANDIDATES": num, "num_warps": 8}
    _gather_kernel[(num_rows, cdiv(num_columns, CHUNK))](*tensors, *sizes, **options)
    last = (1 << index_bits) - 1
    ordered_NK = (keys_NK >> index_bits).int()
    logit_NK = (ordered_NK ^ ((ordered_NK >> 31) & 0x7FFFFFFF)).view(torch.float32)
    is_none_NK = (keys_NK == NO_KEY) | (logit_NK == -torch.inf)
    packed_NK = pack_candidates(first + last - (keys_NK & last), logit_NK).masked_fill_(is_none_NK, NO_CANDIDATE)
    # They were appended in any order.
    return packed_NK.sort(dim=-1).values


def _lowest_keys(logits_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and the lowest key that its filters leave, in four launches."""
    # Parameters come as columns of one small tensor.
    top_k_N, top_p_N, min_p_N = (x.contiguous() for x in (top_k_N, top_p_N, min_p_N))
    (num_rows, vocab_size), device = logits_NV.shape, logits_NV.device
    num_tiles, index_bits = cdiv(vocab_size, TILE), _index_bits(vocab_size)
    tile_max_NM = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
    top_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    least_N, bound_N, total_N = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    count_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    candidates_NC = torch.empty((num_rows, MAX_CANDIDATES), dtype=torch.int64, device=device)
    sizes = (logits_NV.stride(0), vocab_size)
    chunks = (num_rows, cdiv(vocab_size, CHUNK))
    options = {"INDEX_BITS": index_bits, "num_warps": 8}
    _tile_max_kernel[chunks](logits_NV, tile_max_NM, *sizes, num_tiles, CHUNK=CHUNK, TILE=TILE, num_warps=8)
    _bound_kernel[(num_rows,)](
        tile_max_NM,
        min_p_N,
        top_N,
        least_N,
        bound_N,
        count_N,
        total_N,
        num_tiles,
        BOUND_TILES=BOUND_TILES,
        BLOCK_M=next_power_of_2(num_tiles),
        **options,
    )
    sums = (candidates_NC, count_N, total_N)
    limit = {"MAX_CANDIDATES": MAX_CANDIDATES}
    _gather_kernel[chunks](logits_NV, top_N, least_N, bound_N, *sums, *sizes, CHUNK=CHUNK, **limit, **options)
    options["num_warps"] = 16
    filters = (top_k_N, top_p_N)
    _threshold_kernel[(num_rows,)](logits_NV, *sums, top_N, least_N, bound_N, *filters, *sizes, **limit, **options)
    return top_N, least_N


def _index_bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())
