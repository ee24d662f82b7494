"""The choice of the groups of tokens that queries attend to, by an index (``indexed_attention.py``), in Triton.

- Scores: one program per tile of a sequence's rows and share of its groups. It makes the keys of some groups of their
  tokens' index keys, which lie in the cache's blocks, and multiplies them by the index queries of one row after the
  other.
- The choice: one program per row. It finds the last score that is chosen digit by digit, from histograms of those that
  begin with the digits found before; then it writes the groups in their order. Of equal scores, the first are chosen.

Nothing is read on the host: grids follow from shapes, and what they have too many of returns. Invariants: a row's
scores and its choice depend on nothing but its sequence, to the bit: neither on other rows nor on how work is divided.
Incomplete groups are not read.

Shape suffixes: as in ``indexed_attention.py``; X channels of an index key and of what follows it; N sequences of a
launch, or groups of a tile; R rows of a pass; W groups that a sequence can have; S scores that are read together, B
bins of a histogram.
"""
# mypy: ignore-errors

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention_splits import num_decode_splits
from strandline.kernels.attention.attention_splits_triton import padded
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.stages_triton import staged

TILE_GROUPS = 16
"""Groups whose keys a program holds."""

MANY_ROWS = 32
"""Rows of a tile of prompts, for which keys of groups are made once."""

SCORE_BYTES = 2**26
"""Most bytes of scores at a time, where a row has fewer."""

BINS = tl.constexpr(256)
DIGIT_BITS = tl.constexpr(8)
BLOCK_S = 2048


class Pool(NamedTuple):
    """How the key of a group is made of its tokens' index keys."""

    function: Any
    """``mean_keys`` or ``weighed_keys``."""
    arguments: tuple[Any, ...]


