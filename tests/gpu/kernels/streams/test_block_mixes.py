"""Mixes of blocks in Triton on a GPU, at Inkling 2's width."""

import pytest
import torch

from tests.cpu.kernels.streams.test_block_mixes_triton import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["sum", "added", "sum added"])
@pytest.mark.parametrize(("num_blocks", "num_queries"), [(0, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("width", [40, 4608])
def test_mixes_equal_the_definition(
    width: int, num_blocks: int, num_queries: int, given: str, dtype: torch.dtype
) -> None:
    for num_tokens in (1, 5):
        check(num_blocks, num_queries, width, dtype, "cuda", given=given, num_tokens=num_tokens)
