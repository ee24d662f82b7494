"""Queries, keys and values in Triton on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch

from tests.cpu.kernels.test_qkv_triton import SHAPES, Shape, check

MODELS = [Shape(16, 4, 256, 64, [1]), Shape(16, 2, 256, 64, [row // 60 for row in range(300)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS])
def test_rows_are_stored_where_they_belong_and_nowhere_else(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")
