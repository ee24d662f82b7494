"""Softmax attention on a CPU: decodes read keys and values where they lie (``attention.py``).

A task is one key/value head of one *part* of a decode: at most ``PART_TOKENS`` of its tokens, cut on a grid of
positions, so that a sequence's bits depend on nothing but its own length. Its query heads are attended together, block
after block, by an online softmax; parts of a longer sequence are then merged.

How rows of keys and values are read is described in ``kv_rows_numba.py``.

Source: Dao et al., "Flash-Decoding" (parts).

Shape suffixes: as in ``attention.py``; further X parts, Y sequences of more than one part, H = G R query heads.
"""

# mypy: ignore-errors

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention import attend_sequence, attend_with_sinks, gathered_sequences, seen_span
from strandline.kernels.attention.kv_rows_numba import float32_rows, halves, join, split
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.gemm.linear import has_fast_gemms
from strandline.kernels.runtime_numba import (
    BFLOAT16,
    BLOCK_FIELDS,
    E4M3,
    arguments,
    block_arguments,
    claim,
    copy,
    exp,
    floats,
    helper,
    int32s,
    ints,
    kernel,
    kind,
    load,
    memory_kind,
    packed_rows,
    prefetch,
    store,
    words,
)

PART_TOKENS: Final = 512
"""Tokens of a part: a multiple of a block's."""

MAX_QUERY_TOKENS: Final = 128
"""Queries of a prefill that are attended together: their scores below the diagonal are computed for nothing."""

MIN_QUERY_TOKENS: Final = 32
"""Where fewer have room for their scores, torch attends them, which keeps none."""

MIN_SCORES: Final = 2**13
"""Pairs of query and key of a prefill; fewer are done sooner in torch's single call."""

SCORE_BYTES: Final = 2**25
"""Most bytes of scores at a time."""


