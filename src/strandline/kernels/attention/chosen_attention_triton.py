"""Softmax attention to the groups of tokens that were chosen for each row, and to the tokens after them, in Triton.

A program attends a row's query heads of one key/value head, at most ``MAX_HEADS`` of them, to one split of what the row
sees: the chosen groups in the order of their list, then the tokens of the last, incomplete group. Keys are read row by
row, wherever they lie in the cache's blocks. Values are the keys' first channels where there are no others (latents).

Grids follow from shapes. With fixed launches, a row has one split: its bits depend on nothing but its sequence.

Invariants: those of ``attention_triton.py``.

Shape suffixes: as in ``attention_triton.py``; K chosen groups of a row, or keys
of a tile; V channels of a value.
"""
# mypy: ignore-errors

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention_splits import num_decode_splits
from strandline.kernels.attention.attention_splits_triton import combine, padded, scratch, store_rows
from strandline.kernels.attention.group_choice_triton import find_rows, first_position, sequences_block
from strandline.kernels.attention.tiles_triton import FLOAT32_TILE, Tile, no_keys, take_in
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.gpu import gpu_of
from strandline.kernels.launch import first_that_fits
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.stages_triton import staged
from strandline.kernels.state_triton import FLOAT32_PRECISION

MAX_HEADS = 64
"""Most query heads of a program: it holds 128 accumulators per thread then, for values of 512 channels."""

FEW_HEADS = 32
"""As many where the others do not fit: for keys of 512 channels on GPUs with 99 KiB of shared memory."""

WIDE_CHANNELS = 256
"""Keys of more channels take eight warps."""

MIN_SPLIT_KEYS = 128
"""Keys of a split: its result is as large as some of them."""


