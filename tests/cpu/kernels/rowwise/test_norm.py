"""The norms against the modules of ``transformers``: equal in float32, equal in bfloat16 but for rare roundings."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm as transformers_l2norm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from strandline.kernels.rowwise import norm
from strandline.kernels.rowwise.norm import ELEMENTS_PER_PASS_CPU, l2_norm
from tests.bound import bound

add_rms_norm = bound(norm.add_rms_norm)
add_rms_norm_zero_centered = bound(norm.add_rms_norm_zero_centered)
rms_norm = bound(norm.rms_norm)
rms_norm_gated = bound(norm.rms_norm_gated)
rms_norm_of_gated = bound(norm.rms_norm_of_gated)
rms_norm_zero_centered = bound(norm.rms_norm_zero_centered)

pytestmark = pytest.mark.usefixtures("each_version")

EPS = 1e-6
SHAPES = [(1, 8), (3, 63), (2, 4, 128), (65, 1000)]
LARGE = (301, 1024)
TOLERANCE = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 0.0}}
"""float32: the mean's sum in another order. bfloat16: where that flips a rounding, one unit in the last place."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, expected.detach(), **TOLERANCE[dtype])
    # A cast in the wrong place would change some tenth of all elements.
    assert (actual != expected).float().mean() < 0.01 or dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_equals_llama(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_D = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    module = LlamaRMSNorm(shape[-1], EPS)
    module.weight.data = weight_D
    check(rms_norm(x, weight_D, EPS), module(x), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_zero_centered_equals_qwen3_next(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_D = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    module = Qwen3NextRMSNorm(shape[-1], EPS)
    module.weight.data = weight_D
    check(rms_norm_zero_centered(x, weight_D, EPS), module(x), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_is_rounded_before_it_is_normalised(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight_D = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1])
    expected = x + residual
    for norm_alone, add_norm in ((rms_norm, add_rms_norm), (rms_norm_zero_centered, add_rms_norm_zero_centered)):
        normed, total = add_norm(x.clone(), residual, weight_D.to(dtype), EPS)
        assert torch.equal(total, expected)
        check(normed, norm_alone(expected, weight_D.to(dtype), EPS), dtype)


def test_a_gate_may_lie_in_rows_of_a_fused_projection(dtype: torch.dtype) -> None:
    x, projected, weight_D = torch.randn(5, 3, 16).to(dtype), torch.randn(5, 100).to(dtype), torch.randn(16)
    gate = projected[:, 20:68].view(5, 3, 16)
    check(rms_norm_gated(x, gate, weight_D, EPS), rms_norm_gated(x, gate.contiguous(), weight_D, EPS), dtype)


def test_large_inputs_are_normalised_in_passes() -> None:
    num_rows, num_channels = LARGE
    assert num_rows * num_channels > ELEMENTS_PER_PASS_CPU
    x, gate, weight_D = torch.randn(LARGE), torch.randn(LARGE), torch.randn(num_channels)
    module = Qwen3NextRMSNormGated(num_channels, EPS)
    module.weight.data = weight_D
    check(rms_norm_gated(x, gate, weight_D, EPS), module(x, gate), torch.float32)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 9), slice(100, None)], ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(rows: slice) -> None:
    x, gate, weight_D = torch.randn(LARGE), torch.randn(LARGE), torch.randn(LARGE[-1])
    gated, centred = rms_norm_gated(x, gate, weight_D, EPS), rms_norm_zero_centered(x, weight_D, EPS)
    assert torch.equal(rms_norm_gated(x[rows], gate[rows], weight_D, EPS), gated[rows])
    assert torch.equal(rms_norm_zero_centered(x[rows], weight_D, EPS), centred[rows])


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_gated_equals_qwen3_next(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x, gate, weight_D = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1])
    module = Qwen3NextRMSNormGated(shape[-1], EPS)
    module.weight.data = weight_D.to(weight_dtype)
    check(rms_norm_gated(x, gate, weight_D.to(weight_dtype), EPS), module(x, gate), dtype)


@pytest.mark.parametrize(("size", "num_groups"), [(8, 1), (63, 3), (1024, 8)])
def test_rms_norm_of_gated_equals_zamba2(size: int, num_groups: int, dtype: torch.dtype) -> None:
    wide, weight_D = torch.randn(33, 2 * size).to(dtype), torch.randn(size).to(dtype)
    x, gate = wide.chunk(2, dim=-1)
    module = Zamba2RMSNormGated(size, size // num_groups, EPS)
    module.weight.data = weight_D
    check(rms_norm_of_gated(x, gate, weight_D, EPS, num_groups), module(x, gate), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_l2_norm_equals_transformers_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    normed = l2_norm(x, EPS)
    assert normed.dtype == torch.float32
    check(normed, transformers_l2norm(x.float(), eps=EPS), torch.float32)


def test_zeros_stay_zeros() -> None:
    zeros, weight_D = torch.zeros(2, 8), torch.ones(8)
    for normed in (
        rms_norm(zeros, weight_D, EPS),
        rms_norm_zero_centered(zeros, weight_D, EPS),
        rms_norm_gated(zeros, zeros, weight_D, EPS),
        l2_norm(zeros, EPS),
    ):
        assert torch.equal(normed, zeros)


def test_norm_of_row_does_not_depend_on_other_rows() -> None:
    x, weight_D = torch.randn(33, 77).bfloat16(), torch.randn(77).bfloat16()
    for function in (rms_norm, rms_norm_zero_centered):
        assert torch.equal(function(x, weight_D, EPS)[5:6], function(x[5:6], weight_D, EPS))
    assert torch.equal(l2_norm(x, EPS)[5:6], l2_norm(x[5:6], EPS))
