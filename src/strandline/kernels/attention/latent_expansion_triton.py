"""Softmax attention over latents whose heads' keys and values are computed again, in Triton (``latent_expansion.py``).

A piece of the keys of all sequences is gathered from the blocks and multiplied with the up projections; then one launch
has an online softmax over tiles of keys, one program per tile of queries and head, heaviest tiles first. What it has
found goes on to the launch of the next piece in float32.

Shape suffixes: as in ``latent_expansion.py``; M queries and J keys of a tile; of a tile, K, P and V are padded.
"""
# mypy: ignore-errors

from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.attention.attention_splits import num_row_tiles
from strandline.kernels.attention.attention_splits_triton import padded
from strandline.kernels.attention.latent_expansion import expand, piece_keys, pieces_of
from strandline.kernels.attention.tiles_triton import Tile, locate_tile, no_keys, take_in
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.gpu import gpu_of
from strandline.kernels.launch import first_that_fits
from strandline.kernels.sizes import next_power_of_2
from strandline.kernels.stages_triton import staged
from strandline.kernels.state_triton import FLOAT32_PRECISION

TILE = Tile(rows=128, keys=64, num_warps=8, num_stages=3)
"""Not tuned (benchmarks/kernels, `latent-attention/expanded`)."""

SMALL_TILE = Tile(rows=64, keys=32, num_warps=8, num_stages=2)
"""Where the other does not fit: for keys of 256 channels on GPUs with 99 KiB of shared memory."""

FLOAT32_TILE = Tile(rows=16, keys=32, num_warps=4, num_stages=1)
"""This path is for tests, not for speed."""


