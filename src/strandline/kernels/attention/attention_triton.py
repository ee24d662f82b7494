"""Softmax attention over keys and values that lie in blocks, in Triton.

Two kernels share one inner loop (``key_tiles_triton.py``): online softmax over tiles of keys, a tile lying within one
block. The rows of a tile of queries are pairs of a token and one of the query heads of a key/value head, so that keys
and values are read once for all of these heads.

- Decodes: one program per sequence, key/value head and *split* of the context; memory-bound.
- Prefills: one program per tile of rows, key/value head and split; heaviest tiles first. Most tiles of keys are seen
  whole by all rows; only those at the diagonal, at the end and at the window's edge are masked.
- Prefills of a few rows, which verify drafts: as decodes, all tiles are masked, so that one loop loads them ahead.

On Hopper GPUs, a long prefix of a prefill is computed by ``attention_prefix_triton.py``; the prefill kernel starts
from its result and adds the remaining keys.

Splits are combined by the kernel of ``attention_splits_triton.py``. How many there are depends on shapes and host
integers only, so that a graph can hold the launch; how the context is shared among them is decided on the device, from
its real length.

Relative attention adds to each score what the query mixes from profiles over distances (``relative_attention.py``): a
product of mixed factors and of the profiles' columns for a tile's distances. All rows of a decode's tile have the same
distances; of a prefill's, each takes its own from a range that covers them. Tiles beyond all distances add nothing.

Variants, per layer shape and window: decodes with one split and with more; prefills and those of a few rows with one
split and with more, each of up to 16 sequences and of more; prefills of one sequence after a prefix; one combination
of any number of splits.

Deterministic, a decode's splits have a fixed length instead, and a prefill has one: bits depend on no other sequence.

Invariants: what a sequence does not own never reaches its result, NaN included: a key that no row of the tile may see
is not read, and zero takes the place of its value. An empty context gives zeros. The first split has the sinks.

Source: Dao, "FlashAttention-2" (tiles of queries, deferred normalisation); Dao et al., "Flash-Decoding" (splits).

Shape suffixes: as in ``attention.py``; further M rows of a tile, K keys of a tile, N sequences of a launch, S splits, C
profiles, X distances.
"""
# mypy: ignore-errors

import warnings
from collections.abc import Iterator
from functools import cache
from math import e, log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention_prefix_triton import SPAN_BLOCKS, attend_prefix, supports
from strandline.kernels.attention.attention_splits import (
    SplitLimits,
    least_decode_programs,
    num_row_tiles,
    parts_of,
    plan_decodes,
    plan_prefills,
)
from strandline.kernels.attention.attention_splits_triton import combine, padded, scratch, store_rows
from strandline.kernels.attention.key_tiles_triton import (
    add_sinks,
    attend_few,
    attend_tiles,
    block_of,
    end_of_far,
    mixed_rows,
)
from strandline.kernels.attention.relative_attention import RelativeScores
from strandline.kernels.attention.tiles_triton import FLOAT32_TILE, Tile, locate_tile, no_keys
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.gpu import gpu_of
from strandline.kernels.launch import first_that_fits
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2
from strandline.kernels.stages_triton import staged

DECODE_PROGRAMS = 3 * NUM_SMS
"""Programs that a step of few decodes is split into: three fit on a multiprocessor."""

DECODE_TILE = Tile(rows=16, keys=32, num_warps=4, num_stages=3)
"""Two tiles of 32 KiB in flight per program, three programs per SM. With three tiles and two programs, 16 sequences of
4,608 tokens take 103 µs (4B) and 64 (35B-A3B) on an H200, with these 94 and 61."""

NARROW_DECODE_TILE = Tile(rows=16, keys=32, num_warps=2, num_stages=4)
"""Up to a head dim of 128: three tiles of up to 16 KiB. A layer of 8 such heads takes 192 µs with 64 sequences of 1,152
tokens, and 206 with the other (benchmarks/results/2026-11-28-h200.md)."""

PREFILL_TILE = Tile(rows=128, keys=64, num_warps=8, num_stages=2)
"""Two warp groups, 128 accumulators per thread at a head dim of 256; queries and two tiles of keys and values fill
shared memory."""

RELATIVE_PREFILL_TILE = Tile(rows=128, keys=32, num_warps=8, num_stages=2)
"""Scores of the distances of 64 keys do not fit into registers, too: 528 bytes of each thread are spilled."""

