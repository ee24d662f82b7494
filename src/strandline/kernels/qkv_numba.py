"""Queries, keys and values on a CPU: one pass over each row, rounded where torch rounds (``qkv.py``).

Shape suffixes as in ``qkv.py``.
"""

# mypy: ignore-errors

import math

import numpy as np
from torch import Tensor

from strandline.ids import NULL_BLOCK
from strandline.kernels import qkv
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.runtime_numba import (
    TASKS,
    bits,
    claim,
    compiled,
    floats,
    helper,
    ints,
    kind,
    load,
    number,
    packed_rows,
    round_to,
    store,
)


def prepare_qkv(
    projected_TO: Tensor,
    num_heads: int,
    q_norm_D: Tensor,
    k_norm_D: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    memory: KVMemory,
    batch: AttentionBatch,
) -> Tensor:
    """Numba twin of :func:`strandline.kernels.qkv.prepare_qkv`."""
    k_BPGD, v_BPGD = memory.k_BPGD, memory.v_BPGD
    if k_BPGD.dtype != projected_TO.dtype or q_norm_D.dtype != k_norm_D.dtype:
        inputs = (projected_TO, num_heads, q_norm_D, k_norm_D, eps, rotary, memory, batch)
        return qkv.prepare_qkv.__wrapped__(*inputs)
    num_kv_heads, head_dim = k_BPGD.shape[2:]
    projected_TO, (cos_T12F, sin_T12F) = packed_rows(projected_TO), (packed_rows(table) for table in rotary)
    q_THD = projected_TO.new_empty((len(projected_TO), num_heads, head_dim))
    _kernel(
        len(projected_TO),
        *(num_heads, num_kv_heads, head_dim, kind(projected_TO), projected_TO.data_ptr(), projected_TO.stride(0)),
        *(kind(q_norm_D), q_norm_D.data_ptr(), k_norm_D.data_ptr(), bits(eps)),
        *(cos_T12F.shape[-1], cos_T12F.data_ptr(), cos_T12F.stride(0), sin_T12F.data_ptr(), sin_T12F.stride(0)),
        *(batch.write_blocks_T.data_ptr(), batch.write_offsets_T.data_ptr()),
        *(k_BPGD.data_ptr(), *k_BPGD.stride()[:3], v_BPGD.data_ptr(), *v_BPGD.stride()[:3]),
        q_THD.data_ptr(),
    )
    return q_THD


@helper
def _normalise(head, weight, eps):
    square = np.float32(0.0)
    for i in range(head.size):
        square += head[i] * head[i]
    factor = np.float32(1.0 / math.sqrt(square / head.size + eps))
    for i in range(head.size):
        normed = head[i] * factor
        head[i] = normed + normed * weight[i]


@helper
def _turn(head, cos, sin):
    num_pairs = cos.size // 2
    for i in range(num_pairs):
        low, high = head[i], head[num_pairs + i]
        head[i] = low * cos[i] + high * sin[i]
        head[num_pairs + i] = high * cos[num_pairs + i] + low * sin[num_pairs + i]


@compiled
def _kernel(args):
    num_heads, num_kv_heads, head_dim, dtype, norm_dtype = args[2], args[3], args[4], args[5], args[8]
    eps, num_pairs = number(args[11]), args[12]
    head = np.empty(head_dim, np.float32)
    q_norm, k_norm = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    load(args[9], norm_dtype, 0, q_norm)
    load(args[10], norm_dtype, 0, k_norm)
    task = claim(args)
    while task < args[TASKS]:
        first = task * args[7]
        cos = floats(args[13] + 4 * task * args[14], 2 * num_pairs)
        sin = floats(args[15] + 4 * task * args[16], 2 * num_pairs)
        for i in range(num_heads):
            load(args[6], dtype, first + i * head_dim, head)
            _normalise(head, q_norm, eps)
            round_to(dtype, head)
            _turn(head, cos, sin)
            store(args[27], dtype, (task * num_heads + i) * head_dim, head)
        first += num_heads * head_dim
        block, offset = ints(args[17], task + 1)[task], ints(args[18], task + 1)[task]
        if block != NULL_BLOCK:
            for i in range(num_kv_heads):
                load(args[6], dtype, first + i * head_dim, head)
                _normalise(head, k_norm, eps)
                round_to(dtype, head)
                _turn(head, cos, sin)
                store(args[19], dtype, block * args[20] + offset * args[21] + i * args[22], head)
                load(args[6], dtype, first + (num_kv_heads + i) * head_dim, head)
                store(args[23], dtype, block * args[24] + offset * args[25] + i * args[26], head)
        task = claim(args)
