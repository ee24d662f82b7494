"""Every form of a weight gives the product of the ordinary one: in bfloat16 bit by bit, in float32 but for rounding."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.binding import Kernels, reference_kernels
from strandline.kernels.gemm import fp8
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_gated_linear, bind_linear
from strandline.kernels.gemm.weights import (
    MAX_HALF_ERROR,
    DenseWeight,
    HalfWeight,
    PackedWeight,
    Weight,
    can_halve,
    can_pack,
    lay_out,
    lay_out_in_half,
)
from strandline.kernels.rowwise.quantized_rows import quantize
from tests.cpu.kernels.gemm.formats import scaled_weight

WEIGHT_OI = (77, 48)
KERNELS: Kernels = reference_kernels(LINEAR_OPERATIONS)

has_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="this CPU multiplies with no float16 weights"
)


def multiply(x: Tensor, weight: Weight, bias_O: Tensor | None = None) -> Tensor:
    return bind_linear(KERNELS, weight, bias_O)(x)


@pytest.mark.parametrize("num_rows", [1, 2, 32, 100])
@pytest.mark.skipif(not can_pack(torch.zeros(WEIGHT_OI).bfloat16()), reason="this CPU packs no bfloat16")
def test_packed_weight_gives_the_same_bits(num_rows: int) -> None:
    weight_OI, bias_O = torch.randn(WEIGHT_OI).bfloat16(), torch.randn(WEIGHT_OI[0]).bfloat16()
    # A slice of wider rows, as projections hand them on.
    x = torch.randn(num_rows, 60).bfloat16()[:, :48]
    packed = lay_out(weight_OI)
    assert isinstance(packed, PackedWeight)
    assert torch.equal(multiply(x, packed), F.linear(x, weight_OI))
    torch.testing.assert_close(multiply(x, packed, bias_O), F.linear(x, weight_OI, bias_O), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("num_rows", [1, 2, 32, 100])
def test_float32_weight_with_inputs_apart_gives_the_same_product(num_rows: int) -> None:
    weight_OI, bias_O = torch.randn(WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    x = torch.randn(num_rows, 60)[:, :48]
    laid_out = lay_out(weight_OI)
    assert isinstance(laid_out, DenseWeight)
    if torch.backends.mkl.is_available():
        assert laid_out.values_OI.stride() == (1, WEIGHT_OI[0])
    torch.testing.assert_close(multiply(x, laid_out), F.linear(x, weight_OI), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(multiply(x, laid_out, bias_O), F.linear(x, weight_OI, bias_O), rtol=1e-5, atol=1e-5)


def test_float32_is_laid_out_where_mkl_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda is_there=is_there: is_there)
        assert can_pack(torch.zeros(WEIGHT_OI)) is is_there


def test_float16_keeps_its_layout() -> None:
    weight_OI = torch.zeros(WEIGHT_OI).half()
    laid_out = lay_out(weight_OI)
    assert isinstance(laid_out, DenseWeight)
    assert laid_out.values_OI is weight_OI


def test_dense_weight_is_multiplied_with_as_it_is() -> None:
    x, weight_OI, bias_O = torch.randn(3, 48), torch.randn(WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    assert torch.equal(multiply(x, DenseWeight(weight_OI), bias_O), F.linear(x, weight_OI, bias_O))


def published(*shape: int) -> Tensor:
    """Return a weight as one in bfloat16 is read into float32, with numbers that float16 rounds, and its largest."""
    weight_OI = torch.randn(*shape).bfloat16().float()
    weight_OI[0, :3] = torch.tensor([2.0**-20 * 1.5078125, 2.0**-26, 65280.0])
    return weight_OI


def halved(weight_OI: Tensor) -> HalfWeight:
    weight = lay_out_in_half(weight_OI)
    assert isinstance(weight, HalfWeight)
    return weight


@has_fbgemm
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 32, 100])
def test_half_weight_gives_the_same_product(num_rows: int) -> None:
    weight_OI, bias_O = published(*WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    x = torch.randn(num_rows, 60)[:, :48]
    weight = halved(weight_OI)
    expected = F.linear(x.double(), weight_OI.double())
    bound = x.abs().sum(-1, keepdim=True) * MAX_HALF_ERROR
    # What float32 loses in sums with numbers as large as 65,280 comes on top.
    loss = 1e-6 * F.linear(x.abs().double(), weight_OI.abs().double())
    assert bool(((multiply(x, weight) - expected).abs() <= bound + loss).all())
    torch.testing.assert_close(multiply(x, weight, bias_O), multiply(x, weight) + bias_O)


@has_fbgemm
def test_gate_in_half_gives_the_same_product() -> None:
    weight_OI, x = torch.randn(64, 48).bfloat16().float(), torch.randn(5, 48)
    gated, dense = (bind_gated_linear(KERNELS, weight) for weight in (halved(weight_OI), DenseWeight(weight_OI)))
    torch.testing.assert_close(gated(x), dense(x), rtol=1e-4, atol=1e-5)


@has_fbgemm
def test_weight_that_float16_would_change_is_not_halved() -> None:
    assert can_halve(published(*WEIGHT_OI))
    assert not can_halve(published(*WEIGHT_OI).bfloat16())
    for number in (1.0 + 2.0**-12, 65536.0, 1e30, torch.inf, torch.nan):
        weight_OI = published(*WEIGHT_OI)
        weight_OI[3, 4] = number
        assert not can_halve(weight_OI), number
        assert isinstance(lay_out_in_half(weight_OI), DenseWeight)


def test_without_fbgemm_nothing_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantized:
        engine = "qnnpack"

    monkeypatch.setattr(torch.backends, "quantized", Quantized)
    assert not can_halve(published(*WEIGHT_OI))


@pytest.mark.parametrize(("width", "start"), [(128, 0), (135, 0), (144, 8), (144, 7)])
def test_cublas_stores_products_in_fp8_in_aligned_rows(width: int, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = scaled_weight(128, 512), quantize(torch.randn(8, 512).bfloat16())
    expected_TO, num_stored = fp8.fp8_linear(rows, weight), 0

    def scaled_mm(*_: Tensor, out: Tensor | None = None, **__: Any) -> Tensor:
        nonlocal num_stored
        if out is None:
            return expected_TO
        num_stored += 1
        assert out.data_ptr() % 16 == out.stride(0) * out.element_size() % 16 == 0
        return out.copy_(expected_TO)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    out_TO = torch.zeros(8, width).bfloat16()[:, start : start + 128]
    fp8.multiply_in_torch(out_TO, rows, weight, None)
    assert torch.equal(out_TO, expected_TO)
    assert num_stored == (width % 8 == start % 8 == 0)
