"""Keys of tokens on a GPU, which the kernels of ``sampling_triton.py`` and ``filters_triton.py`` order rows by.

A token's *key* orders a row: its logit's bits made monotone, then its index, lower first. No two keys of a row are
equal, so that a filter keeps the tokens from one key upwards, and ties go to the lower index.

Shape suffixes: as in ``sampling.py``.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Tokens of a program: a row of 248,320 is spread over 61 of them."""


@triton.jit
def ordered_bits(logit):
    """Return int32 that are ordered as the logits are; both zeros have the same."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of_bits(bits, token, INDEX_BITS: tl.constexpr):
    return (bits.to(tl.int64) << INDEX_BITS) + ((1 << INDEX_BITS) - 1 - token).to(tl.int64)


@triton.jit
def key_of(logit, token, INDEX_BITS: tl.constexpr):
    """Return int64 keys: larger for larger logits, and of equal ones for lower tokens."""
    return key_of_bits(ordered_bits(logit), token, INDEX_BITS)


@triton.jit
def logit_of(key, INDEX_BITS: tl.constexpr):
    bits = (key >> INDEX_BITS).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


def with_dense_rows(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
