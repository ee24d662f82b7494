"""Clips of heads on a GPU: one launch, rounded where ``head_clip.py`` rounds.

Rows may lie far apart (views of a fused projection); the last dimension must be dense.

Shape suffixes: as in ``head_clip.py``; R heads of a program.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise import head_clip
from strandline.kernels.sizes import cdiv, next_power_of_2

CLIP_EPS = tl.constexpr(head_clip.CLIP_EPS)

ELEMENTS = 1024
"""A program clips as many heads of a token as make up this many elements."""

WARPS = 4


@triton.jit
def _clip_kernel(
    x_ptr,
    scale_ptr,
    factor_ptr,
    out_ptr,
    stride_t,
    stride_h,
    threshold,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel_D = tl.arange(0, BLOCK_D)
    mask_RD = (head_R < H)[:, None] & (channel_D < D)[None, :]
    own_RD = (head_R * D)[:, None] + channel_D[None, :]
    scale_RD = 1.0
    if scale_ptr is not None:
        scale_RD = tl.load(scale_ptr + own_RD, mask=mask_RD, other=0.0).to(tl.float32)
    release_next(OVERLAPS)
    wait_for_previous(OVERLAPS)
    x_ptr_RD = x_ptr + token * stride_t + (head_R * stride_h)[:, None] + channel_D[None, :]
    x_RD = tl.load(x_ptr_RD, mask=mask_RD, other=0.0).to(tl.float32) * scale_RD
    shrink_R = threshold / (tl.sqrt(tl.sum(x_RD * x_RD, axis=1)) + CLIP_EPS)
    # NaN stays NaN.
    shrink_R = tl.where(shrink_R > 1.0, 1.0, shrink_R)
    out_RD = (x_RD * shrink_R[:, None]).to(out_ptr.dtype.element_ty)
    if factor_ptr is not None:
        out_RD = (out_RD.to(tl.float32) * tl.load(factor_ptr + token)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * (H * D) + own_RD, out_RD, mask=mask_RD)


def clip_heads(
    x_THD: Tensor, threshold: float, scale_HD: Tensor | None = None, factor_T: Tensor | None = None
) -> Tensor:
    """Return clipped heads, as the reference does; contiguous."""
    num_tokens, num_heads, head_dim = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if not num_tokens:
        return out_THD
    block_d = next_power_of_2(head_dim)
    block_r = max(1, min(next_power_of_2(num_heads), ELEMENTS // block_d))
    _clip_kernel[(num_tokens, cdiv(num_heads, block_r))](
        x_THD,
        scale_HD,
        factor_T,
        out_THD,
        *x_THD.stride()[:2],
        threshold,
        H=num_heads,
        D=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=WARPS,
        **overlap_options(x_THD),
    )
    return out_THD
