"""Softmax attention whose keys and values are one latent per token, in Triton.

``stored_tokens_triton.py`` stores the step's latents. The kernel here has an online softmax over tiles of keys, as
``attention_triton.py``, with all heads as the query heads of one key/value head. A tile of latents is read once: its
first channels are both part of the keys and the values, the rest is multiplied by itself.

- Decodes: one program per sequence, up to 64 heads and *split* of the context.
- Prefills: one program per tile of rows, pairs of a token and a head, and split; heaviest tiles first.

How work is divided, and what holds for deterministic engines, is as in ``attention_triton.py``.

Invariants: those of ``attention_triton.py``.

Source: see ``latent_attention.py``.

Shape suffixes: as in ``latent_attention.py`` and ``attention_triton.py``; R channels of a latent past its value.
"""
# mypy: ignore-errors

from functools import partial
from math import log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention_splits import parts_of, plan_decodes, plan_prefills
from strandline.kernels.attention.attention_splits_triton import combine, padded, scratch, store_rows
from strandline.kernels.attention.stored_tokens_triton import store_tokens
from strandline.kernels.attention.tiles_triton import FLOAT32_TILE, Tile, locate_tile, no_keys, take_in
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.gpu import gpu_of
from strandline.kernels.launch import first_that_fits
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.stages_triton import staged
from strandline.kernels.state_triton import FLOAT32_PRECISION

DECODE_TILE = Tile(rows=64, keys=32, num_warps=8, num_stages=3)
"""At most as many rows as there are heads."""

PREFILL_TILE = Tile(rows=64, keys=32, num_warps=8, num_stages=3)
"""128 accumulators per thread for values of 512 channels; queries and three tiles of latents fill shared memory."""

SMALL_ROWS = 32
"""The rows of a tile where the others do not fit: for values of 512 channels on GPUs with 99 KiB of shared memory."""

MIN_SPLIT_BLOCKS = 2
"""Blocks of a decode's split: its result is as large as its keys else."""


