"""Softmax attention on a CPU: decodes read keys and values where they lie (``attention.py``).

A task is one key/value head of one *part* of a decode: at most ``PART_TOKENS`` of its tokens, cut on a grid of
positions, so that a sequence's bits depend on nothing but its own length. Its query heads are attended together, block
after block, by an online softmax; parts of a longer sequence are then merged.

A row of keys or values is read as two halves: bfloat16 numbers as pairs in 32-bit words, whose upper and lower halves
each become float32 in one operation; float32 numbers as the first and the second half of the row. Queries and sums
are laid out accordingly.

Source: Dao et al., "Flash-Decoding" (parts).

Shape suffixes: as in ``attention.py``; further X parts, Y sequences of more than one part, H = G R query heads.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels import attention
from strandline.kernels.attention import attend_prefills, seen_span
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.runtime_numba import (
    BFLOAT16,
    KINDS,
    TASKS,
    bits,
    claim,
    compiled,
    exp,
    floats,
    helper,
    int32s,
    ints,
    kind,
    load,
    number,
    packed_rows,
    store,
    words,
)

PART_TOKENS: Final = 512
"""Tokens of a part: a multiple of a block's."""


def paged_attention(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
) -> Tensor:
    """Numba twin of :func:`strandline.kernels.attention.paged_attention`."""
    if memory.k_BPGD.dtype not in KINDS or q_THD.shape[2] % 2:
        inputs = (q_THD, memory, batch, num_decodes)
        return attention.paged_attention.__wrapped__(*inputs, scale=scale, window_tokens=window_tokens)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    if num_decodes:
        _attend_decodes(packed_rows(q_THD), memory, batch, num_decodes, out_THD, scale, window_tokens)
    attend_prefills(q_THD, memory, batch, num_decodes, out_THD, scale, window_tokens)
    return out_THD


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parts of a step's decodes."""

    parts_X4: Tensor
    """Sequence, first position, end, and whether it is the whole of what the sequence sees."""
    merged_Y3: Tensor
    """Sequence, first part and number of parts."""


