"""Triton's products in FP8 equal the reference implementation's, whichever way a number of rows takes.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm.block_scaled import block_scaled_linear
from strandline.kernels.gemm.linear import gated_linear, linear
from strandline.kernels.gemm.weights import DenseWeight, ScaledWeight, StackedWeight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.quantized_rows import GROUP, QuantizedRows, quantize
from tests.cpu.kernels.gemm.test_block_scaled import ROWS_PER_SCALE, SIZES, error, make_x, scaled_weight
from tests.interpreter import convert_e4m3, multiply_bfloat16, take_loop_bounds_from_memory
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.gemm import block_scaled_triton, gemms_triton, stacked_linear_triton
from strandline.kernels.gemm.block_scaled_triton import MAX_ROWS_GEMV
from strandline.kernels.gemm.rows_triton import Gemv
from strandline.kernels.gemm.tiles_triton import launch_tiles
from strandline.kernels.launch import Launch
from strandline.kernels.rowwise import activation_triton, quantizing_triton
from strandline.kernels.rowwise.quantizing_triton import quantize_rows

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
        expected = block_scaled_linear(x, weight, with_bias)
        for multiply in (block_scaled_triton.block_scaled_linear, block_scaled_triton.block_scaled_linear_invariant):
            with poisoned_memory():
                actual = multiply(view, weight, with_bias)
            assert (actual.shape, actual.dtype) == (expected.shape, dtype)
            assert error(actual, expected.double()) < TOLERANCES[dtype]


def check_tile(
    tile: Launch, spans: int, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Compare one way of tiling with the reference implementation, and return its result."""
    x, weight = make_x(num_rows, num_inputs, dtype, device), scaled_weight(num_outputs, num_inputs, device=device)
    expected = block_scaled_linear(x, weight)
    with poisoned_memory():
        actual = torch.empty_like(expected)
        launch_tiles(actual, quantize_rows(x), weight, None, tile._replace(splits=spans))
    assert error(actual, expected.double()) < TOLERANCES[dtype]
    return actual


def check_gemv(
    gemv: Gemv, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str, *, is_gated: bool
) -> None:
    """Compare one way to multiply few rows with the reference implementation."""
    x = make_x(num_rows, num_inputs, dtype, device) * (0.02 if is_gated else 1)
    weight = scaled_weight((1 + is_gated) * num_outputs, num_inputs, device=device)
    reference = gated_linear.reference if is_gated else linear.reference
    expected = reference(x, weight)
    with poisoned_memory():
        out = torch.empty_like(expected)
        block_scaled_triton.launch_gemv(out, quantize_rows(x), weight, None, gemv, is_gated=is_gated)
    assert error(out, expected.double()) < (1 + is_gated) * TOLERANCES[dtype]


def check_gated(num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str) -> None:
    x = make_x(num_rows, num_inputs, dtype, device) * 0.02  # so that no exponential overflows
    weight = scaled_weight(2 * size, num_inputs, rows_per_scale=GROUP if size % GROUP == 0 else 1, device=device)
    expected = gated_linear.reference(x, weight)
    for launches in Launches:
        with poisoned_memory():
            actual = gemms_triton.gated_linear(x, weight, launches=launches)
        assert error(actual, expected.double()) < 2 * TOLERANCES[dtype]


