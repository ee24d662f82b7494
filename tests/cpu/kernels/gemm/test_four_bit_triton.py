"""Triton's products with weights in 4 bits and FP4 are as exact as those of dequantised weights, in every way.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm.linear import linear
from strandline.kernels.gemm.weights import (
    GROUPS_FOUR_BIT,
    CodedWeight,
    DenseWeight,
    FourBitWeight,
    Fp4Weight,
    StackedWeight,
)
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation import swiglu
from tests.cpu.kernels.gemm.test_four_bit import SIZES, error, exact, four_bit_weight
from tests.cpu.kernels.gemm.test_fp4 import exact as exact_fp4
from tests.cpu.kernels.gemm.test_fp4 import fp4_weight
from tests.interpreter import (
    convert_e4m3,
    multiply_bfloat16,
    scale_bfloat16,
    subtract_bfloat16,
    take_loop_bounds_from_memory,
)
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.gemm import (
    dequantizing_triton,
    four_bit_launches,
    four_bit_triton,
    gemms_triton,
    stacked_linear_triton,
)
from strandline.kernels.gemm.rows_triton import Gemv
from strandline.kernels.gemm.tiles_triton import launch_tiles
from strandline.kernels.gemm.weights import BLOCK_INPUTS
from strandline.kernels.launch import Launch

take_loop_bounds_from_memory()
multiply_bfloat16()
subtract_bfloat16()
scale_bfloat16()
convert_e4m3()

TOLERANCE = 1e-4
"""``|out - expected| / |expected|`` of float32 rows: sums of few rows have 2,048 times an input too much."""

WORSE = 1.02
"""Most that an error may be of that of the product in float32 with the weight in bfloat16, both rounded to bfloat16."""

ROUNDED = 1e-2
"""Most that an error may be in 16 bits on a CPU, where Triton's interpreter cuts off bits that a GPU rounds, and of few
numbers."""

MIN_NUMBERS, MIN_NUMBERS_GATED = 1_000, 10_000
"""Fewest numbers whose errors are compared: rounding may favour either of a few, and gated ones are rounded thrice."""

DTYPES = [torch.float32, torch.bfloat16]

Make = Callable[..., CodedWeight]
"""Returns a random weight of a shape."""


INT4: dict[str, Make] = {f"int4-{group}": partial(four_bit_weight, group=group) for group in GROUPS_FOUR_BIT}
FP4: dict[str, Make] = {"nvfp4": partial(fp4_weight, group=16), "mxfp4": partial(fp4_weight, group=32)}

of_every_format = pytest.mark.parametrize("make", [*INT4.values(), *FP4.values()], ids=[*INT4, *FP4])
of_some_formats = pytest.mark.parametrize("make", [INT4["int4-128"], *FP4.values()], ids=["int4", *FP4])


def options_of(make: Make) -> list[dict[str, bool]]:
    """Return options of weights of this format."""
    return [{"symmetric": True}, {"symmetric": False}] if make in INT4.values() else [{}]


def make_x(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return rows with a mean, as a view of wider ones, which are NaN beside it."""
    wide = torch.full((num_rows, num_inputs + 16), torch.nan, dtype=dtype, device=device)
    view = wide[:, 8 : 8 + num_inputs]
    view.copy_(torch.randn(num_rows, num_inputs) + 0.3)
    return view


def check(found: Tensor, x: Tensor, weight: CodedWeight, bias: Tensor | None = None, *, is_gated: bool = False) -> None:
    """Compare a product with that in float64, and its error with that of the dequantised weight's product."""
    exact_OI = exact_fp4(weight) if isinstance(weight, Fp4Weight) else exact(weight)
    added = 0.0 if bias is None else bias.double()
    expected = x.double() @ exact_OI.t() + added
    if is_gated:
        expected = swiglu.reference(expected)
    assert (found.shape, found.dtype) == (expected.shape, x.dtype)
    if x.dtype == torch.float32:
        assert error(found, expected) < (1 + is_gated) * TOLERANCE
        return
    assert error(found, expected) < (1 + is_gated) * ROUNDED
    if x.device.type == "cpu" or found.numel() < (MIN_NUMBERS_GATED if is_gated else MIN_NUMBERS):
        return
    theirs = (x.float() @ exact_OI.to(x.dtype).float().t() + added).to(x.dtype)
    if is_gated:
        theirs = swiglu.reference(theirs)
    assert error(found, expected) <= WORSE * error(theirs, expected)