@triton.jit
def _attend(
    acc_MV,
    max_M,
    sum_M,
    q_MK,
    q_MP,
    k_ptr,
    shared_ptr,
    v_ptr,
    first_key,
    last_key,
    end_key,
    last_M,
    scale_log2,
    stride_k,
    stride_shared,
    stride_v,
    KEY_DIM: tl.constexpr,
    SHARED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in tiles of the keys ``[first_key, last_key)``; a query sees those up to ``last_M``.

    Maxima are in units of log2. Masked, keys from ``end_key`` on are not read, and queries may see none of a tile's.
    """
    channel_K = tl.arange(0, BLOCK_K)
    channel_P = tl.arange(0, BLOCK_P)
    channel_V = tl.arange(0, BLOCK_V)
    for key in range(first_key, last_key, BLOCK_J):
        key_J = key + tl.arange(0, BLOCK_J)
        is_JK = (channel_K < KEY_DIM)[None, :]
        is_JP = (channel_P < SHARED_DIM)[None, :]
        is_JV = (channel_V < VALUE_DIM)[None, :]
        if IS_MASKED:
            is_read_J1 = (key_J < end_key)[:, None]
            is_JK = is_JK & is_read_J1
            is_JP = is_JP & is_read_J1
            is_JV = is_JV & is_read_J1
        k_JK = tl.load(k_ptr + (key_J * stride_k)[:, None] + channel_K[None, :], mask=is_JK, other=0.0)
        k_JP = tl.load(shared_ptr + (key_J * stride_shared)[:, None] + channel_P[None, :], mask=is_JP, other=0.0)
        score_MJ = tl.dot(q_MK, tl.trans(k_JK), input_precision=PRECISION)
        score_MJ = tl.dot(q_MP, tl.trans(k_JP), acc=score_MJ, input_precision=PRECISION)
        if IS_MASKED:
            is_seen_MJ = (key_J[None, :] <= last_M[:, None]) & (key_J < end_key)[None, :]
            score_MJ = tl.where(is_seen_MJ, score_MJ, float("-inf"))
        v_JV = tl.load(v_ptr + (key_J * stride_v)[:, None] + channel_V[None, :], mask=is_JV, other=0.0)
        acc_MV, max_M, sum_M = take_in(acc_MV, max_M, sum_M, score_MJ, v_JV, scale_log2, IS_MASKED, PRECISION)
    return acc_MV, max_M, sum_M


@staged
@triton.jit(do_not_specialize=["first_sequence", "num_prefills", "num_tiles", "piece_start", "piece_len"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    shared_ptr,
    v_ptr,
    query_start_ptr,
    context_len_ptr,
    base_ptr,
    out_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_shared,
    stride_v,
    stride_v_head,
    first_sequence,
    num_prefills,
    num_tiles,
    piece_start,
    piece_len,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SHARED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend a tile of a sequence's queries to those of its keys that lie in a piece."""
    head = tl.program_id(1)
    # Programs start in the order of their index: a sequence's last tiles, which see most keys, go first.
    tile = num_tiles - 1 - tl.program_id(0)
    prefill, tile = locate_tile(tile, query_start_ptr + first_sequence, num_prefills, 1, BLOCK_M, BLOCK_N)
    query_start = tl.load(query_start_ptr + first_sequence + prefill).to(tl.int32)
    num_queries = tl.load(query_start_ptr + first_sequence + prefill + 1).to(tl.int32) - query_start
    first_row = tl.load(query_start_ptr + first_sequence).to(tl.int32)
    context_len = tl.load(context_len_ptr + first_sequence + prefill).to(tl.int32)
    # Row of the piece that the sequence's first key would have.
    shift = tl.load(base_ptr + prefill).to(tl.int32) - piece_start

    query_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row_M = query_M < num_queries
    row_M = (query_start - first_row + query_M).to(tl.int64)
    first_position = context_len - num_queries + tile * BLOCK_M
    last_M = context_len - num_queries + query_M + shift
    last_position = tl.minimum(first_position + BLOCK_M, context_len) - 1
    first_key = tl.maximum(-shift, 0)
    end_key = tl.minimum(tl.minimum(piece_len - shift, context_len), last_position + 1)
    if not (IS_FIRST or IS_LAST):  # noqa: SIM102 - a constant, and what is not
        if end_key <= first_key:
            return

    channel_K = tl.arange(0, BLOCK_K)
    channel_P = tl.arange(0, BLOCK_P)
    channel_V = tl.arange(0, BLOCK_V)
    q_M1_ptr = q_ptr + (row_M * stride_q_row + head * stride_q_head)[:, None]
    is_q_MK = is_row_M[:, None] & (channel_K < KEY_DIM)[None, :]
    is_q_MP = is_row_M[:, None] & (channel_P < SHARED_DIM)[None, :]
    q_MK = tl.load(q_M1_ptr + channel_K[None, :], mask=is_q_MK, other=0.0)
    q_MP = tl.load(q_M1_ptr + (KEY_DIM + channel_P)[None, :], mask=is_q_MP, other=0.0)
    out_row_M = row_M * NUM_HEADS + head
    out_MV = out_row_M[:, None] * VALUE_DIM + channel_V[None, :]
    is_out_MV = is_row_M[:, None] & (channel_V < VALUE_DIM)[None, :]
    if IS_FIRST:
        acc_MV, max_M, sum_M = no_keys(BLOCK_M, BLOCK_V)
    else:
        acc_MV = tl.load(acc_ptr + out_MV, mask=is_out_MV, other=0.0)
        max_M = tl.load(max_ptr + out_row_M, mask=is_row_M, other=float("-inf"))
        sum_M = tl.load(sum_ptr + out_row_M, mask=is_row_M, other=0.0)

    # From here on keys are counted in the piece.
    first_key += shift
    end_key += shift
    k_ptr += head * stride_k_head
    v_ptr += head * stride_v_head
    # Keys [first_key, whole_key) are seen by all queries of the tile; at the others the diagonal or the piece's end is.
    whole_key = tl.minimum(end_key, first_position + shift + 1)
    whole_key = first_key + tl.maximum(whole_key - first_key, 0) // BLOCK_J * BLOCK_J
    # fmt: off
    acc_MV, max_M, sum_M = _attend(
        acc_MV, max_M, sum_M, q_MK, q_MP, k_ptr, shared_ptr, v_ptr, first_key, whole_key, end_key, last_M,
        scale_log2, stride_k, stride_shared, stride_v, KEY_DIM, SHARED_DIM, VALUE_DIM, BLOCK_J, BLOCK_K, BLOCK_P,
        BLOCK_V, False, PRECISION,
    )
    acc_MV, max_M, sum_M = _attend(
        acc_MV, max_M, sum_M, q_MK, q_MP, k_ptr, shared_ptr, v_ptr, whole_key, end_key, end_key, last_M,
        scale_log2, stride_k, stride_shared, stride_v, KEY_DIM, SHARED_DIM, VALUE_DIM, BLOCK_J, BLOCK_K, BLOCK_P,
        BLOCK_V, True, PRECISION,
    )
    # fmt: on
    if IS_LAST:
        sum_M = tl.where(is_row_M, sum_M, 1.0)
        tl.store(out_ptr + out_MV, (acc_MV / sum_M[:, None]).to(out_ptr.dtype.element_ty), mask=is_out_MV)
    else:
        tl.store(acc_ptr + out_MV, acc_MV, mask=is_out_MV)
        tl.store(max_ptr + out_row_M, max_M, mask=is_row_M)
        tl.store(sum_ptr + out_row_M, sum_M, mask=is_row_M)


def expanded_latent_attention(
    q_THD: Tensor,
    latent_BPC: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
) -> Tensor:
    """Triton version of :func:`strandline.kernels.attention.latent_expansion.expanded_latent_attention`.

    Needs ``scale > 0``, and the channels of queries and latents that lie together; rows, heads and blocks may lie
    apart.
    """
    (num_heads, key_dim, latent_dim), value_dim = key_up_HKR.shape, value_up_HVR.shape[1]
    base_N, pieces = pieces_of(batch, num_decodes, piece_keys(key_up_HKR, value_up_HVR))
    out_THV = torch.empty((len(q_THD), num_heads, value_dim), dtype=q_THD.dtype, device=q_THD.device)
    acc = maximum = total = out_THV
    if len(pieces) > 1:
        options = {"dtype": torch.float32, "device": q_THD.device}
        acc, (maximum, total) = torch.empty(out_THV.shape, **options), torch.empty(2, *out_THV.shape[:2], **options)
    tile = _tile(q_THD)
    num_prefills = len(base_N)
    num_tiles = num_row_tiles(batch.query_starts[num_decodes:], 1, tile.rows)
    for piece in pieces:
        latent_LC = latent_BPC[piece.block_L, piece.offset_L]
        k_LHK, v_LHV = expand(latent_LC, key_up_HKR, value_up_HVR)
        shared_LP = latent_LC[:, latent_dim:]
        _attend_kernel[(num_tiles, num_heads)](
            q_THD, k_LHK, shared_LP, v_LHV, batch.query_starts_N1, batch.context_lens_N, base_N, out_THV, acc, maximum,
            total, scale * log2(torch.e), *q_THD.stride()[:2], *k_LHK.stride()[:2], shared_LP.stride(0),
            *v_LHV.stride()[:2], num_decodes, num_prefills, num_tiles, piece.start, len(latent_LC),
            NUM_HEADS=num_heads, KEY_DIM=key_dim, SHARED_DIM=shared_LP.shape[1], VALUE_DIM=value_dim,
            BLOCK_M=tile.rows, BLOCK_J=tile.keys, BLOCK_K=padded(key_dim), BLOCK_P=padded(shared_LP.shape[1]),
            BLOCK_V=padded(value_dim), BLOCK_N=max(16, next_power_of_2(num_prefills)), IS_FIRST=piece is pieces[0],
            IS_LAST=piece is pieces[-1], PRECISION=FLOAT32_PRECISION, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    return out_THV


def _tile(q_THD: Tensor) -> Tile:
    """Return the tile that fits into shared memory."""
    if q_THD.dtype == torch.float32:
        return FLOAT32_TILE

    def shared_bytes(tile: Tile) -> int:
        """Queries, keys and weights."""
        return q_THD.element_size() * ((tile.rows + tile.keys) * q_THD.shape[2] + tile.rows * tile.keys)

    return first_that_fits((TILE, SMALL_TILE), shared_bytes, gpu_of(q_THD.device))