def paged_attention(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Numba version of :func:`strandline.kernels.attention.attention.paged_attention`."""
    if q_THD.shape[2] % 2:
        raise ValueError(f"heads have {q_THD.shape[2]} channels; these kernels read them in halves")
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    if num_decodes:
        _attend_decodes(packed_rows(q_THD), memory, batch, num_decodes, out_THD, scale, window_tokens)
    if num_decodes == len(batch.context_lens):
        return out_THD
    q_TGRD, out_TGRD = (x.unflatten(1, (memory.k_BPGD.shape[2], -1)) for x in (q_THD, out_THD))
    for rows, k_LGD, v_LGD in gathered_sequences(memory, batch, num_decodes, window_tokens, q_THD.dtype):
        inputs = (q_TGRD[rows], k_LGD, v_LGD, out_TGRD[rows], scale * memory.k_scale, window_tokens)
        query_tokens = min(MAX_QUERY_TOKENS, SCORE_BYTES // (4 * q_THD.shape[1] * len(k_LGD)))
        num_queries = rows.stop - rows.start
        if query_tokens >= MIN_QUERY_TOKENS and is_causal and num_queries * len(k_LGD) >= MIN_SCORES:
            _attend_prefill(*inputs, min(query_tokens, num_queries), memory.sinks_H)
        elif memory.sinks_H is not None:
            attend_with_sinks(*inputs, memory.sinks_H, is_causal=is_causal)
        else:
            attend_sequence(*inputs, is_causal=is_causal)
        if memory.v_scale != 1:
            out_TGRD[rows] *= memory.v_scale
    return out_THD


@dataclass(frozen=True, slots=True)
class _Plan:
    """The parts of a step's decodes."""

    parts_X5: Tensor
    """Sequence, first position, end, whether it is the whole of what the sequence sees, and whether it is its first."""
    merged_Y3: Tensor
    """Sequence, first part and number of parts."""


def _plan(batch: AttentionBatch, num_decodes: int, window_tokens: int | None) -> _Plan:
    parts: list[tuple[int, int, int, bool, bool]] = []
    merged: list[tuple[int, int, int]] = []
    for sequence in range(num_decodes):
        span = seen_span(batch, sequence, window_tokens)
        first = len(parts)
        start = span.start
        is_whole = span.end <= (start // PART_TOKENS + 1) * PART_TOKENS
        while start < span.end:
            end = min((start // PART_TOKENS + 1) * PART_TOKENS, span.end)
            parts.append((sequence, start, end, is_whole, len(parts) == first))
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
    num_parts, num_merged = len(plan.parts_X5), len(plan.merged_Y3)
    # Per part and head the sums, divided by nothing yet, then the maximum and the total.
    scratch_XHD = torch.empty((num_parts, num_heads, head_dim + 2) if num_merged else 0)
    # All heads of a token lie together; bits are the same either way.
    heads_per_task = num_kv_heads if num_parts >= torch.get_num_threads() else 1
    shared = {
        "dtype": kind(q_THD),
        "head_dim": head_dim,
        "out": out_THD.data_ptr(),
        "out_stride": out_THD.stride(0),
        "scratch": scratch_XHD.data_ptr(),
    }
    _decode_kernel(
        num_parts * num_kv_heads // heads_per_task,
        **shared,
        num_kv_heads=num_kv_heads,
        heads_per_key=num_heads // num_kv_heads,
        heads_per_task=heads_per_task,
        memory_dtype=memory_kind(k_BPGD),
        scale=scale * memory.k_scale,
        v_scale=memory.v_scale,
        q=q_THD.data_ptr(),
        q_stride=q_THD.stride(0),
        parts=plan.parts_X5.data_ptr(),
        sinks=_address(memory.sinks_H),
        table=table_NM.data_ptr(),
        table_stride=table_NM.stride(0),
        **block_arguments(k_BPGD, v_BPGD),
    )
    if num_merged:
        _merge_kernel(num_merged * num_heads, **shared, num_heads=num_heads, merged=plan.merged_Y3.data_ptr())


def _address(sinks_H: Tensor | None) -> int:
    """Return where the sinks are; 0: there are none."""
    return 0 if sinks_H is None else sinks_H.data_ptr()


def _attend_prefill(
    q_TGRD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
    query_tokens: int,
    sinks_H: Tensor | None,
) -> None:
    """Attend as :func:`strandline.kernels.attention.attention.attend_sequence` does, ``query_tokens`` at a time.

    Query heads of a key/value head are rows of one product. Scores are float32; weights are rounded to the values'
    dtype where that multiplies fast.
    """
    num_queries, num_keys = len(q_TGRD), len(k_LGD)
    num_kv_heads, heads_per_key, head_dim = q_TGRD.shape[1:]
    num_heads, offset = num_kv_heads * heads_per_key, num_keys - num_queries
    q_GRTD, out_GRTD = q_TGRD.permute(1, 2, 0, 3), out_TGRD.permute(1, 2, 0, 3)
    weight_dtype = v_LGD.dtype if has_fast_gemms(v_LGD.dtype) else torch.float32
    k_GDL = k_LGD.float().permute(1, 2, 0)
    v_GLD = v_LGD.to(weight_dtype).transpose(0, 1)
    # Written again and again: pages of new memory cost as much as the softmax.
    scores = torch.empty(num_heads * query_tokens * num_keys)
    weights = scores if weight_dtype == torch.float32 else torch.empty_like(scores, dtype=weight_dtype)
    for start in range(0, num_queries, query_tokens):
        end = min(start + query_tokens, num_queries)
        first = 0 if window_tokens is None else max(0, offset + start - window_tokens + 1)
        last = offset + end
        q_GXD = q_GRTD[:, :, start:end].float().reshape(num_kv_heads, -1, head_dim)
        shape = (num_kv_heads, heads_per_key * (end - start), last - first)
        score_GXL, weight_GXL = (x[: prod(shape)].view(shape) for x in (scores, weights))
        torch.bmm(q_GXD, k_GDL[:, :, first:last], out=score_GXL)
        _softmax_kernel(
            num_heads * (end - start),
            num_queries=end - start,
            num_keys=last - first,
            offset=offset + start - first,
            window=window_tokens or num_keys,
            scale=scale,
            scores=score_GXL.data_ptr(),
            weights=weight_GXL.data_ptr(),
            sinks=_address(sinks_H),
            dtype=kind(weight_GXL),
        )
        out_GXD = torch.bmm(weight_GXL, v_GLD[:, first:last])
        out_GRTD[:, :, start:end] = out_GXD.view(num_kv_heads, heads_per_key, -1, head_dim)


@helper
def _largest(scores):
    """Return the largest score, or NaN; as integers of the same order they are compared many at a time."""
    numbers = scores.view(np.int32)
    largest = np.int32(-(2**31))
    for i in range(numbers.size):
        number = np.int32(numbers[i])
        largest = max(largest, np.int32(number ^ ((number >> 31) & np.int32(0x7FFFFFFF))))
    return np.int32(largest ^ ((largest >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)


@kernel("num_queries num_keys offset window scale:float scores weights sinks dtype")
def _softmax_kernel(tasks):
    args = arguments(tasks)
    num_keys, scale = args.num_keys, np.float32(args.scale)
    weights = np.empty(num_keys, np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        end = args.offset + task % args.num_queries + 1
        start = max(0, end - args.window)
        scores = floats(args.scores + 4 * (task * num_keys + start), end - start)
        seen = weights[start:end]
        largest = _largest(scores)
        total = np.float32(0.0)
        if args.sinks != 0:
            sink = floats(args.sinks + 4 * (task // args.num_queries), 1)[0]
            largest = max(largest, sink / scale)
            total = exp(sink - largest * scale)
        for i in range(seen.size):
            weight = exp((scores[i] - largest) * scale)
            seen[i] = weight
            total += weight
        factor = np.float32(1.0) / total
        for i in range(seen.size):
            seen[i] *= factor
        weights[:start] = 0.0
        weights[end:] = 0.0
        store(args.weights, args.dtype, task * num_keys, weights)
        task = claim(tasks)


@helper
def _fetch(rows, first):
    """Prefetch rows ``first`` to ``first + 3``. ``rows``: address of row 0, bytes between rows, bytes per row."""
    address, stride_bytes, row_bytes = rows
    for row in range(first, first + 4):
        for offset in range(0, row_bytes, 64):
            prefetch(address + row * stride_bytes + offset)


@helper
def _score(keys, stride, count, queries, scores, fetch):
    """Multiply ``count`` rows of keys with pairs of queries, four rows at a time; the last row may come twice.

    Meanwhile as many rows of what is read next are prefetched.
    """
    num_heads, head_dim = queries.shape
    half = head_dim // 2
    for head in range(0, num_heads, 2):
        query, other = queries[head], queries[head + 1]
        for token in range(0, count, 4):
            if head == 0:
                _fetch(fetch, token)
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
        largest = max(maxima[head], _largest(weights[:count]))
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
def _add(values, stride, count, weights, sums, fetch):
    """Add ``count`` weighted rows of values to the sums of pairs of heads; for the rest as ``_score``."""
    num_heads, head_dim = sums.shape
    half = head_dim // 2
    for head in range(0, num_heads, 2):
        low_a, high_a = sums[head, :half], sums[head, half:]
        low_b, high_b = sums[head + 1, :half], sums[head + 1, half:]
        for token in range(0, count, 4):
            if head == 0:
                _fetch(fetch, token)
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
def _begin(sinks, first_kv_head, heads_per_key, maxima, totals):
    """Set what online softmaxes of key/value heads start from: nothing, or sinks at an address other than 0."""
    maxima[:] = -np.inf
    totals[:] = 0.0
    for kv_head in range(len(maxima) if sinks != 0 else 0):
        at = 4 * (first_kv_head + kv_head) * heads_per_key
        # An assignment of a slice would bring a message about shapes, whose text takes a second to compile.
        copy(floats(sinks + at, heads_per_key), maxima[kv_head])
        totals[kv_head, :heads_per_key] = 1.0


SHARED = "dtype head_dim out out_stride scratch "


@kernel(
    SHARED + BLOCK_FIELDS + "num_kv_heads heads_per_key heads_per_task memory_dtype scale:float v_scale:float q "
    "q_stride parts sinks table table_stride"
)
def _decode_kernel(tasks):
    args = arguments(tasks)
    heads_per_key, heads_per_task, head_dim, dtype = args.heads_per_key, args.heads_per_task, args.head_dim, args.dtype
    memory_dtype, k_stride, v_stride = args.memory_dtype, args.k_token_stride, args.v_token_stride
    v_scale = np.float32(args.v_scale)
    tasks_per_part = args.num_kv_heads // heads_per_task
    padded_heads = (heads_per_key + 1) // 2 * 2
    item = 2 if memory_dtype == BFLOAT16 else 1 if memory_dtype == E4M3 else 4
    row_bytes = item * head_dim
    row = np.empty(head_dim, np.float32)
    converted = np.empty((BLOCK_TOKENS if memory_dtype == E4M3 else 0, head_dim), np.float32)
    queries = np.zeros((heads_per_task, padded_heads, head_dim), np.float32)
    sums = np.zeros((heads_per_task, padded_heads, head_dim), np.float32)
    scores = np.zeros((heads_per_task, padded_heads, BLOCK_TOKENS), np.float32)
    maxima = np.empty((heads_per_task, padded_heads), np.float32)
    totals = np.empty((heads_per_task, padded_heads), np.float32)
    task = claim(tasks)
    while task < args.num_tasks:
        part_index, first_kv_head = task // tasks_per_part, task % tasks_per_part * heads_per_task
        part = ints(args.parts + 40 * part_index, 5)
        sequence, start, end, is_whole = part[0], part[1], part[2], part[3]
        table = int32s(args.table + 4 * sequence * args.table_stride, (end - 1) // BLOCK_TOKENS + 1)
        for kv_head in range(heads_per_task):
            for head in range(heads_per_key):
                query_head = (first_kv_head + kv_head) * heads_per_key + head
                load(args.q, dtype, sequence * args.q_stride + query_head * head_dim, row)
                split(memory_dtype, row, queries[kv_head, head], np.float32(args.scale))
        sums[:] = 0.0
        _begin(args.sinks if part[4] else 0, first_kv_head, heads_per_key, maxima, totals)

        while start < end:
            block, offset = np.int64(table[start // BLOCK_TOKENS]), start % BLOCK_TOKENS
            count = min(end - start, BLOCK_TOKENS - offset)
            key_at = block * args.k_block_stride + offset * k_stride + first_kv_head * args.k_head_stride
            value_at = block * args.v_block_stride + offset * v_stride + first_kv_head * args.v_head_stride
            start += count
            next_at = key_at
            if start < end:
                next_at = np.int64(table[start // BLOCK_TOKENS]) * args.k_block_stride
                next_at += first_kv_head * args.k_head_stride
            fetch_bytes = row_bytes if heads_per_task > 1 else item * k_stride
            for kv_head in range(heads_per_task):
                at, score = key_at + kv_head * args.k_head_stride, scores[kv_head]
                fetch = (args.v + item * value_at + kv_head * count * fetch_bytes, fetch_bytes, row_bytes)
                if memory_dtype == BFLOAT16:
                    keys = words(args.k + 2 * at, BLOCK_TOKENS * k_stride)
                    _score(keys, k_stride // 2, count, queries[kv_head], score, fetch)
                else:
                    address, stride = float32_rows(args.k, at, k_stride, memory_dtype, count, converted)
                    keys = floats(address, BLOCK_TOKENS * stride)
                    _score(keys, stride, count, queries[kv_head], score, fetch)
                _weigh(score, count, maxima[kv_head], totals[kv_head], sums[kv_head])
            for kv_head in range(heads_per_task):
                at, score = value_at + kv_head * args.v_head_stride, scores[kv_head]
                fetch = (args.k + item * next_at + kv_head * count * fetch_bytes, fetch_bytes, row_bytes)
                if memory_dtype == BFLOAT16:
                    values = words(args.v + 2 * at, BLOCK_TOKENS * v_stride)
                    _add(values, v_stride // 2, count, score, sums[kv_head], fetch)
                else:
                    address, stride = float32_rows(args.v, at, v_stride, memory_dtype, count, converted)
                    values = floats(address, BLOCK_TOKENS * stride)
                    _add(values, stride, count, score, sums[kv_head], fetch)

        for kv_head in range(heads_per_task):
            for head in range(heads_per_key):
                query_head = (first_kv_head + kv_head) * heads_per_key + head
                if is_whole:
                    join(memory_dtype, sums[kv_head, head], row, v_scale / totals[kv_head, head])
                    store(args.out, dtype, sequence * args.out_stride + query_head * head_dim, row)
                else:
                    at = (part_index * args.num_kv_heads * heads_per_key + query_head) * (head_dim + 2)
                    left = floats(args.scratch + 4 * at, head_dim + 2)
                    join(memory_dtype, sums[kv_head, head], left[:head_dim], v_scale)
                    left[head_dim], left[head_dim + 1] = maxima[kv_head, head], totals[kv_head, head]
        task = claim(tasks)


@kernel(SHARED + "num_heads merged")
def _merge_kernel(tasks):
    args = arguments(tasks)
    num_heads, head_dim = args.num_heads, args.head_dim
    row = np.empty(head_dim, np.float32)
    width = head_dim + 2
    task = claim(tasks)
    while task < args.num_tasks:
        merged, head = ints(args.merged + 24 * (task // num_heads), 3), task % num_heads
        sequence, first, count = merged[0], merged[1], merged[2]
        parts = floats(args.scratch + 4 * first * num_heads * width, count * num_heads * width).reshape(count, -1)
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
        store(args.out, args.dtype, sequence * args.out_stride + head * head_dim, row)
        task = claim(tasks)
