"""The likeliest tokens and draws on a GPU, without waiting for the device.

A kernel is compiled per dtype and vocabulary: any number of rows runs it, wherever the slices of small tables start.

Shape suffixes: as in ``sampling.py``; S chunks of a row.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline import ids
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sampling.keys_triton import CHUNK, key_of_bits, logit_of, ordered_bits, with_dense_rows
from strandline.kernels.sampling.sampling import KEY_TOKEN_BITS
from strandline.kernels.sizes import cdiv, next_power_of_2

NO_TOKEN = tl.constexpr(ids.NO_TOKEN)


@triton.jit
def _top_key_kernel(
    logits_ptr,
    keys_ptr,
    first,
    stride_n,
    V,
    S,
    INDEX_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_V = tl.arange(0, CHUNK)
    token_V = tl.program_id(1) * CHUNK + index_V
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    logit_V = tl.load(logits_ptr + row * stride_n + token_V, mask=token_V < V, other=float("-inf")).to(tl.float32)
    # A NaN of either sign is the largest, so that the row is seen to have no finite maximum.
    bits_V = ordered_bits(tl.where(logit_V != logit_V, float("inf"), logit_V))
    if logits_ptr.dtype.element_ty == tl.bfloat16:
        # Half of the bits say all: the others are the index, counted from the last one, for one reduction in 32 bits.
        tl.static_assert(CHUNK <= 65536)
        best = tl.max((bits_V & -65536) | (CHUNK - 1 - index_V), axis=0)
        index = CHUNK - 1 - (best & 0xFFFF)
        top = tl.where(best < 0, best | 0xFFFF, best & -65536)
    else:
        top = tl.max(bits_V, axis=0)
        index = tl.min(tl.where(bits_V == top, index_V, CHUNK), axis=0)
    key = key_of_bits(top, first + tl.program_id(1) * CHUNK + index, INDEX_BITS)
    tl.store(keys_ptr + row * S + tl.program_id(1), key)


@triton.jit
def _token_of_keys_kernel(
    keys_ptr, token_ptr, S, INDEX_BITS: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPS: tl.constexpr
):
    row = tl.program_id(0)
    chunk_S = tl.arange(0, BLOCK_S)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    key_S = tl.load(keys_ptr + row * S + chunk_S, mask=chunk_S < S, other=-0x7FFFFFFFFFFFFFFF)
    last = (1 << INDEX_BITS) - 1
    key = tl.max(key_S, axis=0)
    top = logit_of(key, INDEX_BITS)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    tl.store(token_ptr + row, tl.where(is_finite, last - (key & last), NO_TOKEN))


@triton.jit
def _chunk_sum_kernel(logits_ptr, sums_ptr, stride_n, V, S, CHUNK: tl.constexpr):
    """Write a chunk's largest logit, and the sum of ``exp(logit - largest)``, in float64."""
    row = tl.program_id(0).to(tl.int64)
    token_V = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit_V = tl.load(logits_ptr + row * stride_n + token_V, mask=token_V < V, other=float("-inf"))
    top = tl.max(logit_V, axis=0)
    # A chunk without a possible token has no largest one to subtract.
    weight_V = tl.exp(logit_V - tl.where(top == float("-inf"), 0.0, top))
    sums_ptr += row * 2 * S + tl.program_id(1)
    tl.store(sums_ptr, top.to(tl.float64))
    tl.store(sums_ptr + S, tl.sum(weight_V.to(tl.float64), axis=0))


@triton.jit
def _first_above(weight, index, target, num: tl.constexpr):
    """Return where the cumulated weight first exceeds a target, and the sum before; never where the weight is 0."""
    sum_before = tl.cumsum(weight, axis=0) - weight
    is_possible = weight > 0.0
    last = tl.max(tl.where(is_possible, index, 0), axis=0)
    is_above = is_possible & (sum_before + weight > target)
    found = tl.minimum(tl.min(tl.where(is_above, index, num), axis=0), last)
    return found, tl.sum(tl.where(index == found, sum_before, 0.0), axis=0)


