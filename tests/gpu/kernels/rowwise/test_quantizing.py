"""Quantised rows on a GPU, at the sizes of published models."""

import pytest
import torch

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from tests.cpu.kernels.rowwise.test_norm_triton import check_quantized_gated_norm, check_quantized_norms
from tests.cpu.kernels.rowwise.test_quantizing_triton import check_clamped_swiglu, check_quantizing

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no e4m3 on this GPU")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (1000, 2048), (3, 17408)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_swiglu_equals_the_reference(dtype: torch.dtype) -> None:
    check_clamped_swiglu(300, 2048, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 40), (3, 300), (1000, 2048), (5, 5120)])
def test_quantising_norms_equal_quantising_afterwards(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_quantized_norms(num_rows, size, dtype, "cuda")


@pytest.mark.parametrize("shape", [(1, 32, 128), (700, 48, 128), (3, 2, 256), (5, 4, 96)], ids=str)
def test_quantising_gated_norm_equals_quantising_afterwards(shape: tuple[int, int, int]) -> None:
    check_quantized_gated_norm(shape, torch.bfloat16, "cuda")
