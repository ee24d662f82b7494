"""Weights in 4 bits are packed without loss, and products with them equal those of the numbers they stand for."""

import pytest
import torch
from torch import Tensor

from strandline.kernels.binding import bind_kernels
from strandline.kernels.gemm.linear import LINEAR_OPERATIONS, bind_gated_linear, bind_linear, gated_linear, linear
from strandline.kernels.gemm.weights import (
    BLOCK_INPUTS,
    GROUPS_FOUR_BIT,
    SYMMETRIC_ZERO,
    DenseWeight,
    FourBitWeight,
    StackedWeight,
    pack_codes,
    unpack_codes,
)
from strandline.kernels.operation import Workload

SIZES = [(1, 128, 128), (3, 40, 1), (2, 300, 130), (4, 129, 257), (17, 256, 96)]
"""Rows, inputs and outputs."""

TOLERANCE = 2e-6
"""``|out - expected| / |expected|`` in float32."""


def four_bit_weight(
    *shape: int,
    group: int = 128,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> FourBitWeight:
    """Return random weights, whose scales differ."""
    num_inputs = shape[-1]
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    num_groups = -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS // group
    scales = (torch.rand(*shape[:-1], num_groups) + 0.2) * 0.2 * num_inputs**-0.5
    zeros = None if symmetric else torch.randint(0, 16, scales.shape, dtype=torch.uint8).to(device)
    return FourBitWeight(pack_codes(codes).to(device), scales.to(device, scale_dtype), zeros, num_inputs, group)


def exact(weight: FourBitWeight) -> Tensor:
    """Return what a weight stands for, in float64, code by code."""
    column_I = torch.arange(weight.num_inputs, device=weight.words.device)
    word_I = column_I // 128 * 16 + column_I % 16
    codes = weight.words[..., word_I] >> (column_I % 128 // 16 * 4) & 15
    group_I = column_I // weight.group
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros[..., group_I].double()
    return (codes.double() - zeros) * weight.scales[..., group_I].double()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 300), (1, 1)], ids=str)
def test_codes_are_packed_without_loss(shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    words = pack_codes(codes)
    assert (words.dtype, words.shape) == (torch.int32, (*shape[:-1], -(-shape[-1] // 128) * 16))
    assert torch.equal(unpack_codes(words)[..., : shape[-1]], codes)
    assert not unpack_codes(words)[..., shape[-1] :].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS_FOUR_BIT)
def test_weights_stand_for_their_numbers(group: int, *, symmetric: bool) -> None:
    weight = four_bit_weight(3, 7, 300, group=group, symmetric=symmetric)
    assert weight.shape == (3, 7, 300)
    torch.testing.assert_close(weight.dequantize().double(), exact(weight), rtol=1e-6, atol=0)
    assert torch.equal(weight[1].dequantize(), weight.dequantize()[1])


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_are_of_dequantised_weights(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    weight = four_bit_weight(num_outputs, num_inputs, group=32, symmetric=False)
    x, bias = torch.randn(num_rows, num_inputs), torch.randn(num_outputs)
    expected = x.double() @ exact(weight).t() + bias
    assert error(linear.reference(x, weight, bias), expected) < TOLERANCE
    assert linear.reference(x.view(1, *x.shape).bfloat16(), weight).dtype == torch.bfloat16


def test_layers_bind_products_of_every_form() -> None:
    kernels = bind_kernels(LINEAR_OPERATIONS, Workload("cpu", "float32"))
    weight, dense = four_bit_weight(64, 200), torch.randn(7, 200)
    x, bias = torch.randn(3, 200), torch.randn(71)
    assert torch.equal(bind_linear(kernels, weight)(x), linear.reference(x, weight))
    gated = gated_linear.reference(x, weight)
    assert torch.equal(bind_gated_linear(kernels, weight)(x), gated)
    parts = StackedWeight((weight, DenseWeight(dense)))
    expected = x.double() @ torch.cat((exact(weight), dense.double())).t() + bias
    assert error(bind_linear(kernels, parts, bias)(x), expected) < TOLERANCE
