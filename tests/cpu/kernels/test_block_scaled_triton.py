"""Triton's products of few rows in FP8 equal the reference implementation's."""

import pytest
import torch

from strandline.kernels.block_scaled import block_scaled_linear
from tests.cpu.kernels.test_block_scaled import SIZES, error, make_case
from tests.interpreter import convert_e4m3, take_loop_bounds_from_memory
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels import block_scaled_triton

take_loop_bounds_from_memory()
convert_e4m3()

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""``|out - ref| / |ref|``: a quotient that lies between two e4m3 numbers may be rounded to either."""


def check(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare with the reference implementation; x is a view of wider rows, which are NaN beside it."""
    x, weight, scale, bias = (part.to(device) for part in make_case(num_rows, num_inputs, num_outputs, dtype))
    wide = torch.full((num_rows, num_inputs + 16), torch.nan, dtype=dtype, device=device)
    view = wide[:, 8 : 8 + num_inputs]
    view.copy_(x)
    for with_bias in (bias, None):
        expected = block_scaled_linear.reference(x, weight, scale, with_bias)
        with poisoned_memory():
            actual = block_scaled_triton.block_scaled_linear(view, weight, scale, with_bias)
        assert (actual.shape, actual.dtype) == (expected.shape, dtype)
        assert error(actual, expected.double()) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_few_rows_equal_the_reference(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    check(num_rows, num_inputs, num_outputs, dtype, "cpu")


def test_rows_of_zeros_and_no_rows() -> None:
    x, weight, scale, bias = make_case(2, 300, 130)
    out = block_scaled_triton.block_scaled_linear(torch.zeros_like(x), weight, scale, bias)
    assert torch.equal(out, bias.expand(2, -1))
    assert block_scaled_triton.block_scaled_linear(x[:0], weight, scale, bias).shape == (0, 130)


def test_scales_of_another_weight_are_refused() -> None:
    x, weight, scale, _ = make_case(2, 300, 130)
    with pytest.raises(ValueError, match=r"scales \(3, 2\) of a weight \(130, 300\)"):
        block_scaled_triton.block_scaled_linear(x, weight, scale.t())