@triton.jit(do_not_specialize_on_alignment=["uniform_ptr"])
def _draw_kernel(
    logits_ptr,
    sums_ptr,
    uniform_ptr,
    token_ptr,
    rank,
    stride_n,
    V,
    S,
    num_own,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk_S = tl.arange(0, BLOCK_S)
    sums_ptr += row * 2 * S
    max_S = tl.load(sums_ptr + chunk_S, mask=chunk_S < S, other=float("-inf")).to(tl.float32)
    sum_S = tl.load(sums_ptr + S + chunk_S, mask=chunk_S < S, other=0.0)
    top = tl.max(max_S, axis=0)
    weight_S = sum_S * tl.exp(max_S - top).to(tl.float64)
    total = tl.sum(weight_S, axis=0)
    is_possible = (total > 0.0) & (total < float("inf"))  # neither holds where a logit is NaN or infinite
    target = tl.load(uniform_ptr + row) * total
    chunk, before = _first_above(weight_S, chunk_S, target, BLOCK_S)
    own = chunk - rank * num_own
    is_own = (own >= 0) & (own < num_own)
    offset_V = tl.arange(0, CHUNK)
    column_V = own * CHUNK + offset_V
    is_column_V = is_own & (column_V < V)
    logit_V = tl.load(logits_ptr + row * stride_n + column_V, mask=is_column_V, other=float("-inf"))
    is_chunk_S = chunk_S == chunk
    weight_V = tl.exp(logit_V - tl.max(tl.where(is_chunk_S, max_S, float("-inf")), axis=0)).to(tl.float64)
    # The chunk's own sum, so that rounding in the first sums cannot lead past its end.
    share = (target - before) / tl.sum(tl.where(is_chunk_S, weight_S, 0.0), axis=0)
    offset, _ = _first_above(weight_V, offset_V, share * tl.sum(weight_V, axis=0), CHUNK)
    token = tl.where(is_own, (rank * V + own * CHUNK + offset).to(tl.int64), 0)
    tl.store(token_ptr + row, tl.where(is_possible, token, tl.where(rank == 0, NO_TOKEN, 0)))


def greedy(logits_NV: Tensor) -> Tensor:
    """Return each row's likeliest token (int64), of equal ones the lowest, in two launches."""
    return token_of_keys(top_keys(logits_NV, 0))


def top_keys(logits_NP: Tensor, first: int) -> Tensor:
    """Return the largest key of each chunk."""
    logits_NP = with_dense_rows(logits_NP)
    num_rows, num_columns = logits_NP.shape
    num_chunks = cdiv(num_columns, CHUNK)
    keys_NS = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits_NP.device)
    sizes = (logits_NP.stride(0), num_columns, num_chunks)
    options = {"INDEX_BITS": KEY_TOKEN_BITS, "CHUNK": CHUNK, "num_warps": 8}
    _top_key_kernel[(num_rows, num_chunks)](logits_NP, keys_NS, first, *sizes, **options, **overlap_options(logits_NP))
    return keys_NS


def token_of_keys(keys_NS: Tensor) -> Tensor:
    """Return the token (int64) of each row's largest key. ``NO_TOKEN`` where its logit is not finite."""
    num_rows, num_keys = keys_NS.shape
    token_N = torch.empty(num_rows, dtype=torch.int64, device=keys_NS.device)
    options = {"INDEX_BITS": KEY_TOKEN_BITS, "BLOCK_S": next_power_of_2(num_keys), "num_warps": 1}
    _token_of_keys_kernel[(num_rows,)](keys_NS.contiguous(), token_N, num_keys, **options, **overlap_options(token_N))
    return token_N


def sample(logits_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Return int64 tokens drawn by inverting each row's cumulated distribution at its uniform number.

    The same number leads to the torch version's token, but for numbers within rounding (some 1e-7 of a chunk's share)
    of the border between two tokens.
    """
    return draw(logits_NV, chunk_sums(logits_NV), uniform_N, 0)


def chunk_sums(logits_NP: Tensor) -> Tensor:
    """Return the largest logit of each chunk, and the sum of ``exp(logit - largest)``: ``[N, 2, S]`` float64."""
    logits_NP = with_dense_rows(logits_NP)
    num_rows, num_columns = logits_NP.shape
    num_chunks = cdiv(num_columns, CHUNK)
    sums_N2S = torch.empty((num_rows, 2, num_chunks), dtype=torch.float64, device=logits_NP.device)
    sizes = (logits_NP.stride(0), num_columns, num_chunks)
    _chunk_sum_kernel[(num_rows, num_chunks)](logits_NP, sums_N2S, *sizes, CHUNK=CHUNK, num_warps=8)
    return sums_N2S


def draw(logits_NP: Tensor, sums_N2S: Tensor, uniform_N: Tensor, rank: int) -> Tensor:
    """Return what this rank adds to the tokens that are drawn; the sums are those of all ranks' chunks."""
    logits_NP = with_dense_rows(logits_NP)
    (num_rows, num_columns), num_chunks = logits_NP.shape, sums_N2S.shape[2]
    token_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NP.device)
    sizes = (logits_NP.stride(0), num_columns, num_chunks, cdiv(num_columns, CHUNK))
    tensors = (logits_NP, sums_N2S.contiguous(), uniform_N, token_N)
    block = next_power_of_2(num_chunks)
    _draw_kernel[(num_rows,)](*tensors, rank, *sizes, CHUNK=CHUNK, BLOCK_S=block, num_warps=8)
    return token_N
