"""Batch-invariant products under the interpreter; tests/gpu runs the same check on a GPU, and compares bits there."""

import os

import pytest
import torch

from strandline.kernels.gemm import linear_triton, matmul_triton
from strandline.kernels.gemm.linear import head_linear

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

MAX_ERROR = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
"""Relative, in the norm: float32 sums of up to 9,216 terms; a result rounded to bfloat16, by 2^-9 at most, or cut off,
by 2^-8 at most, where Triton's interpreter rounds."""


def check_product(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare with float64: rows of a wider tensor, with a bias and without."""
    wide = torch.randn(num_rows, num_inputs + 16, device=device, dtype=dtype)
    x_TI = wide[:, :num_inputs]
    weight_OI = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
    bias_O = torch.randn(num_outputs, device=device, dtype=dtype)
    expected = x_TI.double() @ weight_OI.double().T
    for bias, right in ((None, expected), (bias_O, expected + bias_O.double())):
        out = matmul_triton.linear_invariant(x_TI, weight_OI, bias)
        assert out.dtype == dtype
        assert out.shape == right.shape
        assert (out.double() - right).norm() / right.norm() < MAX_ERROR[dtype]


def check_heads(num_rows: int, num_heads: int, num_outputs: int, num_inputs: int, device: str) -> None:
    """Compare with float64: a part of every head's channels, with weights that lie either way."""
    wide = torch.randn(num_rows, num_heads, num_inputs + 8, device=device)
    x_THI = wide[:, :, :num_inputs]
    for weight_HOI in (
        torch.randn(num_heads, num_outputs, num_inputs, device=device),
        torch.randn(num_heads, num_inputs, num_outputs, device=device).mT,
    ):
        expected = torch.einsum("thi,hoi->tho", x_THI.double(), weight_HOI.double())
        for multiply in (head_linear.reference, linear_triton.head_linear, matmul_triton.head_linear_invariant):
            out = multiply(x_THI, weight_HOI)
            assert out.shape == expected.shape
            assert (out.double() - expected).norm() / expected.norm() < MAX_ERROR[torch.float32]


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 97, 32), (65, 70, 130), (130, 64, 64)])
def test_products_equal_float64s(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_product(num_rows, num_outputs, num_inputs, dtype, "cpu")


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in Triton's interpreter")
def test_products_of_heads_equal_float64s() -> None:
    check_heads(3, 2, 20, 12, "cpu")
    check_heads(70, 3, 64, 16, "cpu")


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in Triton's interpreter")
def test_leading_dimensions_are_kept() -> None:
    x = torch.randn(2, 3, 16)
    assert matmul_triton.linear_invariant(x, torch.randn(5, 16)).shape == (2, 3, 5)


@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 2560), (1, 248_320), (65, 2560), (8192, 12352)])
def test_every_tile_has_64_rows_at_least(num_rows: int, num_outputs: int) -> None:
    assert matmul_triton.choose_tile(num_rows, num_outputs, torch.bfloat16).block_m >= 64
