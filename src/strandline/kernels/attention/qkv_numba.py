"""Queries, keys and values on a CPU: one pass over each row, rounded where torch rounds (``qkv.py``).

Shape suffixes as in ``qkv.py``.
"""

# mypy: ignore-errors

import math

import numpy as np
import torch
from torch import Tensor

from strandline.ids import NULL_BLOCK
from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.runtime_numba import (
    BLOCK_FIELDS,
    E4M3,
    arguments,
    block_arguments,
    claim,
    floats,
    helper,
    ints,
    kernel,
    kind,
    load,
    memory_kind,
    packed_rows,
    round_to,
    store,
    store_e4m3,
)

NO_NORM, RMS_NORM, ZERO_CENTERED_NORM = 0, 1, 2


def prepare_qkv(
    q_TO: Tensor,
    k_TO: Tensor,
    v_TO: Tensor,
    norm: HeadNorm | None,
    rotary: tuple[Tensor, Tensor] | None,
    memory: KVMemory,
    batch: AttentionBatch,
) -> Tensor:
    """Numba version of :func:`strandline.kernels.attention.qkv.prepare_qkv`."""
    k_BPGD, v_BPGD = memory.k_BPGD, memory.v_BPGD
    q_norm_D, k_norm_D, eps, is_zero_centered = norm or (q_TO, q_TO, 0.0, False)
    norm_kind = NO_NORM if norm is None else ZERO_CENTERED_NORM if is_zero_centered else RMS_NORM
    if k_BPGD.dtype not in (q_TO.dtype, torch.float8_e4m3fn) or q_norm_D.dtype != k_norm_D.dtype:
        dtypes = (q_TO.dtype, k_BPGD.dtype, q_norm_D.dtype, k_norm_D.dtype)
        raise ValueError(f"inputs must have the keys' dtype unless that is e4m3, and both norms one: {dtypes}")
    num_kv_heads, head_dim = k_BPGD.shape[2:]
    cos_T12F, sin_T12F = rotary or (q_TO[:, :0], q_TO[:, :0])
    q_TO, k_TO, v_TO, cos_T12F, sin_T12F = (packed_rows(x) for x in (q_TO, k_TO, v_TO, cos_T12F, sin_T12F))
    num_heads = q_TO.shape[1] // head_dim
    q_THD = q_TO.new_empty((len(q_TO), num_heads, head_dim))
    _kernel(
        len(q_TO),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=kind(q_TO),
        memory_dtype=memory_kind(k_BPGD),
        k_factor=1 / memory.k_scale,
        v_factor=1 / memory.v_scale,
        new_q=q_TO.data_ptr(),
        new_q_stride=q_TO.stride(0),
        new_k=k_TO.data_ptr(),
        new_k_stride=k_TO.stride(0),
        new_v=v_TO.data_ptr(),
        new_v_stride=v_TO.stride(0),
        norm=norm_kind,
        norm_dtype=kind(q_norm_D),
        q_norm=q_norm_D.data_ptr(),
        k_norm=k_norm_D.data_ptr(),
        eps=eps,
        num_pairs=cos_T12F.shape[-1],
        cos=cos_T12F.data_ptr(),
        cos_stride=cos_T12F.stride(0),
        sin=sin_T12F.data_ptr(),
        sin_stride=sin_T12F.stride(0),
        write_blocks=batch.write_blocks_T.data_ptr(),
        write_offsets=batch.write_offsets_T.data_ptr(),
        **block_arguments(k_BPGD, v_BPGD),
        q=q_THD.data_ptr(),
    )
    return q_THD


@helper
def _normalise(head, norm, weight, eps, dtype):
    if norm == NO_NORM:
        return
    square = np.float32(0.0)
    for i in range(head.size):
        square += head[i] * head[i]
    factor = np.float32(1.0 / math.sqrt(square / head.size + eps))
    if norm == ZERO_CENTERED_NORM:
        for i in range(head.size):
            normed = head[i] * factor
            head[i] = normed + normed * weight[i]
    else:
        for i in range(head.size):
            head[i] *= factor
        round_to(dtype, head)
        for i in range(head.size):
            head[i] *= weight[i]
    round_to(dtype, head)


@helper
def _turn(head, cos, sin):
    num_pairs = cos.size // 2
    for i in range(num_pairs):
        low, high = head[i], head[num_pairs + i]
        head[i] = low * cos[i] + high * sin[i]
        head[num_pairs + i] = high * cos[num_pairs + i] + low * sin[num_pairs + i]


@kernel(
    BLOCK_FIELDS
    + "memory_dtype k_factor:float v_factor:float num_heads num_kv_heads head_dim dtype new_q new_q_stride "
    "new_k new_k_stride new_v new_v_stride "
    "norm norm_dtype q_norm k_norm eps:float num_pairs cos cos_stride sin sin_stride write_blocks write_offsets q"
)
def _kernel(tasks):
    args = arguments(tasks)
    num_heads, num_kv_heads, head_dim, dtype = args.num_heads, args.num_kv_heads, args.head_dim, args.dtype
    head = np.empty(head_dim, np.float32)
    q_norm, k_norm = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    if args.norm != NO_NORM:
        load(args.q_norm, args.norm_dtype, 0, q_norm)
        load(args.k_norm, args.norm_dtype, 0, k_norm)
    task = claim(tasks)
    while task < args.num_tasks:
        cos = floats(args.cos + 4 * task * args.cos_stride, 2 * args.num_pairs)
        sin = floats(args.sin + 4 * task * args.sin_stride, 2 * args.num_pairs)
        for i in range(num_heads):
            load(args.new_q, dtype, task * args.new_q_stride + i * head_dim, head)
            _normalise(head, args.norm, q_norm, args.eps, dtype)
            _turn(head, cos, sin)
            store(args.q, dtype, (task * num_heads + i) * head_dim, head)
        block = ints(args.write_blocks, task + 1)[task]
        offset = ints(args.write_offsets, task + 1)[task]
        k_start = block * args.k_block_stride + offset * args.k_token_stride
        v_start = block * args.v_block_stride + offset * args.v_token_stride
        for i in range(num_kv_heads if block != NULL_BLOCK else 0):
            load(args.new_k, dtype, task * args.new_k_stride + i * head_dim, head)
            _normalise(head, args.norm, k_norm, args.eps, dtype)
            _turn(head, cos, sin)
            k_at, v_at = k_start + i * args.k_head_stride, v_start + i * args.v_head_stride
            if args.memory_dtype == E4M3:
                round_to(dtype, head)
                store_e4m3(args.k + k_at, head, np.float32(args.k_factor))
            else:
                store(args.k, dtype, k_at, head)
            load(args.new_v, dtype, task * args.new_v_stride + i * head_dim, head)
            if args.memory_dtype == E4M3:
                store_e4m3(args.v + v_at, head, np.float32(args.v_factor))
            else:
                store(args.v, dtype, v_at, head)
        task = claim(tasks)
