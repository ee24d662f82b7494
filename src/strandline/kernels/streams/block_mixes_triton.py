"""Mixes of finished blocks of layers on a GPU: one launch, a program for each token and query.

Invariant: a token's results depend on that token alone, to the last bit.

Shape suffixes: as in ``block_mixes.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import next_power_of_2
from strandline.kernels.streams import block_mixes
from strandline.kernels.streams.block_mixes import BlockMix, OpenBlock

BLOCK_EPS = tl.constexpr(block_mixes.BLOCK_EPS)

CHANNELS_PER_WARP = 1024


@triton.jit
def _normed(x_E, eps, E: tl.constexpr):
    return x_E * tl.rsqrt(tl.sum(x_E * x_E, axis=0) / E + eps)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def _mix_kernel(
    blocks_ptr,
    sum_ptr,
    added_ptr,
    query_ptr,
    norm_ptr,
    inputs_ptr,
    total_ptr,
    num_blocks,
    stride_block_t,
    stride_block,
    stride_sum,
    stride_added,
    num_tokens,
    scale,
    eps,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    channel_E = tl.arange(0, BLOCK_E)
    mask_E = channel_E < E
    norm_E = tl.load(norm_ptr + query * E + channel_E, mask=mask_E, other=0.0).to(tl.float32)
    if query_ptr is not None:
        query_E = tl.load(query_ptr + query * E + channel_E, mask=mask_E, other=0.0)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_E = tl.zeros([BLOCK_E], dtype=tl.float32)
    if sum_ptr is not None:
        x_E += tl.load(sum_ptr + token * stride_sum + channel_E, mask=mask_E, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x_E += tl.load(added_ptr + token * stride_added + channel_E, mask=mask_E, other=0.0).to(tl.float32)
    rounded_E = x_E.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + token * E + channel_E, rounded_E, mask=mask_E & (query == 0))
    x_E = rounded_E.to(tl.float32)
    if query_ptr is not None:
        mixed_E = _normed(x_E, BLOCK_EPS, E)
        most = tl.sum(mixed_E * query_E, axis=0) * scale
        total = 1.0
        blocks_ptr += token * stride_block_t
        for index in range(num_blocks):
            x_E = tl.load(blocks_ptr + index * stride_block + channel_E, mask=mask_E, other=0.0).to(tl.float32)
            x_E = _normed(x_E, BLOCK_EPS, E)
            score = tl.sum(x_E * query_E, axis=0) * scale
            next_most = tl.maximum(most, score)
            decay = tl.exp(most - next_most)
            weight = tl.exp(score - next_most)
            mixed_E = mixed_E * decay + x_E * weight
            total = total * decay + weight
            most = next_most
        x_E = mixed_E / total
    row = query * num_tokens.to(tl.int64) + token
    out_E = (_normed(x_E, eps, E) * norm_E).to(inputs_ptr.dtype.element_ty)
    tl.store(inputs_ptr + row * E + channel_E, out_E, mask=mask_E)


def mix_blocks(
    blocks_TBE: Tensor, num_blocks: int, block: OpenBlock, mix: BlockMix, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the part's normalised inputs and the block under way, as the reference does; rows are dense."""
    num_tokens, _, num_channels = blocks_TBE.shape
    num_queries, device = len(mix.norm_QE), blocks_TBE.device
    inputs_QTE = torch.empty((num_queries, num_tokens, num_channels), dtype=blocks_TBE.dtype, device=device)
    total_TE = torch.empty((num_tokens, num_channels), dtype=dtype, device=device)
    if not num_tokens:
        return inputs_QTE, total_TE
    block_e = next_power_of_2(num_channels)
    _mix_kernel[(num_tokens, num_queries)](
        blocks_TBE,
        *block,
        mix.query_QE,
        mix.norm_QE,
        inputs_QTE,
        total_TE,
        num_blocks,
        *blocks_TBE.stride()[:2],
        *(0 if x is None else x.stride(0) for x in block),
        num_tokens,
        num_channels**-0.5,
        mix.eps,
        E=num_channels,
        BLOCK_E=block_e,
        num_warps=max(1, min(16, block_e // CHANNELS_PER_WARP)),
        **overlap_options(blocks_TBE),
    )
    return inputs_QTE, total_TE
