"""Queries, keys and values in Triton on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from tests.cpu.kernels.attention.test_qkv_triton import SHAPES, Shape, check

MODELS = [Shape(16, 4, 256, 64, [1]), Shape(16, 2, 256, 64, [row // 60 for row in range(300)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS])
def test_rows_are_stored_where_they_belong_and_nowhere_else(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")


@pytest.mark.skipif(torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no conversions to e4m3")
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.004, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS])
def test_e4m3_is_rounded_and_limited(shape: Shape, dtype: torch.dtype, scales: tuple[float, float]) -> None:
    check(shape, dtype, "cuda", scales=scales)
