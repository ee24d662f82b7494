"""What lies between attention's input projection and attention, as one Triton kernel.

A program takes one token and a few of its heads, numbered queries first, then keys, then values. The
partner of a rotated channel is read a second time (it is in the first-level cache by then) and normalised with the
same factor, so that nothing is exchanged between threads.

Two variants are compiled per model: up to ``FEW_TOKENS`` tokens, and beyond.

Invariants: of the blocks only the rows named for writing are written; the null block never is.

Shape suffixes: as in ``qkv.py``; W heads of one program.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise import quantized_rows
from strandline.kernels.sizes import cdiv, next_power_of_2

FEW_TOKENS = 64
"""Up to this many tokens, programs take few heads each: they finish sooner, and there are SMs to spare."""

FEW_TOKENS_LAUNCH = (2, 2)
"""Heads per program and warps."""

MANY_TOKENS_LAUNCH = (4, 1)
"""A head of 256 channels fills a warp with 16-byte loads, and its sum needs no barrier: 8,192 tokens of the 4B model
take 81 µs on an H200, where 8 heads and 4 warps take 94."""


MAX_E4M3 = tl.constexpr(quantized_rows.MAX_E4M3)

NO_NORM, RMS_NORM, ZERO_CENTERED_NORM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _normed(x_WD, rstd_W1, q_norm_ptr, k_norm_ptr, is_q_W, channel_D, is_channel_D, dtype_ptr, NORM: tl.constexpr):
    """Return channels normalised and rounded, as the separate operations round them; float32."""
    dtype = dtype_ptr.dtype.element_ty
    normed_WD = x_WD
    if NORM != NO_NORM:
        q_norm_D = tl.load(q_norm_ptr + channel_D, mask=is_channel_D, other=0.0).to(tl.float32)
        k_norm_D = tl.load(k_norm_ptr + channel_D, mask=is_channel_D, other=0.0).to(tl.float32)
        weight_WD = tl.where(is_q_W[:, None], q_norm_D[None, :], k_norm_D[None, :])
        if NORM == ZERO_CENTERED_NORM:
            normed_WD = x_WD * rstd_W1 * (weight_WD + 1.0)
        else:
            normed_WD = (x_WD * rstd_W1).to(dtype).to(tl.float32) * weight_WD
        normed_WD = normed_WD.to(dtype).to(tl.float32)
    return normed_WD


@triton.jit
def _stored(x_WD, factor, ptr, IS_E4M3: tl.constexpr):
    """Return channels as they are stored: as they are, or times a factor and at most 448, the largest e4m3 number."""
    if IS_E4M3:
        x_WD = x_WD.to(tl.float32) * factor
        x_WD = tl.where(x_WD > MAX_E4M3, MAX_E4M3, x_WD)
        x_WD = tl.where(x_WD < -MAX_E4M3, -MAX_E4M3, x_WD)
    return x_WD.to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["block_ptr", "offset_ptr"])
def _prepare_kernel(
    new_q_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    block_ptr,
    offset_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_factor,
    v_factor,
    eps,
    new_k_offset,
    new_v_offset,
    stride_new_q,
    stride_new_k,
    stride_new_v,
    stride_cos,
    stride_sin,
    stride_k_block,
    stride_k_row,
    stride_k_head,
    stride_v_block,
    stride_v_row,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_E4M3: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    channel_D = tl.arange(0, BLOCK_D)
    is_q_W = head_W < NUM_HEADS
    is_v_W = (head_W >= NUM_HEADS + NUM_KV_HEADS) & (head_W < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_k_W = (head_W >= NUM_HEADS) & (head_W < NUM_HEADS + NUM_KV_HEADS)
    is_channel_D = channel_D < HEAD_DIM
    is_inside_WD = (head_W < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_channel_D[None, :]

    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    # Keys and values are addressed from the queries on, so that one load takes heads of several kinds.
    new_k_W = new_k_offset + token * stride_new_k + (head_W - NUM_HEADS) * HEAD_DIM
    new_v_W = new_v_offset + token * stride_new_v + (head_W - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    new_W = tl.where(is_q_W, token * stride_new_q + head_W * HEAD_DIM, tl.where(is_k_W, new_k_W, new_v_W))
    head_ptr_W1 = new_q_ptr + new_W[:, None]
    raw_WD = tl.load(head_ptr_W1 + channel_D[None, :], mask=is_inside_WD, other=0.0)
    x_WD = raw_WD.to(tl.float32)
    rstd_W1 = tl.rsqrt(tl.sum(x_WD * x_WD, axis=1) / HEAD_DIM + eps)[:, None]
    normed_WD = _normed(x_WD, rstd_W1, q_norm_ptr, k_norm_ptr, is_q_W, channel_D, is_channel_D, new_q_ptr, NORM)

    turns_D = channel_D < 2 * NUM_PAIRS
    partner_D = tl.where(channel_D < NUM_PAIRS, channel_D + NUM_PAIRS, channel_D - NUM_PAIRS)
    partner_D = tl.where(turns_D, partner_D, 0)
    partner_raw_WD = tl.load(head_ptr_W1 + partner_D[None, :], mask=is_inside_WD & turns_D[None, :], other=0.0)
    partner_WD = partner_raw_WD.to(tl.float32)
    partner_WD = _normed(partner_WD, rstd_W1, q_norm_ptr, k_norm_ptr, is_q_W, partner_D, turns_D, new_q_ptr, NORM)
    cos_D = tl.load(cos_ptr + token * stride_cos + channel_D, mask=turns_D, other=1.0)
    sin_D = tl.load(sin_ptr + token * stride_sin + channel_D, mask=turns_D, other=0.0)
    rotated_WD = normed_WD * cos_D[None, :] + partner_WD * sin_D[None, :]

    q_row_ptr = q_ptr + token * (NUM_HEADS * HEAD_DIM)
    q_ptr_WD = q_row_ptr + (head_W * HEAD_DIM)[:, None] + channel_D[None, :]
    tl.store(q_ptr_WD, rotated_WD.to(q_ptr.dtype.element_ty), mask=is_q_W[:, None] & is_channel_D[None, :])
    block = tl.load(block_ptr + token).to(tl.int64)
    offset = tl.load(offset_ptr + token).to(tl.int64)
    is_written = block != 0
    k_row_ptr = k_ptr + block * stride_k_block + offset * stride_k_row
    k_ptr_WD = k_row_ptr + ((head_W - NUM_HEADS) * stride_k_head)[:, None] + channel_D[None, :]
    is_k_WD = (is_k_W & is_written)[:, None] & is_channel_D[None, :]
    tl.store(k_ptr_WD, _stored(rotated_WD.to(q_ptr.dtype.element_ty), k_factor, k_ptr, IS_E4M3), mask=is_k_WD)
    v_row_ptr = v_ptr + block * stride_v_block + offset * stride_v_row
    v_ptr_WD = v_row_ptr + ((head_W - NUM_HEADS - NUM_KV_HEADS) * stride_v_head)[:, None] + channel_D[None, :]
    is_v_WD = (is_v_W & is_written)[:, None] & is_channel_D[None, :]
    tl.store(v_ptr_WD, _stored(raw_WD, v_factor, v_ptr, IS_E4M3), mask=is_v_WD)


def prepare_qkv(
    q_TO: Tensor,
    k_TO: Tensor,
    v_TO: Tensor,
    norm: HeadNorm | None,
    rotary: tuple[Tensor, Tensor] | None,
    memory: KVMemory,
    batch: AttentionBatch,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in their blocks; return ``q_THD``.

    Needs contiguous channels, in the inputs' rows and in the tables'; rows may have any stride. No two rows may
    name the same row of a block, as in every step. Launches of other sizes add a head's squares in another order.
    """
    k_BPGD, v_BPGD = memory.k_BPGD, memory.v_BPGD
    _, _, num_kv_heads, head_dim = k_BPGD.shape
    num_tokens, num_heads = len(q_TO), q_TO.shape[1] // head_dim
    q_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_TO.dtype, device=q_TO.device)
    if num_tokens == 0:
        return q_THD
    cos_T12F, sin_T12F = rotary or (q_TO[..., :0], q_TO[..., :0])
    q_norm_D, k_norm_D, eps, is_zero_centered = norm or (q_TO, q_TO, 0.0, False)
    is_small = num_tokens <= FEW_TOKENS and launches is Launches.MEASURED
    block_w, num_warps = FEW_TOKENS_LAUNCH if is_small else MANY_TOKENS_LAUNCH
    grid = (num_tokens, cdiv(num_heads + 2 * num_kv_heads, block_w))
    _prepare_kernel[grid](
        q_TO,
        q_norm_D,
        k_norm_D,
        cos_T12F,
        sin_T12F,
        batch.write_blocks_T,
        batch.write_offsets_T,
        q_THD,
        k_BPGD,
        v_BPGD,
        1 / memory.k_scale,
        1 / memory.v_scale,
        eps,
        (k_TO.data_ptr() - q_TO.data_ptr()) // q_TO.element_size(),
        (v_TO.data_ptr() - q_TO.data_ptr()) // q_TO.element_size(),
        q_TO.stride(0),
        k_TO.stride(0),
        v_TO.stride(0),
        cos_T12F.stride(0),
        sin_T12F.stride(0),
        k_BPGD.stride(0),
        k_BPGD.stride(1),
        k_BPGD.stride(2),
        v_BPGD.stride(0),
        v_BPGD.stride(1),
        v_BPGD.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=cos_T12F.shape[-1],
        NORM=(NO_NORM if norm is None else ZERO_CENTERED_NORM if is_zero_centered else RMS_NORM).value,
        BLOCK_W=block_w,
        BLOCK_D=next_power_of_2(head_dim),
        IS_E4M3=k_BPGD.dtype == torch.float8_e4m3fn,
        num_warps=num_warps,
        **overlap_options(q_TO),
    )
    return q_THD
