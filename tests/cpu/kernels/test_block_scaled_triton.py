"""Triton's products in FP8 equal the reference implementation's, whichever way a number of rows takes.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.activation import swiglu
from strandline.kernels.block_scaled import block_scaled_gated_linear, block_scaled_linear, quantize_groups
from strandline.kernels.linear import stacked_linear
from strandline.kernels.weights import GROUP, DenseWeight, StackedWeight
from tests.cpu.kernels.test_block_scaled import ROWS_PER_SCALE, SIZES, error, make_x, scaled_weight
from tests.interpreter import convert_e4m3, multiply_bfloat16, take_loop_bounds_from_memory
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels import block_scaled_tile_triton, block_scaled_triton, stacked_linear_triton
from strandline.kernels.block_scaled_triton import Tile

take_loop_bounds_from_memory()
multiply_bfloat16()
convert_e4m3()

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""``|out - ref| / |ref|``: tensor cores add up e4m3 products with 13 places."""

DTYPES = [torch.float32, torch.bfloat16]


def in_wider_rows(x: Tensor) -> Tensor:
    """Return x as a view of wider rows, which are NaN beside it."""
    wide = torch.full((len(x), x.shape[1] + 16), torch.nan, dtype=x.dtype, device=x.device)
    view = wide[:, 8 : 8 + x.shape[1]]
    view.copy_(x)
    return view


def check_linear(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str, rows_per_scale: int = GROUP
) -> None:
    """Compare with the reference implementation."""
    x = make_x(num_rows, num_inputs, dtype, device)
    weight = scaled_weight(num_outputs, num_inputs, rows_per_scale=rows_per_scale, device=device)
    view, bias = in_wider_rows(x), torch.randn(num_outputs).to(device, dtype)
    for with_bias in (bias, None):
        expected = block_scaled_linear.reference(x, weight, with_bias)
        for multiply in (block_scaled_triton.block_scaled_linear, block_scaled_triton.block_scaled_linear_invariant):
            with poisoned_memory():
                actual = multiply(view, weight, with_bias)
            assert (actual.shape, actual.dtype) == (expected.shape, dtype)
            assert error(actual, expected.double()) < TOLERANCES[dtype]


def check_tile(
    tile: Tile, spans: int, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Compare one way of tiling with the reference implementation, and return its result."""
    x, weight = make_x(num_rows, num_inputs, dtype, device), scaled_weight(num_outputs, num_inputs, device=device)
    expected = block_scaled_linear.reference(x, weight)
    with poisoned_memory():
        quantized = block_scaled_tile_triton.quantize_rows(x)
        actual = block_scaled_triton.launch_gemm(*quantized, weight, None, tile, spans, (num_rows, dtype))
    assert error(actual, expected.double()) < TOLERANCES[dtype]
    return actual


def check_gated(num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str) -> None:
    x = make_x(num_rows, num_inputs, dtype, device) * 0.02  # so that no exponential overflows
    weight = scaled_weight(2 * size, num_inputs, rows_per_scale=GROUP if size % GROUP == 0 else 1, device=device)
    expected = block_scaled_gated_linear.reference(x, weight)
    versions = (block_scaled_triton.block_scaled_gated_linear, block_scaled_triton.block_scaled_gated_linear_invariant)
    for multiply in versions:
        with poisoned_memory():
            actual = multiply(x, weight)
        assert error(actual, expected.double()) < 2 * TOLERANCES[dtype]


def check_quantizing(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare every bit with the reference implementation's."""
    gate_up = in_wider_rows(make_x(num_rows, 2 * num_inputs, dtype, device) * 0.02)
    for x, (rows, scale_XT) in (
        (gate_up, block_scaled_tile_triton.quantize_rows(gate_up)),
        (swiglu.reference(gate_up), block_scaled_tile_triton.quantize_swiglu(gate_up)),
    ):
        # On the CPU: on a GPU torch divides by multiplying with a rounded reciprocal.
        x_TXG, scale_TX = (part.to(device) for part in quantize_groups(x.cpu()))
        assert len(rows) == scale_XT.shape[1] == -(-num_rows // 4) * 4
        # Activated numbers are rounded once more, which the interpreter does by cutting off.
        rtol = 0 if x is gate_up else 0.03
        assert error(rows[:num_rows].float(), x_TXG.flatten(1)[:, : x.shape[1]].double()) <= rtol
        torch.testing.assert_close(scale_XT.t()[:num_rows], scale_TX, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "dtype"),
    [(*size, DTYPES[index % 2]) for index, size in enumerate(SIZES)],
)
def test_products_equal_the_reference(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cpu")


@pytest.mark.parametrize("rows_per_scale", ROWS_PER_SCALE[1:])
@pytest.mark.parametrize("num_rows", [2, 6])
def test_other_scales_equal_the_reference(num_rows: int, rows_per_scale: int) -> None:
    check_linear(num_rows, 200, 70, torch.float32, "cpu", rows_per_scale)


@pytest.mark.parametrize("spans", [1, 3])
@pytest.mark.parametrize("tile", [Tile(64, 16, 4, 1), Tile(32, 64, 4, 1)])
def test_tiles_equal_the_reference(tile: Tile, spans: int) -> None:
    check_tile(tile, spans, 70, 520, 100, torch.float32, "cpu")


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("size", [GROUP, 20])
def test_gated_products_equal_the_reference(num_rows: int, size: int) -> None:
    check_gated(num_rows, 260, size, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (2, 2100)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cpu")


def test_weights_of_parts_equal_the_reference() -> None:
    x, bias = make_x(3, 200, torch.float32), torch.randn(130 + 7)
    weight = StackedWeight((scaled_weight(130, 200), DenseWeight(torch.randn(7, 200))))
    expected = stacked_linear.reference(x, weight, bias).double()
    assert error(stacked_linear_triton.stacked_linear(x, weight, bias), expected) < 1e-4
    assert error(stacked_linear_triton.stacked_linear_invariant(x, weight, bias), expected) < 1e-4


def test_rows_of_zeros_and_no_rows() -> None:
    x, weight, bias = make_x(6, 300, torch.float32), scaled_weight(130, 300), torch.randn(130)
    for rows in (2, 6):
        out = block_scaled_triton.block_scaled_linear(torch.zeros_like(x[:rows]), weight, bias)
        assert torch.equal(out, bias.expand(rows, -1))
    assert block_scaled_triton.block_scaled_linear(x[:0], weight, bias).shape == (0, 130)
    assert block_scaled_triton.block_scaled_gated_linear(x[:0], scaled_weight(256, 300)).shape == (0, 128)
