"""Weights stand for what their formats say, and reference implementations multiply with exactly that."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strandline.kernels.binding import bind_kernels
from strandline.kernels.gemm.formats import fp4
from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS, CodedFormat
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_gated_linear, bind_linear, linear
from strandline.kernels.gemm.weights import CodedWeight, DenseWeight, StackedWeight
from strandline.kernels.operation import Workload
from strandline.kernels.rowwise.quantized_rows import GROUP, quantize_groups
from tests.cpu.kernels.gemm.formats import (
    ALL_CODED,
    ALL_FORMATS,
    CASES,
    FORMATS,
    FP8,
    QUANTIZED,
    Case,
    error,
    exact,
    gated,
    multiplied,
    of_every_case,
    of_quantized_formats,
    product,
)

SIZES = [(1, 128, 128), (3, 40, 1), (5, 300, 130), (2, 129, 257), (17, 256, 96)]
"""Rows, inputs and outputs."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""``|out - expected| / |expected|``."""

KERNELS = bind_kernels(LINEAR_OPERATIONS, Workload("cpu", "float32"))


@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 300), (1, 1)], ids=str)
@pytest.mark.parametrize("format", ALL_CODED, ids=lambda format: format.name)
def test_codes_are_packed_without_loss(format: CodedFormat, shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 1 << format.bits, shape, dtype=torch.uint8)
    words, num_blocks = format.pack(codes), -(-shape[-1] // BLOCK_INPUTS)
    assert (words.dtype, words.shape) == (torch.int32, (*shape[:-1], num_blocks * BLOCK_INPUTS * format.bits // 32))
    assert torch.equal(format.unpack(words)[..., : shape[-1]], codes)
    assert not format.unpack(words)[..., shape[-1] :].any()


def test_scales_of_nvfp4_are_stored_without_loss() -> None:
    scales = torch.tensor([*range(0x7F), 0x80], dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].expand(-1, 17)
    codes = torch.randint(0, 16, (len(scales), 16 * 17 - 3), dtype=torch.uint8)
    words, stored = fp4.store(codes, scales)
    assert (stored.dtype, stored.shape) == (torch.int64, (len(scales), 3))
    weight = CodedWeight(fp4.FP4, words, stored, codes.shape[1], 16, factors=torch.ones(len(scales)))
    number_of = torch.tensor((*fp4.E2M1, *(-number for number in fp4.E2M1)))
    assert torch.equal(weight.dequantize(), number_of[codes.int()] * scales[:, :1].float())


def test_all_formats_have_functions_and_random_weights() -> None:
    operand_triton = pytest.importorskip("strandline.kernels.gemm.formats.operand_triton")
    for format in ALL_FORMATS:
        functions = operand_triton.device_functions(format.functions)
        assert (functions.dequantize is not None) == (format in ALL_CODED)
    assert {case.weight(2, 128).format for case in FORMATS.values()} == set(ALL_FORMATS)


@given(st.sampled_from(sorted(CASES.keys() - {"dense"})), st.integers(1, 10), st.integers(0, 2**31))
def test_weights_stand_for_their_numbers(name: str, num_groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = CASES[name].weight(3, 7, 32 * num_groups)
    assert weight.shape == (3, 7, 32 * num_groups)
    torch.testing.assert_close(weight.dequantize().double(), exact(weight), rtol=1e-6, atol=0)
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@of_every_case
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_are_those_of_the_numbers(
    num_rows: int, num_inputs: int, num_outputs: int, case: Case, dtype: torch.dtype
) -> None:
    x, weight = case.make_x(num_rows, num_inputs, dtype, "cpu"), case.weight(num_outputs, num_inputs, dtype=dtype)
    bias = torch.randn(num_outputs).to(dtype)
    out = linear.reference(x, weight, bias)
    assert (out.shape, out.dtype) == ((num_rows, num_outputs), dtype)
    assert error(out, product(x, weight, bias)) < TOLERANCES[dtype] * (3 if case is FORMATS["dense"] else 1)


@pytest.mark.parametrize("case", FP8.values(), ids=FP8)
def test_quantised_activations_are_near(case: Case) -> None:
    """Inputs are rounded to four places: 2.6 % as a rule, of a sum that may be smaller than its parts."""
    x, weight = case.make_x(5, 300, torch.float32, "cpu"), case.weight(130, 300)
    assert error(linear.reference(x, weight), x.double() @ exact(weight).t()) < 0.1
    assert error(multiplied(x, weight), x.double()) < 0.04


def test_groups_have_scales_of_their_own() -> None:
    x = torch.zeros(2, 300)
    x[0, 5], x[0, 200], x[1, 299] = 1000.0, -1e-3, 448.0
    x_TXG, scale_TX = quantize_groups(x)
    assert x_TXG.shape == (2, 3, GROUP)
    assert scale_TX[0].tolist() == pytest.approx([1000 / 448, 1e-3 / 448, 0], rel=1e-5, abs=1e-30)
    assert (float(scale_TX[1, 2]), float(x_TXG[1, 2, 299 - 2 * GROUP])) == (1, 448)
    assert (float(x_TXG[0, 0, 5]), float(x_TXG[0, 1, 200 - GROUP])) == (448, -448)


@of_quantized_formats
def test_rows_depend_on_themselves_alone(case: Case) -> None:
    x, weight, bias = case.make_x(6, 300, torch.float32, "cpu"), case.weight(130, 300), torch.randn(130)
    x[1] = torch.nan
    x[2] = 0
    out = linear.reference(x.reshape(2, 3, -1), weight, bias)
    assert out.shape == (2, 3, 130)
    rows = out.flatten(0, 1)
    assert bool(rows[1].isnan().all())
    assert torch.equal(rows[2], bias)
    for row in (0, 3, 4, 5):
        torch.testing.assert_close(rows[row], linear.reference(x[row : row + 1], weight, bias)[0])


@of_quantized_formats
def test_layers_bind_products_of_parts(case: Case) -> None:
    x, bias = case.make_x(5, 200, torch.float32, "cpu"), torch.randn(130 + 7 + 40)
    parts = (case.weight(130, 200), DenseWeight(torch.randn(7, 200)), QUANTIZED["fp8"].weight(40, 200))
    expected = torch.cat([product(x, part) for part in parts], dim=1) + bias
    assert error(bind_linear(KERNELS, StackedWeight(parts), bias)(x), expected) < 1e-5


@of_every_case
def test_layers_bind_gated_products(case: Case) -> None:
    x, weight = case.make_x(5, 200, torch.float32, "cpu") * 0.02, case.weight(2 * 96, 200)
    assert error(bind_gated_linear(KERNELS, weight)(x), gated(product(x, weight))) < 1e-5


def test_operation_is_bound_like_others() -> None:
    kernels = bind_kernels([linear], Workload("cpu", "bfloat16"))
    assert kernels[linear] is linear.reference
    assert kernels.fallbacks == ()
