"""Experts in FP4 and MXFP8 on a GPU, at the sizes and with the launches of real models."""

from typing import Any

import pytest
import torch

from strandline.kernels.experts.few_launches import FEW
from strandline.kernels.experts.many_launches import DENSE, FP4, MXFP8
from strandline.kernels.experts.moe import Activation
from strandline.kernels.gemm.weights import Fp4Weight, Mxfp8Weight
from tests.cpu.kernels.experts.test_microscaled import (
    ACTIVATIONS,
    FORMATS,
    Case,
    check_dequantized,
    check_few,
    check_many,
)

WEIGHTS = {"nvfp4": Fp4Weight, "mxfp4": Fp4Weight, "mxfp8": Mxfp8Weight}
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
    check_few(Case(num_tokens, shape, dtype, "cuda", activation, name), FEW[WEIGHTS[name]][num_tokens > 1])


@pytest.mark.parametrize("pair", [FP4.decode, FP4.middle, MXFP8.decode])
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
    tiles = DENSE.prefill if activation.is_gated else DENSE.prefill_ungated
    check_dequantized(Case(300, shape, torch.bfloat16, "cuda", activation, name), tiles)
