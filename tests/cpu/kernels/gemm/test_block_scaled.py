"""Products in FP8 equal those of the numbers that are multiplied, and stay close to the exact ones."""

import pytest
import torch
from torch import Tensor

from strandline.kernels.binding import bind_kernels
from strandline.kernels.gemm.block_scaled import block_scaled_linear
from strandline.kernels.gemm.linear import bind_gated_linear, bind_linear, gated_linear, linear
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.operation import Workload
from strandline.kernels.rowwise.quantized_rows import GROUP, quantize_groups
from tests.cpu.models import fp8

SIZES = [(1, 128, 128), (3, 40, 1), (5, 300, 130), (2, 129, 257), (17, 256, 96)]
"""Rows, inputs and outputs."""

ROWS_PER_SCALE = [GROUP, 32, 1]
"""Published blocks; blocks in a fused weight whose parts do not start where blocks do; channels."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""``|out - expected| / |expected|``."""


def scaled_weight(*shape: int, rows_per_scale: int = GROUP, device: str = "cpu") -> ScaledWeight:
    """Return random weights whose scales differ; with one row per scale, of channels."""
    num_inputs = shape[-1]
    block = (rows_per_scale, GROUP if rows_per_scale > 1 else num_inputs)
    exact = torch.randn(shape) * num_inputs**-0.5 * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1))
    values, scales = fp8.quantize(exact, block)
    scales = scales.to(device)
    if rows_per_scale == 1:
        scales = scales.expand(*scales.shape[:-1], -(-num_inputs // GROUP))
    return ScaledWeight(values.to(device), scales, rows_per_scale)


def exact(weight: ScaledWeight) -> Tensor:
    """Return what a weight stands for, in float64."""
    rows = torch.arange(weight.values.shape[-2], device=weight.values.device) // weight.rows_per_scale
    columns = torch.arange(weight.values.shape[-1], device=weight.values.device) // GROUP
    return weight.values.double() * weight.scales[..., rows, :][..., columns].double()


def make_x(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return rows whose groups differ in size by orders of magnitude."""
    magnitudes = 10 ** torch.randn(num_rows, -(-num_inputs // GROUP)).repeat_interleave(GROUP, 1)[:, :num_inputs]
    return (torch.randn(num_rows, num_inputs) * magnitudes).to(device, dtype)


def rounded(x: Tensor) -> Tensor:
    """Return what is multiplied instead of x, row by row and group by group, in float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for start in range(0, x.shape[1], GROUP):
            part = x[row, start : start + GROUP].float()
            scale = part.abs().max() / 448
            quantized = (part * (1 / scale)).to(torch.float8_e4m3fn) if scale > 0 else part
            out[row, start : start + GROUP] = quantized.double() * (scale.double() if scale > 0 else 1)
    return out


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_per_scale", ROWS_PER_SCALE)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_are_those_of_the_quantised_numbers(
    num_rows: int, num_inputs: int, num_outputs: int, rows_per_scale: int, dtype: torch.dtype
) -> None:
    x, bias = make_x(num_rows, num_inputs, dtype), torch.randn(num_outputs).to(dtype)
    weight = scaled_weight(num_outputs, num_inputs, rows_per_scale=rows_per_scale)
    assert torch.equal(weight.dequantize(), exact(weight).float())
    out = block_scaled_linear(x, weight, bias)
    assert (out.shape, out.dtype) == ((num_rows, num_outputs), dtype)
    assert error(out, rounded(x) @ exact(weight).t() + bias.double()) < TOLERANCES[dtype]
    # Inputs are rounded to four places: 2.6 % as a rule, of a sum that may be smaller than its parts.
    assert error(out, x.double() @ exact(weight).t() + bias.double()) < 0.1


def test_groups_have_scales_of_their_own() -> None:
    x = torch.zeros(2, 300)
    x[0, 5], x[0, 200], x[1, 299] = 1000.0, -1e-3, 448.0
    x_TXG, scale_TX = quantize_groups(x)
    assert x_TXG.shape == (2, 3, GROUP)
    assert scale_TX[0].tolist() == pytest.approx([1000 / 448, 1e-3 / 448, 0], rel=1e-5, abs=1e-30)
    assert (float(scale_TX[1, 2]), float(x_TXG[1, 2, 299 - 2 * GROUP])) == (1, 448)
    assert (float(x_TXG[0, 0, 5]), float(x_TXG[0, 1, 200 - GROUP])) == (448, -448)


def test_rows_depend_on_themselves_alone() -> None:
    x, weight, bias = make_x(6, 300, torch.float32), scaled_weight(130, 300), torch.randn(130)
    x[1] = torch.nan
    x[2] = 0
    out = block_scaled_linear(x.view(2, 3, -1), weight, bias)
    assert out.shape == (2, 3, 130)
    rows = out.flatten(0, 1)
    assert bool(rows[1].isnan().all())
    assert torch.equal(rows[2], bias)
    for row in (0, 3, 4, 5):
        torch.testing.assert_close(rows[row], block_scaled_linear(x[row : row + 1], weight, bias)[0])


def test_weights_of_parts_are_multiplied_part_by_part() -> None:
    x, bias = make_x(5, 200, torch.float32), torch.randn(130 + 7 + 40)
    first, second, third = scaled_weight(130, 200), torch.randn(7, 200), scaled_weight(40, 200, rows_per_scale=8)
    weight = StackedWeight((first, DenseWeight(second), third))
    kernels = bind_kernels([linear], Workload("cpu", "float32"))
    expected = torch.cat(
        (rounded(x) @ exact(first).t(), x.double() @ second.t().double(), rounded(x) @ exact(third).t()), 1
    )
    assert error(bind_linear(kernels, weight, bias)(x), expected + bias) < 1e-5


def test_gate_and_up_projection_in_fp8() -> None:
    x, weight = make_x(5, 200, torch.float32), scaled_weight(2 * 96, 200, rows_per_scale=32)
    kernels = bind_kernels([gated_linear], Workload("cpu", "float32"))
    gate, up = (rounded(x) @ exact(weight).t()).chunk(2, dim=-1)
    assert error(bind_gated_linear(kernels, weight)(x), torch.nn.functional.silu(gate) * up) < 1e-5


def test_operation_is_bound_like_others() -> None:
    kernels = bind_kernels([linear], Workload("cpu", "bfloat16"))
    assert kernels[linear] is linear.reference
    assert kernels.fallbacks == ()
