"""Logs of decoded tokens in Triton: the reads of ``gdn_decode_triton.py``, and ``gdn_log.gdn_fold``.

A program reads a log's keys and decays of one head and some value channels. Entries past its end are never read.

Shape suffixes as in ``kernels/recurrences/gdn_log.py``.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.recurrences.decode_launches import HEADS_WITH_LOG, fit_registers
from strandline.kernels.recurrences.gdn_log import LogMemory
from strandline.kernels.sizes import cdiv, next_power_of_2

FOLD = HEADS_WITH_LOG.many
"""As in most decode steps with a log."""


def gdn_fold(state_RSHKV: Tensor, memory: LogMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
    """As ``gdn_log.gdn_fold``: one launch."""
    num_layers, _, num_heads, key_dim, value_dim = state_RSHKV.shape
    num_logs, num_key_heads, num_entries = memory.key_JGLK.shape[1:4]
    launch = fit_registers(FOLD, key_dim)
    block_v = min(launch.block_v, next_power_of_2(value_dim))
    # In one dimension: others of a launch have 65,535 programs at most, fewer than many sequences have heads.
    _fold_kernel[(cdiv(value_dim, block_v) * num_heads * len(slot_N), num_layers)](
        state_RSHKV,
        memory.key_JGLK,
        memory.value_JHLV,
        memory.decay_JHL,
        slot_N,
        log_N,
        len_N,
        num_logs,
        state_RSHKV.stride(0),
        state_RSHKV.stride(1),
        G=num_key_heads,
        H=num_heads,
        K=key_dim,
        V=value_dim,
        L=num_entries,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=launch.num_warps,
    )


# Slices of the tables start at any sequence: without this, each alignment would compile a kernel of its own.
@triton.jit(do_not_specialize=["num_logs"], do_not_specialize_on_alignment=["slot_ptr", "log_ptr", "len_ptr"])
def _fold_kernel(
    state_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    slot_ptr,
    log_ptr,
    len_ptr,
    num_logs,
    layer_stride,
    slot_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first_column = tl.program_id(0) % BLOCKS * BLOCK_V
    head = (tl.program_id(0) // BLOCKS % H).to(tl.int64)
    sequence = tl.program_id(0) // (BLOCKS * H)
    layer = tl.program_id(1).to(tl.int64)
    row_K = tl.arange(0, BLOCK_K)
    column_V = tl.arange(0, BLOCK_V)
    is_row_K = row_K < K
    is_column_V = first_column + column_V < V
    is_tile_KV = is_row_K[:, None] & is_column_V[None, :]
    slot = tl.load(slot_ptr + sequence)
    log = layer * num_logs + tl.load(log_ptr + sequence)
    length = tl.load(len_ptr + sequence)
    key_ptrs_K = keys_ptr + (log * G + head // (H // G)) * (L * K) + row_K
    value_ptrs_V = values_ptr + (log * H + head) * (L * V) + first_column + column_V
    weight_L, carried = weights_of_logged(decays_ptr + (log * H + head) * L, length, 0.0, L)
    state_ptrs = state_ptr + layer * layer_stride + slot * slot_stride + head * (K * V) + first_column
    state_ptrs += row_K[:, None] * V + column_V[None, :]
    state_KV = tl.load(state_ptrs, mask=is_tile_KV, other=0.0).to(tl.float32) * carried
    state_KV = add_logged(state_KV, key_ptrs_K, is_row_K, K, value_ptrs_V, is_column_V, V, weight_L, length)
    tl.store(state_ptrs, state_KV.to(state_ptr.dtype.element_ty), mask=is_tile_KV)


@triton.jit
def load_logged(ptrs_X, is_in_X, stride: tl.constexpr, length, L: tl.constexpr):
    """Return a log's keys or values, ``[L, X]``, given the address of its first entry."""
    index_L = tl.arange(0, L)
    mask_LX = (index_L < length)[:, None] & is_in_X[None, :]
    return tl.load(ptrs_X[None, :] + index_L[:, None] * stride, mask=mask_LX, other=0.0)


@triton.jit
def weights_of_logged(decays_ptr, length, log_decay, L: tl.constexpr):
    """Return the remaining weight of each logged write and of the committed state, after one more decay."""
    index_L = tl.arange(0, L)
    decay_L = tl.load(decays_ptr + index_L, mask=index_L < length, other=0.0)
    is_later_LL = index_L[None, :] > index_L[:, None]
    # Added, never subtracted: a weak decay beside a strong one would be lost.
    after_L = tl.sum(tl.where(is_later_LL, decay_L[None, :], 0.0), 1)
    return tl.exp(after_L + log_decay), tl.exp(tl.sum(decay_L, 0) + log_decay)


@triton.jit
def add_logged(
    state_KV, key_ptrs_K, is_row_K, K: tl.constexpr, value_ptrs_V, is_column_V, V: tl.constexpr, weight_L, length
):
    """Add a log to a state, token by token: it is read from the cache, and takes no registers but for one token."""
    index_L = tl.arange(0, weight_L.shape[0])
    for i in range(length):
        key_K = tl.load(key_ptrs_K + i * K, mask=is_row_K, other=0.0)
        value_V = tl.load(value_ptrs_V + i * V, mask=is_column_V, other=0.0)
        value_V *= tl.sum(tl.where(index_L == i, weight_L, 0.0), 0)
        state_KV += key_K[:, None] * value_V[None, :]
    return state_KV
