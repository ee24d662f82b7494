"""Attention of a program's rows to keys and values that lie in blocks, tile by tile, in Triton.

What the kernels of ``attention_triton.py`` share: the loop over tiles of keys, scores that depend on distances, and
sinks.

Shape suffixes: as in ``attention_triton.py``.
"""
# mypy: ignore-errors

from math import e, log2

import triton
import triton.language as tl

from strandline.kernels.attention.attention_prefix_triton import widened
from strandline.kernels.attention.tiles_triton import no_keys, take_in

LOG2_E: tl.constexpr = tl.constexpr(log2(e))


@triton.jit
def _added_scores(
    relative,
    position_M,
    first_position,
    key,
    NUM_PROFILES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return what queries add to their scores of a tile's keys, divided by the scale of scores.

    Args:
        relative: mixed factors of the rows, the profiles, the number of distances, and one over the scale of scores.
        first_position: position of the first row.
        SPAN: distances between the tile's keys and all rows; as many as keys if all rows have the same position.
    """
    mix_MC, profiles_ptr, num_distances, unscale = relative
    key_K = key + tl.arange(0, BLOCK_K)
    profile_C = tl.arange(0, BLOCK_C)
    if SPAN == BLOCK_K:
        distance_X = first_position - key_K
    else:
        distance_X = first_position - key - (BLOCK_K - 1) + tl.arange(0, SPAN)
    is_read_CX = (profile_C < NUM_PROFILES)[:, None] & ((distance_X >= 0) & (distance_X < num_distances))[None, :]
    profile_ptr_CX = profiles_ptr + profile_C[:, None] * num_distances + distance_X[None, :]
    profile_CX = tl.load(profile_ptr_CX, mask=is_read_CX, other=0.0).to(mix_MC.dtype)
    added_MX = tl.dot(mix_MC, profile_CX, input_precision=PRECISION)
    if SPAN != BLOCK_K:
        index_MK = (position_M - first_position)[:, None] + (BLOCK_K - 1 - tl.arange(0, BLOCK_K))[None, :]
        added_MX = tl.gather(added_MX, index_MK, axis=1)
    return added_MX * unscale


@triton.jit
def attend_tiles(
    acc_MD,
    max_M,
    sum_M,
    q_MD,
    k_ptr,
    v_ptr,
    table_ptr,
    first_tile,
    last_tile,
    next_block,
    first_key,
    last_key,
    position_M,
    last_seen_M,
    window_tokens,
    relative,
    first_position,
    scale_log2,
    stride_block,
    stride_row,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PROFILES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    IS_MASKED: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in the tiles ``[first_tile, last_tile)`` of keys; maxima are in units of log2.

    Masked, keys outside ``[first_key, last_key)`` are not read, and rows may see none of a tile's keys. A row sees keys
    up to ``last_seen``; the window ends at its own position. ``relative`` is as in ``_added_scores``, or None.
    ``next_block`` is the first tile's, and each tile's is then loaded with the tile before it; None: with its own.
    """
    row_K = tl.arange(0, BLOCK_K)
    channel_D = tl.arange(0, BLOCK_D)
    for tile in range(first_tile, last_tile):
        key = tile * BLOCK_K
        if next_block is not None:
            block = next_block
            next_block = tl.load(table_ptr + (key + BLOCK_K) // PAGE, mask=tile + 1 < last_tile, other=0)
        else:
            block = tl.load(table_ptr + key // PAGE)
        key_K = key + row_K
        offset_KD = (key % PAGE + row_K)[:, None] * stride_row + channel_D[None, :]
        k_ptr_KD = k_ptr + block.to(tl.int64) * stride_block + offset_KD
        v_ptr_KD = v_ptr + block.to(tl.int64) * stride_block + offset_KD
        if IS_MASKED:
            is_read_KD = ((key_K >= first_key) & (key_K < last_key))[:, None]
            if BLOCK_D != HEAD_DIM:
                is_read_KD = is_read_KD & (channel_D < HEAD_DIM)[None, :]
            k_KD = tl.load(k_ptr_KD, mask=is_read_KD, other=0.0)
            v_KD = tl.load(v_ptr_KD, mask=is_read_KD, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k_KD = tl.load(k_ptr_KD, mask=(channel_D < HEAD_DIM)[None, :], other=0.0)
            v_KD = tl.load(v_ptr_KD, mask=(channel_D < HEAD_DIM)[None, :], other=0.0)
        else:
            k_KD = tl.load(k_ptr_KD)
            v_KD = tl.load(v_ptr_KD)
        # From e4m3 to the queries' dtype: exact.
        k_KD, v_KD = widened(k_KD, q_MD.dtype), widened(v_KD, q_MD.dtype)
        score_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision=PRECISION)
        if relative is not None:
            score_MK += _added_scores(
                relative, position_M, first_position, key, NUM_PROFILES, BLOCK_C, BLOCK_K, SPAN, PRECISION
            )
        if IS_MASKED:
            is_seen_MK = key_K[None, :] <= last_seen_M[:, None]
            if IS_WINDOWED:
                is_seen_MK = is_seen_MK & (key_K[None, :] > position_M[:, None] - window_tokens)
            score_MK = tl.where(is_seen_MK, score_MK, float("-inf"))
        acc_MD, max_M, sum_M = take_in(acc_MD, max_M, sum_M, score_MK, v_KD, scale_log2, IS_MASKED, PRECISION)
    return acc_MD, max_M, sum_M


@triton.jit
def mixed_rows(relative, row_M, head_M, is_row_M, scale_log2, NUM_PROFILES: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return ``relative`` as ``_added_scores`` takes it."""
    mix_ptr, stride_row, stride_head, profiles_ptr, num_distances = relative
    profile_C = tl.arange(0, BLOCK_C)
    mix_ptr_MC = mix_ptr + (row_M * stride_row + head_M * stride_head)[:, None] + profile_C[None, :]
    mix_MC = tl.load(mix_ptr_MC, mask=is_row_M[:, None] & (profile_C < NUM_PROFILES)[None, :], other=0.0)
    return mix_MC, profiles_ptr, num_distances, LOG2_E / scale_log2


@triton.jit
def end_of_far(relative, position, first_tile, last_tile, BLOCK_K: tl.constexpr):
    """Return the end of the tiles whose keys are further than all distances from a position and those after it."""
    _, _, num_distances, _ = relative
    return tl.minimum(tl.maximum((position - num_distances + 1) // BLOCK_K, first_tile), last_tile)


@triton.jit
def block_of(table_ptr, tile, end_tile, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the block that a tile of keys lies in; 0 if there is no such tile before ``end_tile``."""
    return tl.load(table_ptr + tile * BLOCK_K // PAGE, mask=tile < end_tile, other=0)


@triton.jit
def attend_few(
    q_MD,
    k_ptr,
    v_ptr,
    table_ptr,
    first_tile,
    end_tile,
    first_block,
    first_key,
    last_key,
    position_M,
    last_seen_M,
    window_tokens,
    relative,
    first_position,
    scale_log2,
    stride_block,
    stride_row,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PROFILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return what ``take_in`` does after all tiles of a program that has few of them: each is masked, so that one loop
    loads them ahead; arguments are as in ``attend_tiles``.
    """
    acc_MD, max_M, sum_M = no_keys(BLOCK_M, BLOCK_D)
    # fmt: off
    if relative is not None:
        far_tile = end_of_far(relative, first_position, first_tile, end_tile, BLOCK_K)
        acc_MD, max_M, sum_M = attend_tiles(
            acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, first_tile, far_tile, first_block, first_key,
            last_key, position_M, last_seen_M, window_tokens, None, first_position, scale_log2, stride_block,
            stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, True, IS_WINDOWED, PRECISION,
        )
        first_tile = far_tile
        first_block = block_of(table_ptr, first_tile, end_tile, PAGE, BLOCK_K)
    return attend_tiles(
        acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, first_tile, end_tile, first_block, first_key,
        last_key, position_M, last_seen_M, window_tokens, relative, first_position, scale_log2, stride_block,
        stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, True, IS_WINDOWED, PRECISION,
    )
    # fmt: on


@triton.jit
def add_sinks(acc_MD, max_M, sum_M, sinks, row_M, head_M, has_sink_M):
    """Take in the score of each row's head that no value belongs to."""
    sinks_ptr, stride_row = sinks
    sink_M = tl.load(sinks_ptr + row_M * stride_row + head_M, mask=has_sink_M, other=float("-inf"))
    sink_M = sink_M.to(tl.float32) * LOG2_E
    new_max_M = tl.maximum(max_M, sink_M)
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    decay_M = tl.exp2(max_M - base_M)
    return acc_MD * decay_M[:, None], new_max_M, sum_M * decay_M + tl.exp2(sink_M - base_M)
