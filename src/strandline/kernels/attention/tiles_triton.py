"""Tiles of queries and of keys: what Triton kernels of softmax attention share.

A program takes in tiles of keys one after the other. Of its rows it has weighted sums of values, maxima of scores in
units of log2, and sums of weights, all relative to the maxima (``no_keys``, ``take_in``).

Source: Dao, "FlashAttention-2" (tiles of queries, deferred normalisation).

Shape suffixes: M rows of a tile, K keys of a tile, D channels, N sequences of a launch; B blocks, P tokens in a block,
G key/value heads.
"""
# mypy: ignore-errors

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """How a kernel is launched; ``keys`` divides a block."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def bytes_ahead(self, k_BPGD: Tensor) -> int:
        """Return the size of the keys and values that a program loads ahead."""
        return (self.num_stages - 1) * self.keys * 2 * k_BPGD.shape[3] * k_BPGD.element_size()


FLOAT32_TILE = Tile(rows=16, keys=32, num_warps=8, num_stages=1)
"""For float32: for tests, not for speed, as its products make little use of tensor cores."""


@triton.jit
def locate_tile(tile, query_start_ptr, num_prefills, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the prefill that a tile of rows belongs to, ``num_prefills`` if to none, and the tile's index in it."""
    index_N = tl.arange(0, BLOCK_N)
    is_prefill_N = index_N < num_prefills
    start_N = tl.load(query_start_ptr + index_N, mask=is_prefill_N, other=0).to(tl.int32)
    stop_N = tl.load(query_start_ptr + index_N + 1, mask=is_prefill_N, other=0).to(tl.int32)
    num_tiles_N = tl.cdiv((stop_N - start_N) * GROUP, BLOCK_M)
    is_before_N = is_prefill_N & (tl.cumsum(num_tiles_N, axis=0) <= tile)
    return tl.sum(is_before_N.to(tl.int32), axis=0), tile - tl.sum(tl.where(is_before_N, num_tiles_N, 0), axis=0)


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return sums of values, maxima and sums of weights of rows that have seen no key."""
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    return acc_MD, max_M, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def take_in(acc_MD, max_M, sum_M, score_MK, v_KD, scale_log2, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Return what ``no_keys`` does, after one more tile of keys.

    Args:
        score_MK: minus infinity for keys that a row does not see; not masked, every row sees one at least.
        scale_log2: scale of scores whose exponentials are powers of two.
    """
    new_max_M = tl.maximum(max_M, tl.max(score_MK, axis=1) * scale_log2)
    base_M = new_max_M
    if IS_MASKED:
        # A row that has seen no key yet: its weights are 0, not the NaN of inf - inf.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weight_MK = tl.exp2(score_MK * scale_log2 - base_M[:, None])
    decay_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * decay_M + tl.sum(weight_MK, axis=1)
    acc_MD = tl.dot(weight_MK.to(v_KD.dtype), v_KD, acc=acc_MD * decay_M[:, None], input_precision=PRECISION)
    return acc_MD, new_max_M, sum_M