def check_linear(
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    device: str,
    make: Make = four_bit_weight,
    **weight_options: Any,
) -> None:
    x = make_x(num_rows, num_inputs, dtype, device)
    weight = make(num_outputs, num_inputs, device=device, **weight_options)
    for bias in (torch.randn(num_outputs).to(device, dtype), None):
        for multiply in (four_bit_triton.four_bit_linear, four_bit_triton.four_bit_linear_invariant):
            with poisoned_memory():
                found = multiply(x, weight, bias)
            check(found, x, weight, bias)


def check_tile(
    tile: Launch,
    spans: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    device: str,
    make: Make,
) -> None:
    """Check one way of tiling."""
    x, bias = make_x(num_rows, num_inputs, dtype, device), torch.randn(num_outputs).to(device, dtype)
    for options in options_of(make):
        weight = make(num_outputs, num_inputs, device=device, **options)
        with poisoned_memory():
            found = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
            launch_tiles(found, x, weight, bias, tile._replace(splits=spans))
        check(found, x, weight, bias)


def check_gemv(
    gemv: Gemv, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str, make: Make
) -> None:
    """Check one way to multiply few rows, gated and not, symmetric and not."""
    x = make_x(num_rows, num_inputs, dtype, device)
    for options in options_of(make):
        for is_gated in (False, True):
            weight = make((1 + is_gated) * num_outputs, num_inputs, device=device, **options)
            with poisoned_memory():
                found = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
                four_bit_triton.launch_gemv(found, x, weight, None, gemv, is_gated=is_gated)
            check(found, x, weight, is_gated=is_gated)


def check_gated(
    num_rows: int, num_inputs: int, size: int, dtype: torch.dtype, device: str, make: Make = four_bit_weight
) -> None:
    x, weight = make_x(num_rows, num_inputs, dtype, device), make(2 * size, num_inputs, device=device)
    for launches in Launches:
        with poisoned_memory():
            check(gemms_triton.gated_linear(x, weight, launches=launches), x, weight, is_gated=True)


def check_dequantized(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str) -> None:
    """Check what many rows are multiplied with, to the bit, and the product."""
    makes = [partial(make, **options) for make in (*INT4.values(), *FP4.values()) for options in options_of(make)]
    for make in makes:
        weight = make(num_outputs, num_inputs, device=device)
        x, bias = make_x(num_rows, num_inputs, dtype, device), torch.randn(num_outputs).to(device, dtype)
        with poisoned_memory():
            found = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
            dequantizing_triton.dequantize_into(found, weight)
            product = torch.empty(num_rows, num_outputs, dtype=dtype, device=device)
            dequantizing_triton.multiply_dequantized(product, x, weight, bias)
        is_exact = device != "cpu" or dtype == torch.float32
        torch.testing.assert_close(found, weight.dequantize().to(dtype), rtol=0 if is_exact else ROUNDED, atol=0)
        assert error(product, torch.nn.functional.linear(x, found, bias).double()) < ROUNDED


def check_parts(
    num_rows: int, num_inputs: int, sizes: list[int], dtype: torch.dtype, device: str, make: Make = four_bit_weight
) -> None:
    """Compare weights of parts, quantised and dense ones in turn, with the reference implementation."""
    x = make_x(num_rows, num_inputs, dtype, device)
    parts = [
        DenseWeight((torch.randn(size, num_inputs) * num_inputs**-0.5).to(device, dtype))
        if index % 2
        else make(size, num_inputs, device=device)
        for index, size in enumerate(sizes)
    ]
    weight, whole_bias = StackedWeight(tuple(parts)), torch.randn(sum(sizes)).to(device, dtype)
    for bias in (whole_bias, None):
        expected = linear.reference(x, weight, bias)
        for multiply in (stacked_linear_triton.stacked_linear, stacked_linear_triton.stacked_linear_invariant):
            with poisoned_memory():
                found = multiply(x, weight, bias)
            assert (found.shape, found.dtype) == (expected.shape, dtype)
            assert num_rows == 0 or error(found, expected.double()) < {torch.float32: TOLERANCE}.get(dtype, ROUNDED)