SMALL_PREFILL_TILE = Tile(rows=64, keys=32, num_warps=4, num_stages=2)
"""Where the other does not fit: at a head dim of 256 on GPUs with 99 KiB of shared memory."""

SHORT_TILE = Tile(rows=64, keys=32, num_warps=4, num_stages=3)
"""For prefills of a few rows: as a decode's, with as many rows as they have, up to this."""

SHORT_PROGRAMS = 2 * NUM_SMS
"""Programs that prefills of a few rows of few sequences are split into: two fit on a multiprocessor."""

MAX_SHORT_SPLITS = 64
"""To combine more takes longer than they gain (benchmarks/results/2026-11-28-few-rows.md)."""

MIN_PREFIX_QUERIES = 1025
"""Prefills of fewer tokens attend to a prefix in the same launch as to each other."""

MIN_PREFIX_BLOCKS = 32
"""Shorter prefixes are not worth a launch of their own."""

MAX_PREFIX_DIFFERENCE = 1e-2
"""Relative tolerance of the check before the first use of the prefix kernel: results are rounded to bfloat16."""


@staged
@triton.jit(
    do_not_specialize=["window_tokens", "stride_table", "num_splits", "split_tiles"],
    do_not_specialize_on_alignment=["table_ptr", "context_len_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_len_ptr,
    sinks,
    relative,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    v_scale,
    window_tokens,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_row,
    stride_head,
    stride_table,
    num_splits,
    split_tiles,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PROFILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_len_ptr + sequence).to(tl.int32)
    first_key = 0
    if IS_WINDOWED:
        first_key = tl.maximum(context_len - window_tokens, 0)
    first_tile = first_key // BLOCK_K
    end_tile = tl.cdiv(context_len, BLOCK_K)
    # Either num_splits splits share the context, or each has split_tiles tiles of keys, whatever the context's length.
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    if split_tiles > 0:
        tiles_per_split = split_tiles
    first_tile = first_tile + split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, end_tile)

    row_M = tl.arange(0, BLOCK_M)
    channel_D = tl.arange(0, BLOCK_D)
    head_M = kv_head * GROUP + row_M
    is_row_M = row_M < GROUP
    q_ptr_MD = q_ptr + sequence * stride_q_row + (head_M * stride_q_head)[:, None] + channel_D[None, :]
    k_ptr += kv_head * stride_head
    v_ptr += kv_head * stride_head
    table_ptr += sequence * stride_table
    first_block = block_of(table_ptr, first_tile, last_tile, PAGE, BLOCK_K)
    position = context_len - 1
    position_M = tl.zeros([BLOCK_M], dtype=tl.int32) + position
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_MD = tl.load(q_ptr_MD, mask=is_row_M[:, None] & (channel_D < HEAD_DIM)[None, :], other=0.0)
    if relative is not None:
        row_M = sequence + tl.zeros([BLOCK_M], dtype=tl.int64)
        relative = mixed_rows(relative, row_M, head_M, is_row_M, scale_log2, NUM_PROFILES, BLOCK_C)
    # fmt: off
    acc_MD, max_M, sum_M = attend_few(
        q_MD, k_ptr, v_ptr, table_ptr, first_tile, last_tile, first_block, first_key, context_len,
        position_M, position_M, window_tokens, relative, position, scale_log2, stride_block, stride_row,
        PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_M, BLOCK_C, BLOCK_K, BLOCK_D, BLOCK_K, IS_WINDOWED, PRECISION,
    )
    # fmt: on
    if sinks is not None:
        row_M = sequence + tl.zeros([BLOCK_M], dtype=tl.int64)
        acc_MD, max_M, sum_M = add_sinks(acc_MD, max_M, sum_M, sinks, row_M, head_M, is_row_M & (split == 0))
    store_rows(
        acc_MD,
        max_M,
        sum_M,
        out_ptr,
        partial_ptr,
        lse_ptr,
        sequence + tl.zeros([BLOCK_M], dtype=tl.int64),
        head_M,
        is_row_M,
        0,
        split,
        num_splits,
        v_scale,
        NUM_HEADS,
        HEAD_DIM,
        BLOCK_D,
        IS_SPLIT,
    )