@triton.jit
def _attend(
    acc_MV,
    max_M,
    sum_M,
    q_MV,
    q_MR,
    latent_ptr,
    table_ptr,
    first_tile,
    last_tile,
    end_key,
    position_M,
    scale_log2,
    stride_block,
    stride_row,
    PAGE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in the tiles ``[first_tile, last_tile)`` of keys; maxima are in units of log2.

    Masked, keys from ``end_key`` on are not read, and rows may see none of a tile's keys.
    """
    row_K = tl.arange(0, BLOCK_K)
    channel_V = tl.arange(0, BLOCK_V)
    channel_R = tl.arange(0, BLOCK_R)
    next_block = tl.load(table_ptr + first_tile * BLOCK_K // PAGE, mask=first_tile < last_tile, other=0)
    for tile in range(first_tile, last_tile):
        key = tile * BLOCK_K
        block = next_block
        next_block = tl.load(table_ptr + (key + BLOCK_K) // PAGE, mask=tile + 1 < last_tile, other=0)
        key_K = key + row_K
        row_ptr = latent_ptr + block.to(tl.int64) * stride_block
        row_offset_K1 = ((key % PAGE + row_K) * stride_row)[:, None]
        is_read_KV = (channel_V < VALUE_DIM)[None, :]
        is_read_KR = (channel_R < REST_DIM)[None, :]
        if IS_MASKED:
            is_read_KV = is_read_KV & (key_K < end_key)[:, None]
            is_read_KR = is_read_KR & (key_K < end_key)[:, None]
        v_KV = tl.load(row_ptr + row_offset_K1 + channel_V[None, :], mask=is_read_KV, other=0.0)
        k_KR = tl.load(row_ptr + row_offset_K1 + (VALUE_DIM + channel_R)[None, :], mask=is_read_KR, other=0.0)
        score_MK = tl.dot(q_MR, tl.trans(k_KR), input_precision=PRECISION)
        score_MK = tl.dot(q_MV, tl.trans(v_KV), acc=score_MK, input_precision=PRECISION)
        if IS_MASKED:
            score_MK = tl.where(key_K[None, :] <= position_M[:, None], score_MK, float("-inf"))
        acc_MV, max_M, sum_M = take_in(acc_MV, max_M, sum_M, score_MK, v_KV, scale_log2, IS_MASKED, PRECISION)
    return acc_MV, max_M, sum_M


@staged
@triton.jit(
    do_not_specialize=[
        "stride_table",
        "num_splits",
        "split_tiles",
        "first_sequence",
        "first_row",
        "num_prefills",
        "num_tiles",
    ],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _attend_kernel(
    q_ptr,
    latent_ptr,
    table_ptr,
    query_start_ptr,
    context_len_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_row,
    stride_table,
    num_splits,
    split_tiles,
    first_sequence,
    first_row,
    num_prefills,
    num_tiles,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend a tile of rows, pairs of a token and a head, to one split of the context.

    Decodes: ``num_tiles`` is that of a sequence, and prefills count for nothing.
    """
    split = tl.program_id(1)
    if IS_DECODE:
        sequence = (tl.program_id(0) // num_tiles).to(tl.int64)
        tile = tl.program_id(0) % num_tiles
        query_start = sequence.to(tl.int32)
        num_queries = 1
    else:
        # Programs start in the order of their index: a sequence's last tiles, which see most keys, go first.
        tile = num_tiles - 1 - tl.program_id(0)
        prefill, tile = locate_tile(tile, query_start_ptr + first_sequence, num_prefills, NUM_HEADS, BLOCK_M, BLOCK_N)
        # A CUDA graph's grid is sized for the largest number of tiles; the surplus programs return.
        if prefill >= num_prefills:
            return
        sequence = (first_sequence + prefill).to(tl.int64)
        query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
        num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    context_len = tl.load(context_len_ptr + sequence).to(tl.int32)

    packed_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = packed_M // NUM_HEADS
    head_M = packed_M % NUM_HEADS
    is_row_M = query_M < num_queries
    row_M = (query_start + query_M).to(tl.int64)
    first_position = context_len - num_queries
    position_M = first_position + query_M
    last_position = first_position + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // NUM_HEADS, num_queries - 1)
    first_position += tile * BLOCK_M // NUM_HEADS

    # Either num_splits splits share the keys, or each has split_tiles tiles of them, whatever the context's length.
    end_tile = tl.cdiv(last_position + 1, BLOCK_K)
    tiles_per_split = tl.cdiv(end_tile, num_splits)
    if split_tiles > 0:
        tiles_per_split = split_tiles
    first_tile = split * tiles_per_split
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)
    # Tiles of keys: [first_tile, last_whole) are seen whole by all rows, [last_whole, end_tile) cut by the diagonal.
    last_whole = first_tile
    if not IS_DECODE:
        last_whole = tl.minimum(tl.maximum((first_position + 1) // BLOCK_K, first_tile), end_tile)

    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    channel_V = tl.arange(0, BLOCK_V)
    channel_R = tl.arange(0, BLOCK_R)
    q_ptr_M1 = q_ptr + (row_M * stride_q_row + head_M * stride_q_head)[:, None]
    is_q_MV = is_row_M[:, None] & (channel_V < VALUE_DIM)[None, :]
    is_q_MR = is_row_M[:, None] & (channel_R < REST_DIM)[None, :]
    q_MV = tl.load(q_ptr_M1 + channel_V[None, :], mask=is_q_MV, other=0.0)
    q_MR = tl.load(q_ptr_M1 + (VALUE_DIM + channel_R)[None, :], mask=is_q_MR, other=0.0)
    table_ptr += sequence * stride_table
    acc_MV, max_M, sum_M = no_keys(BLOCK_M, BLOCK_V)
    # fmt: off
    if not IS_DECODE:
        acc_MV, max_M, sum_M = _attend(
            acc_MV, max_M, sum_M, q_MV, q_MR, latent_ptr, table_ptr, first_tile, last_whole, last_position + 1,
            position_M, scale_log2, stride_block, stride_row,
            PAGE, VALUE_DIM, REST_DIM, BLOCK_K, BLOCK_V, BLOCK_R, False, PRECISION,
        )
    acc_MV, max_M, sum_M = _attend(
        acc_MV, max_M, sum_M, q_MV, q_MR, latent_ptr, table_ptr, last_whole, end_tile, last_position + 1,
        position_M, scale_log2, stride_block, stride_row,
        PAGE, VALUE_DIM, REST_DIM, BLOCK_K, BLOCK_V, BLOCK_R, True, PRECISION,
    )
    store_rows(
        acc_MV, max_M, sum_M, out_ptr, partial_ptr, lse_ptr, row_M, head_M, is_row_M, first_row, split, num_splits,
        1.0, NUM_HEADS, VALUE_DIM, BLOCK_V, IS_SPLIT,
    )
    # fmt: on


class _Call(NamedTuple):
    """The arguments of one call, and the tensor that it fills."""

    q_THD: Tensor
    latent_BPD: Tensor
    batch: AttentionBatch
    out_THV: Tensor
    scale: float


def latent_attention(
    q_THD: Tensor,
    latent_TD: Tensor,
    latent_BPD: Tensor,
    batch: AttentionBatch,
    num_decodes: int,
    value_dim: int,
    *,
    scale: float,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Store the step's latents in their blocks, then attend every token to its sequence's up to itself.

    As ``latent_attention.latent_attention``; ``out_THV`` is contiguous. Decodes read no host
    tuple of the batch. Needs ``scale > 0`` and contiguous channels; rows, heads and blocks may have any stride. With
    fixed launches, splits have a length and an order that depend on nothing but the sequence.
    """
    if batch.parts:
        attend = partial(latent_attention, value_dim=value_dim, scale=scale, launches=launches)
        parts = parts_of(batch, q_THD, latent_TD)
        return torch.cat([attend(own_THD, own_TD, latent_BPD, part, 0) for own_THD, own_TD, part in parts])
    store_tokens(latent_TD, latent_BPD, batch)
    out_THV = torch.empty(*q_THD.shape[:2], value_dim, dtype=q_THD.dtype, device=q_THD.device)
    call = _Call(q_THD, latent_BPD, batch, out_THV, scale)
    if num_decodes:
        _attend_decodes(call, num_decodes, launches)
    if len(q_THD) > num_decodes:
        _attend_prefills(call, num_decodes, launches)
    return out_THV


def _attend_decodes(call: _Call, num_decodes: int, launches: Launches) -> None:
    """Write the rows of the decodes."""
    q_THD, _, batch, out_THV, _ = call
    tile = _tile(q_THD, DECODE_TILE, 1)
    num_tiles = cdiv(q_THD.shape[1], tile.rows)
    num_blocks = batch.block_table_NM.shape[1]
    plan = plan_decodes(num_decodes * num_tiles, num_blocks, launches, min_split_blocks=MIN_SPLIT_BLOCKS)
    num_splits, is_split = plan.num_splits, plan.is_split
    partials = scratch(out_THV, num_decodes, num_splits, is_needed=is_split)
    where = (plan.split_blocks * (BLOCK_TOKENS // tile.keys), 0, 0, 0, num_tiles)
    _launch(call, (num_decodes * num_tiles, num_splits), partials, tile, where, 16, is_decode=True, is_split=is_split)
    if is_split:
        combine(*partials, out_THV, 0, num_decodes, num_splits)


def _attend_prefills(call: _Call, num_decodes: int, launches: Launches) -> None:
    """Write the rows after the decodes'."""
    q_THD, _, batch, out_THV, _ = call
    tile = _tile(q_THD, PREFILL_TILE, batch.most_rows)
    end, first_row = len(batch.query_starts) - 1, batch.query_starts[num_decodes]
    plan = plan_prefills(batch, (num_decodes, end), len(q_THD), (q_THD.shape[1], 1), tile[:2], None, launches)
    is_split = plan.num_splits > 1
    partials = scratch(out_THV, plan.num_tokens, plan.num_splits, is_needed=is_split)
    grid, where = (plan.num_tiles, plan.num_splits), (0, num_decodes, first_row, end - num_decodes, plan.num_tiles)
    _launch(call, grid, partials, tile, where, plan.max_prefills, is_decode=False, is_split=is_split)
    if is_split:
        combine(*partials, out_THV, first_row, plan.num_tokens, plan.num_splits)


def _tile(q_THD: Tensor, tile: Tile, most_tokens: int | None) -> Tile:
    """Return the tile with no more rows than a sequence of ``most_tokens`` has, or fit into shared memory."""
    if q_THD.dtype == torch.float32:
        return FLOAT32_TILE

    def shared_bytes(tile: Tile) -> int:
        """Queries, latents and weights."""
        return q_THD.element_size() * ((tile.rows + tile.keys) * q_THD.shape[2] + tile.rows * tile.keys)

    tile = first_that_fits((tile, tile._replace(rows=SMALL_ROWS)), shared_bytes, gpu_of(q_THD.device))
    if most_tokens is None:
        return tile
    return tile._replace(rows=min(tile.rows, max(16, next_power_of_2(most_tokens * q_THD.shape[1]))))


def _launch(
    call: _Call,
    grid: tuple[int, int],
    partials: tuple[Tensor, Tensor],
    tile: Tile,
    where: tuple[int, ...],
    max_prefills: int,
    *,
    is_decode: bool,
    is_split: bool,
) -> None:
    """Launch the kernel; ``where`` are its arguments from ``split_tiles`` on."""
    q_THD, latent_BPD, batch, out_THV, scale = call
    _, num_heads, num_channels = q_THD.shape
    value_dim = out_THV.shape[2]
    _attend_kernel[grid](
        q_THD, latent_BPD, batch.block_table_NM, batch.query_starts_N1, batch.context_lens_N, out_THV, *partials,
        scale * log2(torch.e), q_THD.stride(0), q_THD.stride(1), latent_BPD.stride(0), latent_BPD.stride(1),
        batch.block_table_NM.stride(0), grid[1], *where,
        PAGE=BLOCK_TOKENS, NUM_HEADS=num_heads, VALUE_DIM=value_dim, REST_DIM=num_channels - value_dim,
        BLOCK_M=tile.rows, BLOCK_K=tile.keys, BLOCK_V=padded(value_dim), BLOCK_R=padded(num_channels - value_dim),
        BLOCK_N=max_prefills, IS_DECODE=is_decode, IS_SPLIT=is_split, PRECISION=FLOAT32_PRECISION,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap_options(q_THD),
    )  # fmt: skip
