"""The Triton version of ``embedding.py``: one launch.

Shape suffixes: as in ``embedding.py``.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv

BLOCK_CHANNELS = 1024


@triton.jit(do_not_specialize=["first_token", "num_held"], do_not_specialize_on_alignment=["token_ptr"])
def _embed_kernel(
    token_ptr,
    embed_ptr,
    encoded_ptr,
    out_ptr,
    first_token,
    num_held,
    E,
    HAS_ENCODED: tl.constexpr,
    FIRST_VIRTUAL_ID: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    out_row = tl.program_id(0).to(tl.int64)
    channel_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    is_channel_E = channel_E < E
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    token = tl.load(token_ptr + out_row)
    row = token - first_token
    is_held = (row >= 0) & (row < num_held)
    embedded_E = tl.load(embed_ptr + row * E + channel_E, mask=is_channel_E & is_held, other=0.0)
    if HAS_ENCODED:
        picture_row = token - FIRST_VIRTUAL_ID
        is_picture = picture_row >= 0
        encoded_E = tl.load(encoded_ptr + picture_row * E + channel_E, mask=is_channel_E & is_picture, other=0.0)
        embedded_E = tl.where(is_picture, encoded_E, embedded_E)
    tl.store(out_ptr + out_row * E + channel_E, embedded_E, mask=is_channel_E)


def embed_held(
    token_ids_T: Tensor, embed_ZE: Tensor, first_token: int, num_held: int, encoded_XE: Tensor | None = None
) -> Tensor:
    """As ``embedding.embed_held``; all tensors are contiguous."""
    num_tokens, num_channels = len(token_ids_T), embed_ZE.shape[1]
    out_TE = torch.empty((num_tokens, num_channels), dtype=embed_ZE.dtype, device=embed_ZE.device)
    if num_tokens:
        _embed_kernel[(num_tokens, cdiv(num_channels, BLOCK_CHANNELS))](
            token_ids_T,
            embed_ZE,
            encoded_XE,
            out_TE,
            first_token,
            num_held,
            num_channels,
            HAS_ENCODED=encoded_XE is not None,
            FIRST_VIRTUAL_ID=FIRST_VIRTUAL_ID,
            BLOCK_E=BLOCK_CHANNELS,
            **overlap_options(embed_ZE),
        )
    return out_TE
