"""A few tokens of Gated DeltaNet per sequence in one Triton kernel, one token after the other.

What verifies drafts: logged tokens, the certain token, a cut that stores the state, then drafts. A program owns
``BLOCK_V`` value channels of one head of one sequence, reads its tile of the state once, keeps it in registers over all
tokens, and writes it at cuts and at the end. So the state passes through memory once in each direction however many
drafts there are. ``src`` may be the same sequence's ``dst``, or the slot of one of its cuts.

Shape suffixes as in ``kernels/gdn.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.chunkwise import MIN_LOG_DECAY
from strandline.kernels.gdn import L2_NORM_EPS
from strandline.kernels.gdn_decode_triton import Launch, _log_decay_of
from strandline.kernels.sizes import cdiv, next_power_of_2

LAUNCH = Launch(block_v=16, num_warps=1)
"""One warp: sums over K end in shuffles, with no barrier. On an H200, 8.2, 26.9, 116 and 426 µs for 1, 16, 64 and 256
sequences of five tokens and 32 heads; the next best tile, of 32 columns, takes 10.2, 30.5, 134 and 482."""


def gdn_prefill_short(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
    max_beta: int = 1,
) -> Tensor:
    """As ``gdn.gdn_prefill``, fast for a few tokens per sequence; rows outside all chunks are left unwritten."""
    num_tokens, num_heads, value_dim = v_THV.shape
    num_key_heads, key_dim = k_TGK.shape[1:]
    out_THV = torch.empty((num_tokens, num_heads, value_dim), dtype=q_TGK.dtype, device=q_TGK.device)
    block_v = min(LAUNCH.block_v, next_power_of_2(value_dim))
    _short_kernel[(cdiv(value_dim, block_v), num_heads, chunks.num_sequences)](
        q_TGK,
        k_TGK,
        v_THV,
        a_TH,
        b_TH,
        A_log_H,
        dt_bias_H,
        state_SHKV,
        src_N,
        dst_N,
        chunks.first_chunks_N1,
        chunks.starts_C,
        chunks.lengths_C,
        chunks.cut_slots_C,
        out_THV,
        q_TGK.stride(0),
        q_TGK.stride(1),
        k_TGK.stride(0),
        k_TGK.stride(1),
        v_THV.stride(0),
        v_THV.stride(1),
        a_TH.stride(0),
        b_TH.stride(0),
        state_SHKV.stride(0),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        SCALE=key_dim**-0.5,
        EPS=L2_NORM_EPS,
        MIN_LOG_DECAY=MIN_LOG_DECAY,
        MAX_BETA=max_beta,
        num_warps=LAUNCH.num_warps,
    )
    return out_THV


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(
    do_not_specialize_on_alignment=[
        "src_ptr", "dst_ptr", "first_chunks_ptr", "starts_ptr", "lengths_ptr", "cut_slots_ptr"
    ]
)  # fmt: skip
def _short_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    src_ptr,
    dst_ptr,
    first_chunks_ptr,
    starts_ptr,
    lengths_ptr,
    cut_slots_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    a_row_stride,
    b_row_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
    MAX_BETA: tl.constexpr,
):
    """Carry ``BLOCK_V`` value channels of a head through the tokens of a sequence."""
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    key_head = head // (H // G)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    tile_KV = row_K[:, None] * V + column_V[None, :]
    tile_ptr = state_ptr + head * (K * V) + first_column

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    state_KV = tl.load(tile_ptr + src * slot_stride + tile_KV, mask=is_tile_KV & (src != 0), other=0.0).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    q_ptr += key_head * q_head_stride
    k_ptr += key_head * k_head_stride
    v_ptr += head * v_head_stride + first_column
    out_ptr += head * V + first_column
    for chunk in range(tl.load(first_chunks_ptr + sequence), tl.load(first_chunks_ptr + sequence + 1)):
        start = tl.load(starts_ptr + chunk)
        for row in range(start, start + tl.load(lengths_ptr + chunk)):
            q_K = tl.load(q_ptr + row * q_row_stride + row_K, mask=is_row_K, other=0.0).to(tl.float32)
            k_K = tl.load(k_ptr + row * k_row_stride + row_K, mask=is_row_K, other=0.0).to(tl.float32)
            v_V = tl.load(v_ptr + row * v_row_stride + column_V, mask=is_column_V, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + row * a_row_stride + head).to(tl.float32)
            b = tl.load(b_ptr + row * b_row_stride + head).to(tl.float32)
            decay = tl.exp(_log_decay_of(a, A_log, dt_bias, MIN_LOG_DECAY))
            beta = MAX_BETA / (1.0 + tl.exp(-b))
            q_K *= SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
            k_K *= 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)
            # Both sums are of the state as it was (``gdn_decode_triton.py``).
            written_V = beta * (v_V - tl.sum(state_KV * k_K[:, None], 0) * decay)
            out_V = tl.sum(state_KV * q_K[:, None], 0) * decay + tl.sum(q_K * k_K, 0) * written_V
            state_KV = state_KV * decay + k_K[:, None] * written_V[None, :]
            tl.store(out_ptr + row * (H * V) + column_V, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
        cut = tl.load(cut_slots_ptr + chunk)
        cut_ptrs = tile_ptr + cut * slot_stride + tile_KV
        tl.store(cut_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (cut != 0))
    dst_ptrs = tile_ptr + dst * slot_stride + tile_KV
    tl.store(dst_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (dst != 0))