@triton.jit
def _token_rows(memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, PAGE: tl.constexpr):
    """Return where the rows of tokens begin."""
    block_N = tl.load(table_ptr + token_N // PAGE, mask=is_read_N, other=0).to(tl.int64)
    return memory_ptr + block_N * stride_block + (token_N % PAGE) * stride_row


@triton.jit
def _next_rows(
    row_N,
    i,
    memory_ptr,
    stride_block,
    stride_row,
    table_ptr,
    token_N,
    is_read_N,
    GROUP_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return where the rows of the tokens after those at ``row_N`` begin."""
    if PAGE % GROUP_TOKENS == 0:
        return row_N + i * stride_row
    return _token_rows(memory_ptr, stride_block, stride_row, table_ptr, token_N + i, is_read_N, PAGE)


@triton.jit
def weighed_keys(
    pool,
    memory_ptr,
    stride_block,
    stride_row,
    table_ptr,
    group_N,
    is_read_N,
    GROUP_TOKENS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return the keys of groups as ``indexed_latent_attention.pooled_keys`` makes them."""
    bias_ptr = pool[0]
    dtype = memory_ptr.dtype.element_ty
    channel_C = tl.arange(0, BLOCK_C)
    is_channel_C = channel_C < INDEX_DIM
    is_read_NC = is_read_N[:, None] & is_channel_C[None, :]
    token_N = group_N * GROUP_TOKENS
    first_N = _token_rows(memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, PAGE)
    max_NC = tl.full([BLOCK_N, BLOCK_C], float("-inf"), dtype=tl.float32)
    sum_NC = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for i in tl.range(0, GROUP_TOKENS, loop_unroll_factor=8):
        row_N = _next_rows(
            first_N, i, memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, GROUP_TOKENS, PAGE
        )
        gate_NC = tl.load(row_N[:, None] + (INDEX_DIM + channel_C)[None, :], mask=is_read_NC, other=0.0)
        bias_C = tl.load(bias_ptr + i * INDEX_DIM + channel_C, mask=is_channel_C, other=0.0)
        gate_NC = gate_NC.to(tl.float32) + bias_C.to(tl.float32)[None, :]
        new_max_NC = tl.maximum(max_NC, gate_NC)
        sum_NC = sum_NC * tl.exp(max_NC - new_max_NC) + tl.exp(gate_NC - new_max_NC)
        max_NC = new_max_NC
    key_NC = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for i in tl.range(0, GROUP_TOKENS, loop_unroll_factor=8):
        row_N = _next_rows(
            first_N, i, memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, GROUP_TOKENS, PAGE
        )
        one_NC = tl.load(row_N[:, None] + channel_C[None, :], mask=is_read_NC, other=0.0)
        gate_NC = tl.load(row_N[:, None] + (INDEX_DIM + channel_C)[None, :], mask=is_read_NC, other=0.0)
        bias_C = tl.load(bias_ptr + i * INDEX_DIM + channel_C, mask=is_channel_C, other=0.0)
        gate_NC = gate_NC.to(tl.float32) + bias_C.to(tl.float32)[None, :]
        weight_NC = (tl.exp(gate_NC - max_NC) / sum_NC).to(dtype).to(tl.float32)
        key_NC += (weight_NC * one_NC.to(tl.float32)).to(dtype).to(tl.float32)
    return key_NC.to(dtype)


@triton.jit
def _mean(
    memory_ptr,
    stride_block,
    stride_row,
    table_ptr,
    group_N,
    is_read_N,
    channel_C,
    is_channel_C,
    GROUP_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token_N = group_N * GROUP_TOKENS
    first_N = _token_rows(memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, PAGE)
    sum_NC = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for i in tl.range(0, GROUP_TOKENS, loop_unroll_factor=8):
        row_N = _next_rows(
            first_N, i, memory_ptr, stride_block, stride_row, table_ptr, token_N, is_read_N, GROUP_TOKENS, PAGE
        )
        is_read_NC = is_read_N[:, None] & is_channel_C[None, :]
        sum_NC += tl.load(row_N[:, None] + channel_C[None, :], mask=is_read_NC, other=0.0).to(tl.float32)
    return (sum_NC / GROUP_TOKENS).to(memory_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def mean_keys(
    pool,
    memory_ptr,
    stride_block,
    stride_row,
    table_ptr,
    group_N,
    is_read_N,
    GROUP_TOKENS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return the keys of groups as ``indexed_attention.group_keys`` makes them."""
    norm_ptr, eps, inv_freq_ptr, num_pairs, factor, position_ptr, stride_position_block, dimension_ptr = pool
    dtype = memory_ptr.dtype.element_ty
    channel_C = tl.arange(0, BLOCK_C)
    is_channel_C = channel_C < INDEX_DIM
    turns_C = channel_C < 2 * num_pairs
    pair_C = tl.where(channel_C < num_pairs, channel_C, channel_C - num_pairs)
    partner_C = tl.where(turns_C, tl.where(channel_C < num_pairs, channel_C + num_pairs, pair_C), 0)
    # fmt: off
    key_NC = _mean(
        memory_ptr, stride_block, stride_row, table_ptr, group_N, is_read_N, channel_C, is_channel_C,
        GROUP_TOKENS, PAGE, BLOCK_N, BLOCK_C,
    )
    partner_NC = _mean(
        memory_ptr, stride_block, stride_row, table_ptr, group_N, is_read_N, partner_C, turns_C,
        GROUP_TOKENS, PAGE, BLOCK_N, BLOCK_C,
    )
    # fmt: on
    rstd_N1 = tl.rsqrt(tl.sum(key_NC * key_NC, axis=1) / INDEX_DIM + eps)[:, None]
    norm_C = tl.load(norm_ptr + channel_C, mask=is_channel_C, other=0.0).to(tl.float32)
    key_NC *= rstd_N1
    key_NC = (key_NC + key_NC * norm_C[None, :]).to(dtype).to(tl.float32)
    norm_C = tl.load(norm_ptr + partner_C, mask=turns_C, other=0.0).to(tl.float32)
    partner_NC *= rstd_N1
    partner_NC = (partner_NC + partner_NC * norm_C[None, :]).to(dtype).to(tl.float32)

    inv_freq_C = tl.load(inv_freq_ptr + pair_C, mask=turns_C, other=0.0)
    first_N = group_N * GROUP_TOKENS
    if position_ptr is None:
        angle_NC = first_N.to(tl.float32)[:, None] * inv_freq_C[None, :]
    else:
        row_N = _token_rows(position_ptr, stride_position_block, 3, table_ptr, first_N, is_read_N, PAGE)
        dimension_C = tl.load(dimension_ptr + pair_C, mask=turns_C, other=0)
        is_read_NC = is_read_N[:, None] & turns_C[None, :]
        angle_NC = tl.load(row_N[:, None] + dimension_C[None, :], mask=is_read_NC, other=0.0) * inv_freq_C[None, :]
    sin_NC = tl.sin(angle_NC) * factor
    sin_NC = tl.where((channel_C < num_pairs)[None, :], -sin_NC, sin_NC)
    turned_NC = key_NC * (tl.cos(angle_NC) * factor) + partner_NC * sin_NC
    return tl.where(turns_C[None, :], turned_NC, key_NC).to(dtype)


@triton.jit
def find_rows(tile, query_start_ptr, num_sequences, first_row, end_row, tile_rows, BLOCK_N: tl.constexpr):
    """Return the sequence that a tile of the rows ``[first_row, end_row)`` belongs to, and the tile's rows.

    The sequence is ``num_sequences`` if the tile belongs to none.
    """
    index_N = tl.arange(0, BLOCK_N)
    is_sequence_N = index_N < num_sequences
    start_N = tl.load(query_start_ptr + index_N, mask=is_sequence_N, other=0).to(tl.int32)
    stop_N = tl.load(query_start_ptr + index_N + 1, mask=is_sequence_N, other=0).to(tl.int32)
    start_N = tl.maximum(start_N, first_row)
    stop_N = tl.minimum(stop_N, end_row)
    num_tiles_N = tl.cdiv(tl.maximum(stop_N - start_N, 0), tile_rows)
    is_before_N = is_sequence_N & (tl.cumsum(num_tiles_N, axis=0) <= tile)
    sequence = tl.sum(is_before_N.to(tl.int32), axis=0)
    tile -= tl.sum(tl.where(is_before_N, num_tiles_N, 0), axis=0)
    is_found_N = index_N == sequence
    start = tl.sum(tl.where(is_found_N, start_N, 0), axis=0) + tile * tile_rows
    stop = tl.minimum(start + tile_rows, tl.sum(tl.where(is_found_N, stop_N, 0), axis=0))
    return sequence, start, stop


@triton.jit
def first_position(sequence, query_start_ptr, context_len_ptr):
    """Return the position in its sequence that row 0 of the step would have."""
    return (tl.load(context_len_ptr + sequence) - tl.load(query_start_ptr + sequence + 1)).to(tl.int32)


@staged
@triton.jit(
    do_not_specialize=[
        "stride_table",
        "stride_score",
        "num_sequences",
        "first_row",
        "end_row",
        "tile_rows",
        "num_splits",
    ],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _score_kernel(
    q_ptr,
    weight_ptr,
    memory_ptr,
    pool,
    table_ptr,
    query_start_ptr,
    context_len_ptr,
    score_ptr,
    stride_q_row,
    stride_q_head,
    stride_weight,
    stride_block,
    stride_row,
    stride_table,
    stride_score,
    num_sequences,
    first_row,
    end_row,
    tile_rows,
    num_splits,
    POOL: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the scores of all complete groups of some rows."""
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    sequence, start, stop = find_rows(
        tl.program_id(0), query_start_ptr, num_sequences, first_row, end_row, tile_rows, BLOCK_N
    )
    if sequence >= num_sequences:
        return
    row_0 = first_position(sequence, query_start_ptr, context_len_ptr)
    table_ptr += sequence.to(tl.int64) * stride_table
    q_ptr += start.to(tl.int64) * stride_q_row
    score_ptr += (start - first_row).to(tl.int64) * stride_score
    if weight_ptr is not None:
        weight_ptr += start.to(tl.int64) * stride_weight
    num_groups = (row_0 + stop) // GROUP_TOKENS
    head_J = tl.arange(0, BLOCK_J)
    channel_C = tl.arange(0, BLOCK_C)
    is_head_J = head_J < NUM_HEADS
    is_q_JC = is_head_J[:, None] & (channel_C < INDEX_DIM)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(num_groups, TILE_GROUPS), num_splits):
        group_N = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        is_group_N = group_N < num_groups
        key_NC = POOL(
            pool,
            memory_ptr,
            stride_block,
            stride_row,
            table_ptr,
            group_N,
            is_group_N,
            GROUP_TOKENS,
            INDEX_DIM,
            PAGE,
            TILE_GROUPS,
            BLOCK_C,
        )
        for row in range(start, stop):
            q_ptr_JC = q_ptr + (row - start) * stride_q_row + (head_J * stride_q_head)[:, None] + channel_C[None, :]
            q_JC = tl.load(q_ptr_JC, mask=is_q_JC, other=0.0)
            score_JN = tl.maximum(tl.dot(q_JC, tl.trans(key_NC), input_precision="ieee"), 0.0)
            if weight_ptr is not None:
                weight_J = tl.load(weight_ptr + (row - start) * stride_weight + head_J, mask=is_head_J, other=0.0)
                score_JN *= weight_J.to(tl.float32)[:, None]
            score_ptr_N = score_ptr + (row - start) * stride_score + group_N
            is_stored_N = group_N < (row_0 + row + 1) // GROUP_TOKENS
            tl.store(score_ptr_N, tl.sum(score_JN, axis=0), mask=is_stored_N)


@triton.jit
def _ordered(score_S):
    """Return integers from 0 to 2**32 - 1, in int64, that are ordered as numbers are; zeros are equal."""
    bits_S = tl.where(score_S == 0.0, 0.0, score_S).to(tl.int32, bitcast=True)
    return tl.where(bits_S < 0, bits_S ^ 0x7FFFFFFF, bits_S).to(tl.int64) + 2147483648


@triton.jit(
    do_not_specialize=["stride_score", "num_sequences", "first_row", "end_row"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_len_ptr"],
)
def _choose_kernel(
    score_ptr,
    query_start_ptr,
    context_len_ptr,
    group_ptr,
    stride_score,
    num_sequences,
    first_row,
    end_row,
    GROUP_TOKENS: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the groups that a row attends to, in their order, and -1 after them."""
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    sequence, row, _ = find_rows(tl.program_id(0), query_start_ptr, num_sequences, first_row, end_row, 1, BLOCK_N)
    if sequence >= num_sequences:
        return
    num_groups = (first_position(sequence, query_start_ptr, context_len_ptr) + row + 1) // GROUP_TOKENS
    score_ptr += (row - first_row).to(tl.int64) * stride_score
    group_ptr += row.to(tl.int64) * MAX_GROUPS
    index_S = tl.arange(0, BLOCK_S)
    if num_groups <= MAX_GROUPS:
        for first in range(0, MAX_GROUPS, BLOCK_S):
            group_S = first + index_S
            chosen_S = tl.where(group_S < num_groups, group_S, -1).to(tl.int64)
            tl.store(group_ptr + group_S, chosen_S, mask=group_S < MAX_GROUPS)
    else:
        bin_B = tl.arange(0, BINS)
        threshold = tl.full([], 0, dtype=tl.int64)
        # How many are still to be chosen among the scores that begin with the digits of the threshold.
        num_left = tl.full([], MAX_GROUPS, dtype=tl.int32)
        for digit in tl.static_range(32 // DIGIT_BITS):
            count_B = tl.zeros([BINS], dtype=tl.int32)
            for first in range(0, num_groups, BLOCK_S):
                is_score_S = first + index_S < num_groups
                key_S = _ordered(tl.load(score_ptr + first + index_S, mask=is_score_S, other=0.0))
                key_S = key_S >> (32 - DIGIT_BITS * (digit + 1))
                is_counted_S = is_score_S & (key_S >> DIGIT_BITS == threshold)
                count_B += tl.histogram((key_S & (BINS - 1)).to(tl.int32), BINS, mask=is_counted_S)
            num_above_B = tl.sum(count_B, axis=0) - tl.cumsum(count_B, axis=0)
            found = tl.max(tl.where(num_above_B + count_B >= num_left, bin_B, 0), axis=0)
            num_left -= tl.sum(tl.where(bin_B > found, count_B, 0), axis=0)
            threshold = (threshold << DIGIT_BITS) + found
        num_chosen = tl.full([], 0, dtype=tl.int32)
        for first in range(0, num_groups, BLOCK_S):
            is_score_S = first + index_S < num_groups
            key_S = _ordered(tl.load(score_ptr + first + index_S, mask=is_score_S, other=0.0))
            is_equal_S = is_score_S & (key_S == threshold)
            num_equal_S = tl.cumsum(is_equal_S.to(tl.int32), axis=0)
            is_chosen_S = (is_score_S & (key_S > threshold)) | (is_equal_S & (num_equal_S <= num_left))
            slot_S = num_chosen + tl.cumsum(is_chosen_S.to(tl.int32), axis=0) - 1
            tl.store(group_ptr + slot_S, (first + index_S).to(tl.int64), mask=is_chosen_S)
            num_left -= tl.sum(is_equal_S.to(tl.int32), axis=0)
            num_chosen += tl.sum(is_chosen_S.to(tl.int32), axis=0)


def choose_best(
    q_TJC: Tensor,
    weight_TJ: Tensor | None,
    memory_BPX: Tensor,
    pool: Pool,
    batch: AttentionBatch,
    group_tokens: int,
    max_groups: int,
) -> Tensor:
    """Return the groups of each row with the greatest scores, ``group_TK``, in their order, and -1 after them.

    Args:
        weight_TJ: weights of the index heads; None: each counts once.
    """
    num_rows, num_heads, index_dim = q_TJC.shape
    num_sequences, table_NM = len(batch.query_starts_N1) - 1, batch.block_table_NM
    group_TK = torch.empty(num_rows, max_groups, dtype=torch.int64, device=q_TJC.device)
    width = cdiv(table_NM.shape[1] * BLOCK_TOKENS, group_tokens)
    pass_rows = max(1, min(num_rows, SCORE_BYTES // (4 * width)))
    score_RW = torch.empty(pass_rows, width, dtype=torch.float32, device=q_TJC.device)
    block_n = sequences_block(num_sequences)
    for first in range(0, num_rows, pass_rows):
        end = min(first + pass_rows, num_rows)
        # A sequence's last tile may hold a single row.
        tile_rows = 1 if end - first <= num_sequences else MANY_ROWS
        num_tiles = end - first if tile_rows == 1 else cdiv(end - first, tile_rows) + num_sequences
        num_splits = num_decode_splits(num_tiles, cdiv(width, TILE_GROUPS))
        _score_kernel[(num_tiles, num_splits)](
            q_TJC, weight_TJ, memory_BPX, pool.arguments, table_NM, batch.query_starts_N1, batch.context_lens_N,
            score_RW, q_TJC.stride(0), q_TJC.stride(1), 0 if weight_TJ is None else weight_TJ.stride(0),
            memory_BPX.stride(0), memory_BPX.stride(1), table_NM.stride(0), width, num_sequences, first, end,
            tile_rows, num_splits,
            POOL=pool.function, PAGE=BLOCK_TOKENS, GROUP_TOKENS=group_tokens, NUM_HEADS=num_heads,
            INDEX_DIM=index_dim, BLOCK_J=padded(num_heads), BLOCK_C=padded(index_dim), TILE_GROUPS=TILE_GROUPS,
            BLOCK_N=block_n, num_warps=8, num_stages=2, **overlap_options(q_TJC),
        )  # fmt: skip
        _choose_kernel[(end - first,)](
            score_RW, batch.query_starts_N1, batch.context_lens_N, group_TK, width, num_sequences, first, end,
            GROUP_TOKENS=group_tokens, MAX_GROUPS=max_groups, BLOCK_S=BLOCK_S, BLOCK_N=block_n, num_warps=8,
            **overlap_options(q_TJC),
        )  # fmt: skip
    return group_TK


def sequences_block(num_sequences: int) -> int:
    """Return for how many sequences kernels are compiled: few sizes, so that a server compiles few kernels."""
    return 16 if num_sequences <= 16 else max(256, next_power_of_2(num_sequences))