@staged
@triton.jit(
    do_not_specialize=[
        "window_tokens",
        "stride_table",
        "num_splits",
        "first_sequence",
        "first_row",
        "num_prefills",
        "num_tiles",
        "num_prefix_keys",
    ],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    query_start_ptr,
    context_len_ptr,
    sinks,
    relative,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    v_scale,
    window_tokens,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_row,
    stride_head,
    stride_table,
    num_splits,
    first_sequence,
    first_row,
    num_prefills,
    num_tiles,
    num_prefix_keys,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PROFILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    IS_CONTINUED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Programs start in the order of their index: a sequence's last tiles, which see most keys, go first.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)

    prefill, tile = locate_tile(tile, query_start_ptr + first_sequence, num_prefills, GROUP, BLOCK_M, BLOCK_N)
    # A CUDA graph's grid is sized for the largest number of tiles; the surplus programs return.
    if prefill >= num_prefills:
        return
    sequence = (first_sequence + prefill).to(tl.int64)
    query_start = tl.load(query_start_ptr + sequence).to(tl.int32)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_start
    context_len = tl.load(context_len_ptr + sequence).to(tl.int32)

    packed_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = packed_M // GROUP
    head_M = kv_head * GROUP + packed_M % GROUP
    is_row_M = query_M < num_queries
    row_M = (query_start + query_M).to(tl.int64)
    position_M = context_len - num_queries + query_M
    first_position = context_len - num_queries + (tile * BLOCK_M) // GROUP
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    last_position = context_len - num_queries + last_query
    # What the first row, the last row and each row see last.
    first_seen, last_seen, last_seen_M = first_position, last_position, position_M
    if not IS_CAUSAL:
        first_seen, last_seen = context_len - 1, context_len - 1
        last_seen_M = tl.zeros([BLOCK_M], dtype=tl.int32) + (context_len - 1)

    # Tiles of keys: [first_tile, first_whole) are cut by the window, [first_whole, last_whole) are seen whole by all
    # rows, [last_whole, end_tile) are cut by the diagonal, or by the end of the context.
    first_key = 0
    first_whole_key = 0
    if IS_WINDOWED:
        first_key = tl.maximum(first_position - window_tokens + 1, 0)
        first_whole_key = tl.maximum(last_position - window_tokens + 1, 0)
    first_tile = first_key // BLOCK_K
    if IS_CONTINUED:
        first_tile = num_prefix_keys // BLOCK_K
    end_tile = last_seen // BLOCK_K + 1
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    first_tile = first_tile + split * tiles_per_split
    end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)
    first_whole = tl.minimum(tl.maximum(tl.cdiv(first_whole_key, BLOCK_K), first_tile), end_tile)
    last_whole = tl.minimum(tl.maximum((first_seen + 1) // BLOCK_K, first_whole), end_tile)

    channel_D = tl.arange(0, BLOCK_D)
    q_ptr_MD = q_ptr + (row_M * stride_q_row + head_M * stride_q_head)[:, None] + channel_D[None, :]
    k_ptr += kv_head * stride_head
    v_ptr += kv_head * stride_head
    table_ptr += sequence * stride_table
    first_block = None
    if IS_SHORT:
        first_block = block_of(table_ptr, first_tile, end_tile, PAGE, BLOCK_K)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    q_MD = tl.load(q_ptr_MD, mask=is_row_M[:, None] & (channel_D < HEAD_DIM)[None, :], other=0.0)
    if IS_CONTINUED:
        prefix_row_M = (row_M - first_row) * NUM_HEADS + head_M
        is_read_MD = is_row_M[:, None] & (channel_D < HEAD_DIM)[None, :]
        acc_MD = tl.load(partial_ptr + (prefix_row_M * HEAD_DIM)[:, None] + channel_D[None, :], is_read_MD, other=0.0)
        max_M = tl.load(lse_ptr + prefix_row_M, mask=is_row_M, other=0.0)
        sum_M = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        acc_MD, max_M, sum_M = no_keys(BLOCK_M, BLOCK_D)
    if relative is not None:
        relative = mixed_rows(relative, row_M, head_M, is_row_M, scale_log2, NUM_PROFILES, BLOCK_C)
    # fmt: off
    if IS_SHORT:
        acc_MD, max_M, sum_M = attend_few(
            q_MD, k_ptr, v_ptr, table_ptr, first_tile, end_tile, first_block, first_key, last_seen + 1,
            position_M, last_seen_M, window_tokens, relative, first_position, scale_log2, stride_block, stride_row,
            PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_M, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, IS_WINDOWED, PRECISION,
        )
    else:
        if IS_WINDOWED:
            acc_MD, max_M, sum_M = attend_tiles(
                acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, first_tile, first_whole, None, first_key,
                last_seen + 1, position_M, last_seen_M, window_tokens, relative, first_position, scale_log2,
                stride_block, stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, True, True,
                PRECISION,
            )
        elif relative is not None:
            far_tile = end_of_far(relative, first_position, first_whole, last_whole, BLOCK_K)
            acc_MD, max_M, sum_M = attend_tiles(
                acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, first_whole, far_tile, None, first_key,
                last_seen + 1, position_M, last_seen_M, window_tokens, None, first_position, scale_log2, stride_block,
                stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, False, False, PRECISION,
            )
            first_whole = far_tile
        acc_MD, max_M, sum_M = attend_tiles(
            acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, first_whole, last_whole, None, first_key,
            last_seen + 1, position_M, last_seen_M, window_tokens, relative, first_position, scale_log2, stride_block,
            stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, False, False, PRECISION,
        )
        acc_MD, max_M, sum_M = attend_tiles(
            acc_MD, max_M, sum_M, q_MD, k_ptr, v_ptr, table_ptr, last_whole, end_tile, None, first_key,
            last_seen + 1, position_M, last_seen_M, window_tokens, relative, first_position, scale_log2, stride_block,
            stride_row, PAGE, HEAD_DIM, NUM_PROFILES, BLOCK_C, BLOCK_K, BLOCK_D, SPAN, True, IS_WINDOWED, PRECISION,
        )
    if sinks is not None:
        acc_MD, max_M, sum_M = add_sinks(acc_MD, max_M, sum_M, sinks, row_M, head_M, is_row_M & (split == 0))
    store_rows(
        acc_MD, max_M, sum_M, out_ptr, partial_ptr, lse_ptr, row_M, head_M, is_row_M, first_row, split, num_splits,
        v_scale, NUM_HEADS, HEAD_DIM, BLOCK_D, IS_SPLIT,
    )
    # fmt: on


class _Call(NamedTuple):
    """What the launches of one call share."""

    q_THD: Tensor
    memory: KVMemory
    batch: AttentionBatch
    out_THD: Tensor
    scale: float
    window_tokens: int | None
    is_causal: bool = True
    relative: RelativeScores | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.memory.k_BPGD.shape[2]

    @property
    def scale_log2(self) -> float:
        """Scale of scores whose exponentials are powers of two, of the stored keys."""
        return self.scale * self.memory.k_scale * log2(e)

    @property
    def num_distances(self) -> int:
        return 0 if self.relative is None else self.relative.profiles_CX.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_THD.shape[1] // self.num_kv_heads

    @property
    def prefill_tile(self) -> Tile:
        if self.q_THD.dtype == torch.float32:
            return FLOAT32_TILE
        most_rows = self.batch.most_rows
        if most_rows is None:
            return self._tile_that_fits()
        rows = max(16, next_power_of_2(most_rows * self.group))
        return SHORT_TILE._replace(rows=min(rows, SHORT_TILE.rows))

    def _tile_that_fits(self) -> Tile:
        item_bytes, channels = self.q_THD.element_size(), padded(self.q_THD.shape[2])

        def shared_bytes(tile: Tile) -> int:
            """Queries, keys or values, and weights or, in float32, scores of distances."""
            scores = item_bytes * tile.keys if self.relative is None else 4 * self.span(tile)
            return item_bytes * (tile.rows + tile.keys) * channels + tile.rows * scores

        largest = PREFILL_TILE if self.relative is None else RELATIVE_PREFILL_TILE
        return first_that_fits((largest, SMALL_PREFILL_TILE), shared_bytes, gpu_of(self.q_THD.device))

    def span(self, tile: Tile) -> int:
        """Return how many distances there are between the rows and the keys of a tile of a prefill, or more."""
        return next_power_of_2(tile.keys + cdiv(tile.rows - 1, self.group))

    @property
    def sinks(self) -> tuple[Tensor, int] | None:
        """The kernels' argument for sinks: scores, and how far those of two rows lie apart."""
        if self.relative is not None and self.relative.sinks_TH is not None:
            return self.relative.sinks_TH, self.relative.sinks_TH.stride(0)
        return None if self.memory.sinks_H is None else (self.memory.sinks_H, 0)

    @property
    def profile_sizes(self) -> dict[str, int]:
        """What kernels are compiled for."""
        num_profiles = 0 if self.relative is None else len(self.relative.profiles_CX)
        return {"NUM_PROFILES": num_profiles, "BLOCK_C": padded(num_profiles)}

    def parts(self) -> "Iterator[_Call]":
        """Yield a call for each part of the step."""
        by_row = {} if self.relative is None else self.relative.rows
        for q_THD, out_THD, *others, part in parts_of(self.batch, self.q_THD, self.out_THD, *by_row.values()):
            relative = self.relative and self.relative._replace(**dict(zip(by_row, others, strict=True)))
            yield self._replace(q_THD=q_THD, out_THD=out_THD, batch=part, relative=relative)


def paged_attention(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
    is_causal: bool = True,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Attend every token to its sequence's tokens, as the reference does; return ``out_THD``, contiguous.

    The step's own keys and values must have been written before. Decodes read no host tuple of the batch. Needs
    ``scale > 0`` and contiguous channels; rows, heads and blocks may have any stride. With fixed launches, length and
    order of splits depend on nothing but the sequence.

    Raises:
        ValueError: keys and values are laid out differently.
    """
    call = _Call(q_THD, memory, batch, _new_out(q_THD), scale, window_tokens, is_causal)
    _attend_all(call, num_decodes, launches)
    return call.out_THD


def relative_attention(
    q_THD: Tensor,
    relative: RelativeScores,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Attend as ``paged_attention`` does, with scores that depend on distances; ``profiles_CX`` is contiguous."""
    call = _Call(q_THD, memory, batch, _new_out(q_THD), scale, window_tokens, relative=relative)
    _attend_all(call, num_decodes, launches)
    return call.out_THD


def _new_out(q_THD: Tensor) -> Tensor:
    return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)


def _attend_all(call: _Call, num_decodes: int, launches: Launches) -> None:
    """Write the rows of a step."""
    k_strides, v_strides = call.memory.k_BPGD.stride(), call.memory.v_BPGD.stride()
    if k_strides != v_strides:
        raise ValueError(f"strides of keys {k_strides} are not those of values {v_strides}")
    if call.batch.parts:
        for part in call.parts():
            _attend_all(part, 0, launches)
        return
    if num_decodes:
        _attend_decodes(call, num_decodes, launches)
    if call.q_THD.shape[0] > num_decodes:
        _attend_prefills(call, num_decodes, launches)


def decode_tile(call: _Call) -> Tile:
    """Return how decodes are launched."""
    if call.q_THD.dtype == torch.float32:
        return FLOAT32_TILE
    is_narrow = padded(call.q_THD.shape[2]) <= 128 and call.group <= NARROW_DECODE_TILE.rows
    return NARROW_DECODE_TILE if is_narrow else DECODE_TILE


def _attend_decodes(call: _Call, num_decodes: int, launches: Launches) -> None:
    """Write the rows of the decodes."""
    q_THD, memory, batch, out_THD, _, window_tokens, *_ = call
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = call.num_kv_heads
    tile, num_programs = decode_tile(call), num_decodes * num_kv_heads
    num_blocks = batch.block_table_NM.shape[1]
    if window_tokens is not None:
        num_blocks = min(num_blocks, window_tokens // BLOCK_TOKENS + 2)
    least_programs = least_decode_programs(num_programs, tile.bytes_ahead(memory.k_BPGD), DECODE_PROGRAMS)
    plan = plan_decodes(num_programs, num_blocks, launches, least_programs=least_programs)
    partials = scratch(out_THD, num_decodes, plan.num_splits, is_needed=plan.is_split)
    _decode_kernel[(num_decodes, num_kv_heads, plan.num_splits)](
        q_THD,
        memory.k_BPGD,
        memory.v_BPGD,
        batch.block_table_NM,
        batch.context_lens_N,
        call.sinks,
        call.relative and call.relative.arguments,
        out_THD,
        *partials,
        call.scale_log2,
        memory.v_scale,
        window_tokens or 0,
        q_THD.stride(0),
        q_THD.stride(1),
        *memory.k_BPGD.stride()[:3],
        batch.block_table_NM.stride(0),
        plan.num_splits,
        plan.split_blocks * (BLOCK_TOKENS // tile.keys),
        PAGE=BLOCK_TOKENS,
        NUM_HEADS=num_heads,
        GROUP=call.group,
        HEAD_DIM=head_dim,
        BLOCK_M=max(tile.rows, next_power_of_2(call.group)),
        BLOCK_K=tile.keys,
        BLOCK_D=padded(head_dim),
        **call.profile_sizes,
        IS_SPLIT=plan.is_split,
        IS_WINDOWED=window_tokens is not None,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(q_THD),
    )
    if plan.is_split:
        combine(*partials, out_THD, 0, num_decodes, plan.num_splits)


def _attend_prefills(call: _Call, num_decodes: int, launches: Launches) -> None:
    """Write the rows after the decodes': sequences after a long prefix one by one, those between them together."""
    batch = call.batch
    num_sequences = len(batch.query_starts) - 1
    first = num_decodes
    # In a padded step it is not known on the host which sequences have prefixes.
    has_prompts = batch.most_rows is None and not batch.is_padded and call.window_tokens is None and call.is_causal
    if has_prompts and launches is Launches.MEASURED and _has_prefix_kernel(call):
        for sequence in range(num_decodes, num_sequences):
            if num_blocks := _num_prefix_blocks(batch, sequence, call.num_distances):
                if first < sequence:
                    _attend_together(call, first, sequence)
                _attend_behind_prefix(call, sequence, num_blocks)
                first = sequence + 1
    if first < num_sequences:
        _attend_together(call, first, num_sequences, launches)


def _has_prefix_kernel(call: _Call) -> bool:
    """Whether the kernel for prefixes runs here, and has passed its check."""
    if not supports(call.q_THD, call.memory):
        return False
    k_BPGD = call.memory.k_BPGD
    return _is_prefix_kernel_correct(call.q_THD.device, k_BPGD.dtype, *k_BPGD.shape[2:], call.group)


@cache
def _is_prefix_kernel_correct(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int, group: int
) -> bool:
    """Whether attention in two launches equals attention in one; warn if not, because Gluon is experimental."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    num_queries, num_blocks = 70, 5
    context_len = 3 * BLOCK_TOKENS + num_queries
    blocks = random(num_blocks, 2, BLOCK_TOKENS, num_kv_heads, head_dim).to(dtype)
    batch = AttentionBatch(
        query_starts=(0, num_queries),
        context_lens=(context_len,),
        query_starts_N1=torch.tensor([0, num_queries], device=device),
        context_lens_N=torch.tensor([context_len], device=device),
        block_table_NM=torch.tensor([[3, 1, 4, 2, 0]], dtype=torch.int32, device=device),
        write_blocks_T=torch.empty(0, dtype=torch.int64, device=device),
        write_offsets_T=torch.empty(0, dtype=torch.int64, device=device),
        is_all_written=True,
    )
    q_THD = random(num_queries, num_kv_heads * group, head_dim)
    outs = [torch.zeros_like(q_THD) for _ in range(2)]
    whole, split = (
        _Call(q_THD, KVMemory(blocks[:, 0], blocks[:, 1]), batch, out_THD, head_dim**-0.5, None) for out_THD in outs
    )
    problem = "its results are wrong"
    try:
        _attend_together(whole, 0, 1)
        _attend_behind_prefix(split, 0, 3, span_blocks=2)
        difference = (outs[0].float() - outs[1].float()).norm() / outs[0].float().norm()
        if device.type == "meta" or difference < MAX_PREFIX_DIFFERENCE:
            return True
    except Exception as error:  # noqa: BLE001 -- whatever this version of Triton fails with
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"long prompts use the slower attention kernel, the Gluon kernel fails: {problem}", stacklevel=2)
    return False


def _num_prefix_blocks(batch: AttentionBatch, sequence: int, num_distances: int = 0) -> int:
    """Return how many whole blocks before its queries a sequence attends to in a launch of their own.

    Args:
        num_distances: within which scores depend on distances.
    """
    num_queries = batch.query_starts[sequence + 1] - batch.query_starts[sequence]
    num_blocks = (batch.context_lens[sequence] - num_queries - num_distances) // BLOCK_TOKENS
    return num_blocks if num_queries >= MIN_PREFIX_QUERIES and num_blocks >= MIN_PREFIX_BLOCKS else 0


def _attend_together(call: _Call, first: int, end: int, launches: Launches = Launches.MEASURED) -> None:
    """Write the rows of the prefills ``[first, end)``."""
    tile, num_programs = call.prefill_tile, (end - first) * call.num_kv_heads
    least_programs = least_decode_programs(num_programs, tile.bytes_ahead(call.memory.k_BPGD), SHORT_PROGRAMS)
    plan = plan_prefills(
        call.batch, (first, end), len(call.q_THD), (call.group, call.num_kv_heads), tile[:2],
        call.window_tokens, launches, SplitLimits(least_programs, MAX_SHORT_SPLITS),
    )  # fmt: skip
    partials = scratch(call.out_THD, plan.num_tokens, plan.num_splits, is_needed=plan.num_splits > 1)
    is_short = call.batch.most_rows is not None and launches is Launches.MEASURED
    _launch_prefills(
        call, (first, end), plan.num_tiles, partials, plan.num_splits, plan.max_prefills, is_short=is_short
    )
    if plan.num_splits > 1:
        combine(*partials, call.out_THD, call.batch.query_starts[first], plan.num_tokens, plan.num_splits)


def _attend_behind_prefix(call: _Call, sequence: int, num_blocks: int, *, span_blocks: int = SPAN_BLOCKS) -> None:
    """Write the rows of a prefill in two launches; the first attends to the first ``num_blocks`` blocks."""
    batch = call.batch
    query_starts = batch.query_starts[sequence : sequence + 2]
    q_THD = call.q_THD[slice(*query_starts)]
    prefix = (batch.block_table_NM[sequence], num_blocks)
    partials = attend_prefix(q_THD, call.memory, *prefix, call.scale_log2, span_blocks)
    num_tiles = num_row_tiles(query_starts, call.group, call.prefill_tile.rows)
    num_keys = num_blocks * BLOCK_TOKENS
    _launch_prefills(call, (sequence, sequence + 1), num_tiles, partials, 1, 16, num_prefix_keys=num_keys)


def _launch_prefills(
    call: _Call,
    prefills: tuple[int, int],
    num_tiles: int,
    partials: tuple[Tensor, Tensor],
    num_splits: int,
    max_prefills: int,
    *,
    num_prefix_keys: int = 0,
    is_short: bool = False,
) -> None:
    """Launch the kernel for the prefills ``[first, end)``.

    Args:
        partials: scratch for the splits' results and logarithms of sums; with ``num_prefix_keys``, those of the
            attention to these first keys, which the kernel starts from.
        max_prefills: what the kernel is compiled for.
        is_short: whether programs have few tiles of keys, and mask all of them.
    """
    first, end = prefills
    q_THD, memory, batch, out_THD, _, window_tokens, is_causal, _ = call
    _, num_heads, head_dim = q_THD.shape
    tile = call.prefill_tile
    _prefill_kernel[(num_tiles * call.num_kv_heads, num_splits)](
        q_THD,
        memory.k_BPGD,
        memory.v_BPGD,
        batch.block_table_NM,
        batch.query_starts_N1,
        batch.context_lens_N,
        call.sinks,
        call.relative and call.relative.arguments,
        out_THD,
        *partials,
        call.scale_log2,
        memory.v_scale,
        window_tokens or 0,
        q_THD.stride(0),
        q_THD.stride(1),
        *memory.k_BPGD.stride()[:3],
        batch.block_table_NM.stride(0),
        num_splits,
        first,
        batch.query_starts[first],
        end - first,
        num_tiles,
        num_prefix_keys,
        PAGE=BLOCK_TOKENS,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=call.num_kv_heads,
        GROUP=call.group,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.rows,
        BLOCK_K=tile.keys,
        BLOCK_D=padded(head_dim),
        **call.profile_sizes,
        BLOCK_N=max_prefills,
        SPAN=call.span(tile),
        IS_SPLIT=num_splits > 1,
        IS_WINDOWED=window_tokens is not None,
        IS_CONTINUED=num_prefix_keys > 0,
        IS_CAUSAL=is_causal,
        IS_SHORT=is_short,
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(q_THD),
    )
