"""Clips of heads in Triton on a GPU, of Inkling 2's heads and others."""

import pytest
import torch

from tests.cpu.kernels.rowwise.test_head_clip_triton import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 6), (48, 16), (48, 128)])
def test_clips_equal_the_definition(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(num_heads, head_dim, dtype, "cuda", has_scale=True, has_factor=True)
    check(num_heads, head_dim, dtype, "cuda", has_scale=False, has_factor=False)
