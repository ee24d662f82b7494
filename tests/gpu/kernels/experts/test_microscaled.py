"""Experts in FP4 and MXFP8 on a GPU, at the sizes and with the launches of real models."""

from typing import Any

import pytest
import torch

from strandline.kernels.experts.moe import Activation
from strandline.kernels.gemm.formats import dense, fp4, mxfp8
from tests.cpu.kernels.experts.test_microscaled import (
    ACTIVATIONS,
    FORMATS,
    Case,
    check_dequantized,
    check_few,
    check_many,
)

LAUNCHES = {"nvfp4": fp4.LAUNCHES, "mxfp4": fp4.LAUNCHES, "mxfp8": mxfp8.LAUNCHES}
SHAPES = [(16, 8, 2048, 512, 512), (8, 6, 2688, 1856, 3712), (4, 2, 1000, 160, 48)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_experts_of_few_tokens(
    num_tokens: int, shape: Any, activation: Activation, name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_tokens)
    pairs = LAUNCHES[name].few_experts
    assert pairs is not None
    check_few(Case(num_tokens, shape, dtype, "cuda", activation, name), pairs[num_tokens > 1])


@pytest.mark.parametrize(
    "pair", [fp4.LAUNCHES.experts.decode, fp4.LAUNCHES.experts.middle, mxfp8.LAUNCHES.experts.decode]
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_of_many_tokens(shape: Any, activation: Activation, name: str, pair: Any) -> None:
    torch.manual_seed(0)
    check_many(Case(70, shape, torch.bfloat16, "cuda", activation, name), pair)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_whose_weights_are_dequantised_first(shape: Any, activation: Activation, name: str) -> None:
    torch.manual_seed(0)
    tiles = dense.LAUNCHES.experts.prefill if activation.is_gated else dense.LAUNCHES.experts.prefill_ungated
    assert tiles is not None
    check_dequantized(Case(300, shape, torch.bfloat16, "cuda", activation, name), tiles)