def check_invariant(num_rows: int, num_inputs: int, num_outputs: int, device: str, make: Make) -> None:
    """Compare the bits of one row alone, and among others."""
    weight = make(num_outputs, num_inputs, device=device)
    x = make_x(num_rows, num_inputs, torch.bfloat16, device)
    whole = four_bit_triton.four_bit_linear_invariant(x, weight)
    for rows in (1, 2, 5, num_rows // 2):
        assert torch.equal(four_bit_triton.four_bit_linear_invariant(x[:rows], weight), whole[:rows])
        assert torch.equal(four_bit_triton.four_bit_linear_invariant(x[-rows:], weight), whole[-rows:])


@of_some_formats
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "dtype"),
    [(*size, DTYPES[index % 2]) for index, size in enumerate(SIZES)],
)
def test_products_are_as_exact_as_dequantised(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, make: Make
) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cpu", make)


@pytest.mark.parametrize("num_rows", [1, 40])
@of_some_formats
def test_float16_rows_are_as_exact_as_dequantised(num_rows: int, make: Make) -> None:
    check_linear(num_rows, 300, 70, torch.float16, "cpu", make)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 6])
def test_scales_may_have_any_dtype(num_rows: int, scale_dtype: torch.dtype) -> None:
    x, weight = make_x(num_rows, 200, torch.float32, "cpu"), four_bit_weight(70, 200, scale_dtype=scale_dtype)
    check(four_bit_triton.four_bit_linear(x, weight), x, weight)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_scales_of_whole_rows_may_be_repeated(num_rows: int) -> None:
    x, weight = make_x(num_rows, 300, torch.float32, "cpu"), four_bit_weight(70, 300)
    scales = weight.scales[:, :1].expand(-1, 3)
    repeated = FourBitWeight(weight.words, scales, None, 300, 128)
    check(four_bit_triton.four_bit_linear(x, repeated), x, repeated)


@of_every_format
@pytest.mark.parametrize(
    ("tile", "spans"), [(Launch(16, 64, BLOCK_INPUTS, 4, 1), 3), (Launch(64, 32, BLOCK_INPUTS, 4, 1), 1)]
)
def test_tiles_are_as_exact_as_dequantised(tile: Launch, spans: int, make: Make) -> None:
    check_tile(tile, spans, 70, 520, 100, DTYPES[spans == 1], "cpu", make)


@of_every_format
@pytest.mark.parametrize(("gemv", "num_rows"), [(Gemv(4, 128, 1), 1), (Gemv(2, 512, 2), 3)])
def test_few_rows_are_as_exact_as_dequantised(gemv: Gemv, num_rows: int, make: Make) -> None:
    check_gemv(gemv, num_rows, 640, 33, DTYPES[num_rows == 3], "cpu", make)


@of_some_formats
@pytest.mark.parametrize("num_rows", [1, 9])
def test_gated_products_are_as_exact_as_dequantised(num_rows: int, make: Make) -> None:
    check_gated(num_rows, 260, 20, torch.float32, "cpu", make)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_multiply_the_dequantised_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantizing_triton, "SCRATCH_CODES", 30 * 200)
    check_dequantized(9, 200, 70, dtype, "cpu")


def test_ways_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("launch_gemv", "launch_tiles", "multiply_dequantized"):
        monkeypatch.setattr(four_bit_triton, name, lambda *_, name=name, **__: taken.append(name))
    weight = four_bit_weight(64, 128)
    for num_rows in (0, 1, 16, four_bit_launches.MAX_ROWS_NARROW + 1):
        four_bit_triton.four_bit_linear(torch.zeros(num_rows, 128), weight)
    assert taken == ["launch_gemv", "launch_tiles", "multiply_dequantized"]


@of_some_formats
@pytest.mark.parametrize("num_rows", [0, 1, 3, 9, 65])
def test_weights_of_two_parts_equal_the_reference(num_rows: int, make: Make) -> None:
    check_parts(num_rows, 260, [130, 7], torch.float32, "cpu", make)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_weights_of_more_parts_equal_the_reference(num_rows: int) -> None:
    check_parts(num_rows, 260, [130, 7, 20], torch.float32, "cpu")


@of_some_formats
def test_invariant_products_depend_on_their_row_alone(make: Make) -> None:
    check_invariant(70, 260, 40, "cpu", make)


def test_products_of_no_rows_are_empty() -> None:
    x, weight = torch.zeros(0, 300), four_bit_weight(130, 300)
    assert four_bit_triton.four_bit_linear(x, weight).shape == (0, 130)
    assert four_bit_triton.four_bit_gated_linear(x, weight).shape == (0, 65)
