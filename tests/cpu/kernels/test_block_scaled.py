"""Products in FP8 equal those of the numbers that are multiplied, and stay close to the exact ones."""

import pytest
import torch
from torch import Tensor

from strandline.kernels.binding import bind_kernels
from strandline.kernels.block_scaled import GROUP, block_scaled_linear, quantize_groups
from strandline.kernels.operation import Workload
from tests.cpu.models import fp8

SIZES = [(1, 128, 128), (3, 40, 1), (5, 300, 130), (2, 129, 257), (17, 256, 96)]
"""Rows, inputs and outputs."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""``|out - expected| / |expected|``."""


def make_case(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, whose groups differ in size by orders of magnitude, a weight, its scales and a bias."""
    magnitudes = 10 ** torch.randn(num_rows, -(-num_inputs // GROUP)).repeat_interleave(GROUP, 1)[:, :num_inputs]
    x = (torch.randn(num_rows, num_inputs) * magnitudes).to(dtype)
    weight, scale = fp8.quantize(torch.randn(num_outputs, num_inputs) * num_inputs**-0.5, (GROUP, GROUP))
    return x, weight, scale, torch.randn(num_outputs).to(dtype)


def dequantized(x: Tensor) -> Tensor:
    """Return what is multiplied in place of x, row by row and group by group, in float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for start in range(0, x.shape[1], GROUP):
            part = x[row, start : start + GROUP].float()
            scale = part.abs().max() / 448
            quantized = (part / scale).to(torch.float8_e4m3fn) if scale > 0 else part
            out[row, start : start + GROUP] = quantized.double() * (scale.double() if scale > 0 else 1)
    return out


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_are_those_of_the_quantised_numbers(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    x, weight, scale, bias = make_case(num_rows, num_inputs, num_outputs, dtype)
    exact = fp8.dequantize(weight, scale, (GROUP, GROUP)).double()
    out = block_scaled_linear.reference(x, weight, scale, bias)
    assert (out.shape, out.dtype) == ((num_rows, num_outputs), dtype)
    assert error(out, dequantized(x) @ exact.t() + bias.double()) < TOLERANCES[dtype]
    # Inputs are rounded to four places: 2.6 % as a rule, of a sum that may be smaller than its parts.
    assert error(out, x.double() @ exact.t() + bias.double()) < 0.1


def test_groups_have_scales_of_their_own() -> None:
    x = torch.zeros(2, 300)
    x[0, 5], x[0, 200], x[1, 299] = 1000.0, -1e-3, 448.0
    x_TXG, scale_TX = quantize_groups(x)
    assert x_TXG.shape == (2, 3, GROUP)
    assert scale_TX[0].tolist() == pytest.approx([1000 / 448, 1e-3 / 448, 0], rel=1e-5, abs=1e-30)
    assert (float(scale_TX[1, 2]), float(x_TXG[1, 2, 299 - 2 * GROUP])) == (1, 448)
    assert (float(x_TXG[0, 0, 5]), float(x_TXG[0, 1, 200 - GROUP])) == (448, -448)


def test_rows_depend_on_themselves_alone() -> None:
    x, weight, scale, bias = make_case(6, 300, 130)
    x[1] = torch.nan
    x[2] = 0
    out = block_scaled_linear.reference(x.view(2, 3, -1), weight, scale, bias)
    assert out.shape == (2, 3, 130)
    rows = out.flatten(0, 1)
    assert bool(rows[1].isnan().all())
    assert torch.equal(rows[2], bias)
    for row in (0, 3, 4, 5):
        torch.testing.assert_close(rows[row], block_scaled_linear.reference(x[row : row + 1], weight, scale, bias)[0])


def test_operation_is_bound_like_others() -> None:
    kernels = bind_kernels([block_scaled_linear], Workload("cpu", "bfloat16"))
    assert kernels[block_scaled_linear] is block_scaled_linear.reference
    assert kernels.fallbacks == ()
