"""One token of Gated DeltaNet per sequence as one Triton kernel: gates, normalisation, delta rule and slots.

A program owns ``BLOCK_V`` value channels of one head of one sequence: it reads its ``[K, BLOCK_V]`` tile of the state
once, keeps it in registers, and writes it once. Columns of a state do not depend on each other, so no program reads
what another one writes, as long as no sequence's ``src`` is another sequence's ``dst``: callers see to that (the
torch version copies such a source first). ``src`` may be shared, and may equal the same sequence's ``dst``.

Both reductions over K are taken from the state as it was: with ``e = beta (v - decay S^T k)`` the output is
``decay S^T q + (k . q) e``, which saves a second pass over the new state before the output is known.

Deterministic, the launch does not depend on the batch: a sequence's bits are the same whatever is decoded around it.
Otherwise there are two, of which each is compiled once per dtype and layer shape; the sums over K add in another order.

Shape suffixes as in ``kernels/gdn.py``.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.gdn import L2_NORM_EPS, MIN_LOG_DECAY
from strandline.kernels.platform import is_deterministic
from strandline.kernels.sizes import cdiv, next_power_of_2


class Launch(NamedTuple):
    """How the kernel is launched."""

    block_v: int
    num_warps: int


FEW = Launch(block_v=16, num_warps=1)
"""For batches that do not fill the GPU: 256 programs per sequence of 32 heads. One warp ends the sums over K in
shuffles, with no barrier. On an H200, 3.1, 6.0 and 10.4 µs for one, four and eight sequences, where ``MANY`` takes 4.6,
7.4 and 11.1."""

FEW_SEQUENCES = 8

MANY = Launch(block_v=64, num_warps=4)
"""Rows of a tile are 256 bytes, and four programs of 32 KiB, the registers' limit, fit on a multiprocessor: 21.1, 70.6
and 270.9 µs for 16, 64 and 256 sequences (93 % of a copy's bandwidth), where tiles of 32 columns take 21.9, 76.7 and
294.6. Neither cache hints nor tiles fetched ahead by persistent programs gained anything."""


def gdn_decode(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    a_NH: Tensor,
    b_NH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_SHKV: Tensor,
    src_N: Tensor,
    dst_N: Tensor,
) -> Tensor:
    """Advance N sequences by one token each; return ``out_NHV`` in the dtype of ``q_NGK``.

    The last dimension of every tensor must be contiguous, and each slot's ``[H, K, V]``. No sequence's ``src`` may be
    another sequence's ``dst``.
    """
    num_sequences, num_heads, value_dim = v_NHV.shape
    num_key_heads, key_dim = k_NGK.shape[1:]
    out_NHV = torch.empty((num_sequences, num_heads, value_dim), dtype=q_NGK.dtype, device=q_NGK.device)
    launch = FEW if num_sequences <= FEW_SEQUENCES and not is_deterministic() else MANY
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    _decode_kernel[(cdiv(value_dim, block_v), num_heads, num_sequences)](
        q_NGK,
        k_NGK,
        v_NHV,
        a_NH,
        b_NH,
        A_log_H,
        dt_bias_H,
        state_SHKV,
        src_N,
        dst_N,
        out_NHV,
        q_NGK.stride(0),
        q_NGK.stride(1),
        k_NGK.stride(0),
        k_NGK.stride(1),
        v_NHV.stride(0),
        v_NHV.stride(1),
        a_NH.stride(0),
        b_NH.stride(0),
        state_SHKV.stride(0),
        H=num_heads,
        HEADS_PER_KEY=num_heads // num_key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        SCALE=key_dim**-0.5,
        EPS=L2_NORM_EPS,
        MIN_LOG_DECAY=MIN_LOG_DECAY,
        num_warps=launch.num_warps,
    )
    return out_NHV


# Slices of the slot tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _decode_kernel(
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
    H: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    MIN_LOG_DECAY: tl.constexpr,
):
    first_column = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    key_head = head // HEADS_PER_KEY
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    # What a program adds to every address stays in the scalar part: the rest are constants in the instructions.
    tile_KV = row_K[:, None] * V + column_V[None, :]
    tile_ptr = state_ptr + head * (K * V) + first_column

    src = tl.load(src_ptr + sequence)
    dst = tl.load(dst_ptr + sequence)
    q_K = tl.load(q_ptr + sequence * q_row_stride + key_head * q_head_stride + row_K, mask=is_row_K, other=0.0)
    k_K = tl.load(k_ptr + sequence * k_row_stride + key_head * k_head_stride + row_K, mask=is_row_K, other=0.0)
    v_ptrs = v_ptr + sequence * v_row_stride + head * v_head_stride + first_column + column_V
    v_V = tl.load(v_ptrs, mask=is_column_V, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + sequence * a_row_stride + head).to(tl.float32)
    b = tl.load(b_ptr + sequence * b_row_stride + head).to(tl.float32)
    A_log = tl.load(A_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    state_KV = tl.load(tile_ptr + src * slot_stride + tile_KV, mask=is_tile_KV & (src != 0), other=0.0).to(tl.float32)

    q_K = q_K.to(tl.float32)
    k_K = k_K.to(tl.float32)
    q_factor = SCALE / tl.sqrt(tl.sum(q_K * q_K, 0) + EPS)
    k_factor = 1.0 / tl.sqrt(tl.sum(k_K * k_K, 0) + EPS)
    overlap = tl.sum(q_K * k_K, 0) * q_factor * k_factor
    decay = tl.exp(log_decay_of(a, A_log, dt_bias, MIN_LOG_DECAY))
    beta = 1.0 / (1.0 + tl.exp(-b))

    predicted_V = tl.sum(state_KV * k_K[:, None], 0) * (decay * k_factor)
    read_V = tl.sum(state_KV * q_K[:, None], 0) * (decay * q_factor)
    written_V = beta * (v_V - predicted_V)
    out_V = read_V + overlap * written_V
    state_KV = state_KV * decay + k_K[:, None] * (written_V * k_factor)[None, :]

    out_ptrs = out_ptr + (sequence * H + head) * V + first_column + column_V
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=is_column_V)
    state_ptrs = tile_ptr + dst * slot_stride + tile_KV
    tl.store(state_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV & (dst != 0))


@triton.jit
def log_decay_of(a, A_log, dt_bias, MIN_LOG_DECAY: tl.constexpr):
    """Return the log decay of a head's state, a finite number."""
    log_decay = -tl.exp(A_log.to(tl.float32)) * _softplus(a + dt_bias.to(tl.float32))
    # A comparison and not a maximum, which would make a number of NaN.
    return tl.where(log_decay < MIN_LOG_DECAY, MIN_LOG_DECAY, log_decay)


@triton.jit
def _softplus(x):
    """Return ``log(1 + exp(x))``; of a small ``exp(x)``, which the sum would round away, the first terms."""
    e = tl.exp(x)
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25)))
    return tl.where(x > 20.0, x, tl.where(e < 1e-2, small, tl.log(1.0 + e)))
