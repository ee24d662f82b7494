"""The Triton version of ``stored_tokens.py``: one program per token.

Shape suffixes: as in ``stored_tokens.py``.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.batch import AttentionBatch
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["block_ptr", "offset_ptr"])
def _store_kernel(
    new_ptr,
    memory_ptr,
    block_ptr,
    offset_ptr,
    stride_new,
    stride_block,
    stride_row,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store a token's row, unless its block is the null block."""
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    channel_C = tl.arange(0, BLOCK_C)
    block = tl.load(block_ptr + token).to(tl.int64)
    offset = tl.load(offset_ptr + token).to(tl.int64)
    new_C = tl.load(new_ptr + token * stride_new + channel_C, mask=channel_C < C, other=0.0)
    row_ptr = memory_ptr + block * stride_block + offset * stride_row
    tl.store(row_ptr + channel_C, new_C, mask=(channel_C < C) & (block != 0))


def store_tokens(row_TC: Tensor, memory_BPC: Tensor, batch: AttentionBatch) -> None:
    """As ``stored_tokens.store_tokens``. Needs contiguous channels."""
    num_tokens, num_channels = row_TC.shape
    if num_tokens:
        _store_kernel[(num_tokens,)](
            row_TC, memory_BPC, batch.write_blocks_T, batch.write_offsets_T,
            row_TC.stride(0), memory_BPC.stride(0), memory_BPC.stride(1),
            C=num_channels, BLOCK_C=next_power_of_2(num_channels), num_warps=1, **overlap_options(row_TC),
        )  # fmt: skip