@triton.jit
def _key_offsets(
    slot_K,
    num_slots,
    num_chosen_tokens,
    num_complete_tokens,
    group_ptr,
    table_ptr,
    stride_block,
    stride_row,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """Return where the keys are that a row sees in these slots."""
    is_chosen_K = slot_K < num_chosen_tokens
    group_K = tl.load(group_ptr + slot_K // GROUP_TOKENS, mask=is_chosen_K, other=0).to(tl.int32)
    last_K = num_complete_tokens + slot_K - num_chosen_tokens
    position_K = tl.where(is_chosen_K, group_K * GROUP_TOKENS + slot_K % GROUP_TOKENS, last_K)
    block_K = tl.load(table_ptr + position_K // PAGE, mask=slot_K < num_slots, other=0).to(tl.int64)
    return block_K * stride_block + (position_K % PAGE) * stride_row


@staged
@triton.jit(
    do_not_specialize=["stride_table", "num_sequences", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _attend_chosen_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    group_ptr,
    table_ptr,
    query_start_ptr,
    context_len_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    v_scale,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_row,
    stride_head,
    stride_table,
    num_sequences,
    num_rows,
    num_splits,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    PROGRAMS: tl.constexpr = NUM_HEADS // GROUP * TILES
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    kv_head = tl.program_id(0) % PROGRAMS // TILES
    split = tl.program_id(1)
    sequence, row, _ = find_rows(tl.program_id(0) // PROGRAMS, query_start_ptr, num_sequences, 0, num_rows, 1, BLOCK_N)
    if sequence >= num_sequences:
        return
    num_seen = first_position(sequence, query_start_ptr, context_len_ptr) + row + 1
    row = row.to(tl.int64)
    num_complete = num_seen // GROUP_TOKENS
    num_chosen_tokens = tl.minimum(num_complete, MAX_GROUPS) * GROUP_TOKENS
    num_complete_tokens = num_complete * GROUP_TOKENS
    num_slots = num_seen - num_complete_tokens + num_chosen_tokens
    num_tiles = tl.cdiv(num_slots, BLOCK_K)
    tiles_per_split = tl.cdiv(num_tiles, num_splits)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)

    index_M = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row_M = index_M < GROUP
    head_M = kv_head * GROUP + index_M
    channel_D = tl.arange(0, BLOCK_D)
    is_channel_D = channel_D < HEAD_DIM
    q_ptr_MD = q_ptr + row * stride_q_row + (head_M * stride_q_head)[:, None] + channel_D[None, :]
    q_MD = tl.load(q_ptr_MD, mask=is_row_M[:, None] & is_channel_D[None, :], other=0.0)
    k_ptr += kv_head * stride_head
    if v_ptr is not None:
        v_ptr += kv_head * stride_head
    group_ptr += row * MAX_GROUPS
    table_ptr += sequence.to(tl.int64) * stride_table
    acc_MD, max_M, sum_M = no_keys(BLOCK_M, BLOCK_D)
    index_K = tl.arange(0, BLOCK_K)
    # fmt: off
    next_offset_K = _key_offsets(
        first_tile * BLOCK_K + index_K, num_slots, num_chosen_tokens, num_complete_tokens, group_ptr, table_ptr,
        stride_block, stride_row, PAGE, GROUP_TOKENS,
    )
    for tile in range(first_tile, last_tile):
        slot_K = tile * BLOCK_K + index_K
        offset_K = next_offset_K
        next_offset_K = _key_offsets(
            slot_K + BLOCK_K, num_slots, num_chosen_tokens, num_complete_tokens, group_ptr, table_ptr,
            stride_block, stride_row, PAGE, GROUP_TOKENS,
        )
        # fmt: on
        is_read_KD = (slot_K < num_slots)[:, None] & is_channel_D[None, :]
        k_KD = tl.load(k_ptr + offset_K[:, None] + channel_D[None, :], mask=is_read_KD, other=0.0)
        v_KD = k_KD
        if v_ptr is not None:
            v_KD = tl.load(v_ptr + offset_K[:, None] + channel_D[None, :], mask=is_read_KD, other=0.0)
        score_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision=PRECISION)
        # A tile has a key at least, so that the maximum is of a number.
        score_MK = tl.where((slot_K < num_slots)[None, :], score_MK, float("-inf"))
        acc_MD, max_M, sum_M = take_in(acc_MD, max_M, sum_M, score_MK, v_KD, scale_log2, False, PRECISION)
    store_rows(
        acc_MD,
        max_M,
        sum_M,
        out_ptr,
        partial_ptr,
        lse_ptr,
        row + tl.zeros([BLOCK_M], dtype=tl.int64),
        head_M,
        is_row_M,
        0,
        split,
        num_splits,
        v_scale,
        NUM_HEADS,
        VALUE_DIM,
        BLOCK_D,
        IS_SPLIT,
    )


def attend_chosen(
    q_THD: Tensor,
    memory: tuple[Tensor, Tensor | None],
    group_TK: Tensor,
    batch: AttentionBatch,
    group_tokens: int,
    out_THV: Tensor,
    *,
    scale: float,
    launches: Launches,
) -> Tensor:
    """Attend every row to its groups and to the tokens after the last complete one; return ``out_THV``, filled.

    Args:
        memory: keys and values, ``[B, P, G, D]``; None: values are the first channels of keys.
        group_TK: complete groups of each row, at most K of them, before any -1.
    """
    (num_rows, num_heads, head_dim), (k_BPGD, v_BPGD) = q_THD.shape, memory
    num_kv_heads, max_groups = k_BPGD.shape[2], group_TK.shape[1]
    group, table_NM = num_heads // num_kv_heads, batch.block_table_NM
    tile, num_sequences = _tile(q_THD, group), len(batch.query_starts_N1) - 1
    num_programs = num_rows * num_kv_heads * cdiv(group, tile.rows)
    num_splits = 1
    if launches is Launches.MEASURED:
        max_keys = min(group_tokens * (max_groups + 1), table_NM.shape[1] * BLOCK_TOKENS)
        num_splits = num_decode_splits(num_programs, cdiv(max_keys, MIN_SPLIT_KEYS))
    partials = scratch(out_THV, num_rows, num_splits, is_needed=num_splits > 1)
    _attend_chosen_kernel[(num_programs, num_splits)](
        q_THD, k_BPGD, v_BPGD, group_TK, table_NM, batch.query_starts_N1, batch.context_lens_N, out_THV, *partials,
        scale * log2(e), 1.0, q_THD.stride(0), q_THD.stride(1), *k_BPGD.stride()[:3], table_NM.stride(0),
        num_sequences, num_rows, num_splits,
        PAGE=BLOCK_TOKENS, NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=out_THV.shape[2],
        GROUP_TOKENS=group_tokens, MAX_GROUPS=max_groups, BLOCK_M=tile.rows, BLOCK_K=tile.keys,
        BLOCK_D=padded(head_dim), BLOCK_N=sequences_block(num_sequences), IS_SPLIT=num_splits > 1,
        PRECISION=FLOAT32_PRECISION, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlap_options(q_THD),
    )  # fmt: skip
    if num_splits > 1:
        combine(*partials, out_THV, 0, num_rows, num_splits)
    return out_THV


def _tile(q_THD: Tensor, group: int) -> Tile:
    """Return a tile of at most as many rows as a key/value head has query heads."""
    channels, item_bytes = padded(q_THD.shape[2]), q_THD.element_size()
    if q_THD.dtype == torch.float32:
        return FLOAT32_TILE

    def shared_bytes(tile: Tile) -> int:
        """Queries, keys or values, and weights."""
        return item_bytes * ((tile.rows + tile.keys) * channels + tile.rows * tile.keys)

    rows = max(16, min(MAX_HEADS, next_power_of_2(group)))
    tile = Tile(rows, keys=32, num_warps=8 if channels > WIDE_CHANNELS else 4, num_stages=3)
    return first_that_fits((tile, tile._replace(rows=min(rows, FEW_HEADS))), shared_bytes, gpu_of(q_THD.device))
