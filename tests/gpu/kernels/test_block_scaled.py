"""Products of few rows in FP8 on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch

from strandline.device.dtypes import E4M3_CAPABILITY
from tests.cpu.kernels.test_block_scaled import SIZES
from tests.cpu.kernels.test_block_scaled_triton import check

MODELS = [(1, 2048, 8192), (16, 2048, 4096), (33, 5120, 17408)]


@pytest.mark.skipif(torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products in e4m3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [*SIZES, *MODELS])
def test_few_rows_equal_the_reference(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    check(num_rows, num_inputs, num_outputs, dtype, "cuda")