def _plan(batch: AttentionBatch, num_decodes: int, window_tokens: int | None) -> _Plan:
    parts: list[tuple[int, int, int, bool]] = []
    merged: list[tuple[int, int, int]] = []
    for sequence in range(num_decodes):
        span = seen_span(batch, sequence, window_tokens)
        first = len(parts)
        start = span.start
        is_whole = span.end <= (start // PART_TOKENS + 1) * PART_TOKENS
        while start < span.end:
            end = min((start // PART_TOKENS + 1) * PART_TOKENS, span.end)
            parts.append((sequence, start, end, is_whole))
            start = end
        if not is_whole:
            merged.append((sequence, first, len(parts) - first))
    return _Plan(torch.tensor(parts), torch.tensor(merged))


def _attend_decodes(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    out_THD: Tensor,
    scale: float,
    window_tokens: int | None,
) -> None:
    plan = batch.gathers.get(("parts", window_tokens, num_decodes))
    if plan is None:
        plan = batch.gathers["parts", window_tokens, num_decodes] = _plan(batch, num_decodes, window_tokens)
    k_BPGD, v_BPGD, table_NM = memory.k_BPGD, memory.v_BPGD, batch.block_table_NM
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = k_BPGD.shape[2]
    num_parts, num_merged = len(plan.parts_X4), len(plan.merged_Y3)
    # Per part and head the sums, divided by nothing yet, then the maximum and the total.
    scratch_XHD = torch.empty((num_parts, num_heads, head_dim + 2) if num_merged else 0)
    sizes = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    _decode_kernel(
        num_parts * num_kv_heads,
        *(*sizes, kind(q_THD), kind(k_BPGD), bits(scale)),
        *(q_THD.data_ptr(), q_THD.stride(0), out_THD.data_ptr(), out_THD.stride(0)),
        *(plan.parts_X4.data_ptr(), table_NM.data_ptr(), table_NM.stride(0)),
        *(k_BPGD.data_ptr(), *k_BPGD.stride()[:3], v_BPGD.data_ptr(), *v_BPGD.stride()[:3]),
        scratch_XHD.data_ptr(),
    )
    if num_merged:
        args = (num_heads, head_dim, kind(q_THD), out_THD.data_ptr(), out_THD.stride(0))
        _merge_kernel(num_merged * num_heads, *args, plan.merged_Y3.data_ptr(), scratch_XHD.data_ptr())


def halves(row, half, i):
    """Return the numbers of a row of keys or values that stand at ``i`` of its two halves."""


@overload(halves, inline="always")
def _halves(row, half, i):
    if row.dtype == types.float32:
        return lambda row, half, i: (row[i], row[half + i])
    return lambda row, half, i: (
        np.uint32(row[i] << 16).view(np.float32),
        np.uint32(row[i] & np.uint32(0xFFFF0000)).view(np.float32),
    )


@helper
def _score(keys, stride, count, queries, scores):
    """Multiply ``count`` rows of keys with pairs of queries, four rows at a time; the last row may come twice."""
    num_heads, head_dim = queries.shape
    half = head_dim // 2
    for head in range(0, num_heads, 2):
        query, other = queries[head], queries[head + 1]
        for token in range(0, count, 4):
            key_1 = keys[token * stride :]
            key_2 = keys[min(token + 1, count - 1) * stride :]
            key_3 = keys[min(token + 2, count - 1) * stride :]
            key_4 = keys[min(token + 3, count - 1) * stride :]
            a_1 = a_2 = a_3 = a_4 = np.float32(0.0)
            b_1 = b_2 = b_3 = b_4 = np.float32(0.0)
            for i in range(half):
                query_low, query_high, other_low, other_high = query[i], query[half + i], other[i], other[half + i]
                low, high = halves(key_1, half, i)
                a_1 += query_low * low + query_high * high
                b_1 += other_low * low + other_high * high
                low, high = halves(key_2, half, i)
                a_2 += query_low * low + query_high * high
                b_2 += other_low * low + other_high * high
                low, high = halves(key_3, half, i)
                a_3 += query_low * low + query_high * high
                b_3 += other_low * low + other_high * high
                low, high = halves(key_4, half, i)
                a_4 += query_low * low + query_high * high
                b_4 += other_low * low + other_high * high
            score, other_score = scores[head, token : token + 4], scores[head + 1, token : token + 4]
            score[0], score[1], score[2], score[3] = a_1, a_2, a_3, a_4
            other_score[0], other_score[1], other_score[2], other_score[3] = b_1, b_2, b_3, b_4


@helper
def _weigh(scores, count, maxima, totals, sums):
    """Turn scores of a block into weights, 0 past its end; scale what was summed before to the new maximum."""
    for head in range(len(sums)):
        weights = scores[head]
        largest = maxima[head]
        for token in range(count):
            largest = max(largest, weights[token])
        carried = exp(maxima[head] - largest) if totals[head] != 0.0 else np.float32(0.0)
        total = np.float32(0.0)
        for token in range(count):
            weights[token] = exp(weights[token] - largest)
            total += weights[token]
        for token in range(count, (count + 3) // 4 * 4):
            weights[token] = 0.0
        maxima[head] = largest
        totals[head] = totals[head] * carried + total
        for i in range(sums.shape[1]):
            sums[head, i] *= carried


@helper
def _add(values, stride, count, weights, sums):
    """Add ``count`` weighted rows of values to the sums of pairs of heads, four rows at a time."""
    num_heads, head_dim = sums.shape
    half = head_dim // 2
    for head in range(0, num_heads, 2):
        low_a, high_a = sums[head, :half], sums[head, half:]
        low_b, high_b = sums[head + 1, :half], sums[head + 1, half:]
        for token in range(0, count, 4):
            value_1 = values[token * stride :]
            value_2 = values[min(token + 1, count - 1) * stride :]
            value_3 = values[min(token + 2, count - 1) * stride :]
            value_4 = values[min(token + 3, count - 1) * stride :]
            a, b = weights[head, token : token + 4], weights[head + 1, token : token + 4]
            a_1, a_2, a_3, a_4 = a[0], a[1], a[2], a[3]
            b_1, b_2, b_3, b_4 = b[0], b[1], b[2], b[3]
            for i in range(half):
                low_1, high_1 = halves(value_1, half, i)
                low_2, high_2 = halves(value_2, half, i)
                low_3, high_3 = halves(value_3, half, i)
                low_4, high_4 = halves(value_4, half, i)
                low_a[i] += a_1 * low_1 + a_2 * low_2 + a_3 * low_3 + a_4 * low_4
                high_a[i] += a_1 * high_1 + a_2 * high_2 + a_3 * high_3 + a_4 * high_4
                low_b[i] += b_1 * low_1 + b_2 * low_2 + b_3 * low_3 + b_4 * low_4
                high_b[i] += b_1 * high_1 + b_2 * high_2 + b_3 * high_3 + b_4 * high_4


@helper
def _split(kind, whole, halved, factor):
    """Lay a row out in the halves that keys and values are read in."""
    half = whole.size // 2
    for i in range(half):
        if kind == BFLOAT16:
            halved[i], halved[half + i] = factor * whole[2 * i], factor * whole[2 * i + 1]
        else:
            halved[i], halved[half + i] = factor * whole[i], factor * whole[half + i]


@helper
def _join(kind, halved, whole, factor):
    """Undo ``_split``."""
    half = whole.size // 2
    for i in range(half):
        if kind == BFLOAT16:
            whole[2 * i], whole[2 * i + 1] = factor * halved[i], factor * halved[half + i]
        else:
            whole[i], whole[half + i] = factor * halved[i], factor * halved[half + i]


@compiled
def _decode_kernel(args):
    num_kv_heads, heads_per_key, head_dim, dtype, memory_dtype = args[2], args[3], args[4], args[5], args[6]
    scale = np.float32(number(args[7]))
    padded_heads = (heads_per_key + 1) // 2 * 2
    row = np.empty(head_dim, np.float32)
    queries, sums = np.zeros((padded_heads, head_dim), np.float32), np.zeros((padded_heads, head_dim), np.float32)
    scores = np.zeros((padded_heads, BLOCK_TOKENS), np.float32)
    maxima, totals = np.empty(padded_heads, np.float32), np.empty(padded_heads, np.float32)
    task = claim(args)
    while task < args[TASKS]:
        part_index, kv_head = task // num_kv_heads, task % num_kv_heads
        first_head = kv_head * heads_per_key
        part = ints(args[12] + 32 * part_index, 4)
        sequence, start, end, is_whole = part[0], part[1], part[2], part[3]
        table = int32s(args[13] + 4 * sequence * args[14], (end - 1) // BLOCK_TOKENS + 1)
        for head in range(heads_per_key):
            load(args[8], dtype, sequence * args[9] + (first_head + head) * head_dim, row)
            _split(memory_dtype, row, queries[head], scale)
        maxima[:] = -np.inf
        totals[:] = 0.0
        sums[:] = 0.0

        while start < end:
            block, offset = np.int64(table[start // BLOCK_TOKENS]), start % BLOCK_TOKENS
            count = min(end - start, BLOCK_TOKENS - offset)
            key_at = block * args[16] + offset * args[17] + kv_head * args[18]
            value_at = block * args[20] + offset * args[21] + kv_head * args[22]
            if memory_dtype == BFLOAT16:
                keys = words(args[15] + 2 * key_at, BLOCK_TOKENS * args[17])
                values = words(args[19] + 2 * value_at, BLOCK_TOKENS * args[21])
                _score(keys, args[17] // 2, count, queries, scores)
                _weigh(scores, count, maxima, totals, sums)
                _add(values, args[21] // 2, count, scores, sums)
            else:
                keys = floats(args[15] + 4 * key_at, BLOCK_TOKENS * args[17])
                values = floats(args[19] + 4 * value_at, BLOCK_TOKENS * args[21])
                _score(keys, args[17], count, queries, scores)
                _weigh(scores, count, maxima, totals, sums)
                _add(values, args[21], count, scores, sums)
            start += count

        for head in range(heads_per_key):
            if is_whole:
                _join(memory_dtype, sums[head], row, np.float32(1.0) / totals[head])
                store(args[10], dtype, sequence * args[11] + (first_head + head) * head_dim, row)
            else:
                at = (part_index * num_kv_heads * heads_per_key + first_head + head) * (head_dim + 2)
                left = floats(args[23] + 4 * at, head_dim + 2)
                _join(memory_dtype, sums[head], left[:head_dim], np.float32(1.0))
                left[head_dim], left[head_dim + 1] = maxima[head], totals[head]
        task = claim(args)


@compiled
def _merge_kernel(args):
    num_heads, head_dim, dtype = args[2], args[3], args[4]
    row = np.empty(head_dim, np.float32)
    width = head_dim + 2
    task = claim(args)
    while task < args[TASKS]:
        merged, head = ints(args[7] + 24 * (task // num_heads), 3), task % num_heads
        sequence, first, count = merged[0], merged[1], merged[2]
        parts = floats(args[8] + 4 * first * num_heads * width, count * num_heads * width).reshape(count, -1)
        at = head * width
        largest = parts[0, at + head_dim]
        for part in range(1, count):
            largest = max(largest, parts[part, at + head_dim])
        total = np.float32(0.0)
        row[:] = 0.0
        for part in range(count):
            weight = exp(parts[part, at + head_dim] - largest)
            total += weight * parts[part, at + head_dim + 1]
            for i in range(head_dim):
                row[i] += weight * parts[part, at + i]
        for i in range(head_dim):
            row[i] /= total
        store(args[5], dtype, sequence * args[6] + head * head_dim, row)
        task = claim(args)