def check_quantizing(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare rows, gated linear units and gates that are quantised in the same launch with doing so afterwards."""
    gate_up = in_wider_rows(make_x(num_rows, 2 * num_inputs, dtype, device) * 0.02)
    x, gate = gate_up.clone().chunk(2, dim=1)
    for rows, plain in (
        (quantize_rows(gate_up), gate_up),
        (quantizing_triton.swiglu_quantized(gate_up), activation_triton.swiglu(gate_up)),
        (quantizing_triton.sigmoid_gate_quantized(x, gate), activation_triton.sigmoid_gate(x.clone(), gate)),
    ):
        assert_quantized(rows, plain)


def assert_quantized(rows: QuantizedRows, plain: Tensor) -> None:
    """Compare every bit with the reference implementation's."""
    # On the CPU: on a GPU torch divides by multiplying with a rounded reciprocal.
    expected = quantize(plain.cpu())
    assert (len(rows), rows.dtype, rows.values_TI.is_contiguous()) == (len(plain), plain.dtype, True)
    assert len(rows.values_TI) == rows.scale_XT.shape[1] == -(-len(plain) // 4) * 4
    assert torch.equal(rows.values_TI[: len(rows)].view(torch.uint8).cpu(), expected.values_TI.view(torch.uint8))
    assert torch.equal(rows.scale_XT[:, : len(rows)].cpu(), expected.scale_XT)


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
@pytest.mark.parametrize("tile", [Launch(16, 64, GROUP, 4, 1), Launch(64, 32, GROUP, 4, 1)])
def test_tiles_equal_the_reference(tile: Launch, spans: int) -> None:
    check_tile(tile, spans, 70, 520, 100, torch.float32, "cpu")


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("gemv", "num_rows"), [(Gemv(4, 128, 1), 1), (Gemv(2, 256, 2), 3)])
def test_ways_to_multiply_few_rows_equal_the_reference(gemv: Gemv, num_rows: int, *, is_gated: bool) -> None:
    check_gemv(gemv, num_rows, 640, 128, torch.float32, "cpu", is_gated=is_gated)


@pytest.mark.parametrize("num_rows", [1, 3, 9])
@pytest.mark.parametrize("size", [GROUP, 20])
def test_gated_products_equal_the_reference(num_rows: int, size: int) -> None:
    check_gated(num_rows, 260, size, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (2, 2100)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cpu")


def check_parts(num_rows: int, num_inputs: int, sizes: list[int], dtype: torch.dtype, device: str) -> None:
    """Compare weights of parts, FP8 and ordinary ones in turn, with the reference implementation."""
    x = in_wider_rows(make_x(num_rows, num_inputs, dtype, device))
    parts = [
        DenseWeight((torch.randn(size, num_inputs) * num_inputs**-0.5).to(device, dtype))
        if index % 2
        else scaled_weight(size, num_inputs, rows_per_scale=GROUP if index else 32, device=device)
        for index, size in enumerate(sizes)
    ]
    weight, whole_bias = StackedWeight(tuple(parts)), torch.randn(sum(sizes)).to(device, dtype)
    for bias in (whole_bias, None):
        expected = linear.reference(x, weight, bias)
        for multiply in (stacked_linear_triton.stacked_linear, stacked_linear_triton.stacked_linear_invariant):
            with poisoned_memory():
                plain, quantized = multiply(x, weight, bias), multiply(quantize_rows(x), weight, bias)
            assert (plain.shape, plain.dtype) == (expected.shape, dtype)
            assert num_rows == 0 or error(plain, expected.double()) < TOLERANCES[dtype]
            assert num_rows == 0 or error(quantized, expected.double()) < TOLERANCES[dtype]
            if device == "cpu" or not 1 < num_rows <= MAX_ROWS_GEMV:
                assert torch.equal(plain, quantized)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 9, 65])
def test_weights_of_two_parts_equal_the_reference(num_rows: int) -> None:
    check_parts(num_rows, 260, [130, 7], torch.float32, "cpu")


def test_weights_of_more_parts_equal_the_reference() -> None:
    check_parts(6, 200, [40, 7, 130], torch.float32, "cpu")


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (6, torch.bfloat16)])
def test_quantised_rows_give_the_same_bits(num_rows: int, dtype: torch.dtype) -> None:
    check_quantized_inputs(num_rows, 260, 32, dtype, "cpu")


def check_quantized_inputs(num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Compare products of quantised rows with those of plain ones, bit by bit."""
    x = make_x(num_rows, num_inputs, dtype, device) * 0.02
    weight, rows = scaled_weight(2 * size, num_inputs, rows_per_scale=32, device=device), quantize_rows(x)
    for name, operation in (("linear", linear), ("gated_linear", gated_linear)):
        for launches in Launches:
            multiply = partial(getattr(gemms_triton, name), launches=launches)
            plain = multiply(x, weight)
            assert torch.equal(multiply(rows, weight), plain)
        if device == "cpu":
            # Elsewhere torch's own division rounds in another way.
            assert torch.equal(operation.reference(rows, weight), operation.reference(x, weight))
    for launches in Launches:
        gated = gemms_triton.gated_linear(x, weight, launches=launches)
        quantized = gemms_triton.gated_linear_quantized(rows, weight, launches=launches)
        if isinstance(quantized, Tensor):
            assert torch.equal(quantized, gated)
        else:
            assert_quantized(quantized, gated)


def test_tiles_multiply_more_rows_with_large_weights() -> None:
    small, large = (ScaledWeight(torch.empty(size, 2048, device="meta"), torch.empty(1)) for size in (4096, 12288))
    assert [rows for rows in range(7) if block_scaled_triton.uses_gemv(rows, small)] == [1, 2, 3, 4]
    assert [rows for rows in range(7) if block_scaled_triton.uses_gemv(rows, large)] == [1, 2]


def test_rows_of_zeros_and_no_rows() -> None:
    x, weight, bias = make_x(6, 300, torch.float32), scaled_weight(130, 300), torch.randn(130)
    for rows in (2, 6):
        out = block_scaled_triton.block_scaled_linear(torch.zeros_like(x[:rows]), weight, bias)
        assert torch.equal(out, bias.expand(rows, -1))
    assert block_scaled_triton.block_scaled_linear(x[:0], weight, bias).shape == (0, 130)
    assert block_scaled_triton.block_scaled_gated_linear(x[:0], scaled_weight(256, 300)).shape == (0, 128)
