"""Projections, norm and experts of a few tokens equal the reference, whatever is computed in which launch.

The ``check_`` function runs on any device.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts.moe import SWIGLU, ExpertWeights, MixtureProjection, projected_mixture
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.weights import DenseWeight, StackedWeight, Weight
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.normed_rows import NormKind, deferred_add_norm
from tests.cpu.kernels.gemm.formats import scaled_weight
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.experts import few_triton, moe_triton
from strandline.kernels.experts.router_triton import can_choose_by_warp
from strandline.kernels.rowwise import norm_triton

EPS = 1e-6


class Layer:
    """Random weights of a mixture with a shared expert; ``sizes`` are channels, features of experts and shared ones."""

    def __init__(self, sizes: tuple[int, int, int], device: str, *, is_fp8: bool, is_gated: bool) -> None:
        torch.manual_seed(0)
        self.num_experts, (channels, size, shared) = 6, sizes
        self.device, self.is_fp8, self.channels = device, is_fp8, channels
        make = self._scaled if is_fp8 else self._dense
        self.experts = ExpertWeights(make(6, 2 * size, channels), make(6, channels, size), SWIGLU)
        self.down = self._one(make(1, channels, shared))
        parts = (self._one(make(1, 2 * shared, channels)), self._one(self._dense(1, 8, channels)))
        weight: Weight = StackedWeight(parts)
        if not is_fp8:
            weight = DenseWeight(torch.cat([part.values_OI for part in parts]))
        self.projection = MixtureProjection(weight, (2 * shared, 6, int(is_gated), 2 - is_gated))
        self.norm_D = torch.randn(channels, device=device)

    def _dense(self, count: int, rows: int, inputs: int) -> DenseWeight:
        return DenseWeight(torch.randn(count, rows, inputs, device=self.device) * inputs**-0.5)

    def _scaled(self, count: int, rows: int, inputs: int) -> Weight:
        return scaled_weight(count, rows, inputs, rows_per_scale=128, device=self.device)

    def _one(self, weight: Weight) -> Weight:
        return weight[0]

    def run(self, x_TD: Tensor, residual_TD: Tensor, *, is_zero_centered: bool, launches: Launches) -> list[Tensor]:
        """Return the result and the new stream, as a layer computes them; x may be overwritten."""
        norm = (residual_TD, self.norm_D, EPS, NormKind(is_zero_centered, self.is_fp8))
        rows, total_TD = norm_triton.deferred_add_norm(x_TD, *norm, launches=launches)
        mixed = (rows, self.experts, self.projection, Routing(2, is_normalised=True), self.down)
        return [added_up(moe_triton.projected_mixture(*mixed, launches=launches)), total_TD]

    def expected(self, x_TD: Tensor, residual_TD: Tensor, *, is_zero_centered: bool) -> list[Tensor]:
        norm = (residual_TD, self.norm_D, EPS, NormKind(is_zero_centered, self.is_fp8))
        rows, total_TD = deferred_add_norm.reference(x_TD.clone(), *norm)
        mixed = (rows, self.experts, self.projection, Routing(2, is_normalised=True), self.down)
        return [added_up(projected_mixture.reference(*mixed)), total_TD]


def check_layer(layer: Layer, num_tokens: int, launches: Launches, *, is_zero_centered: bool) -> None:
    """Compare with the reference implementation."""
    x_TD, residual_TD = torch.randn(2, num_tokens, layer.channels, device=layer.device)
    expected = layer.expected(x_TD, residual_TD, is_zero_centered=is_zero_centered)
    with poisoned_memory():
        results = layer.run(x_TD.clone(), residual_TD, is_zero_centered=is_zero_centered, launches=launches)
    for result, wanted in zip(results, expected, strict=True):
        assert float((result - wanted).norm() / wanted.norm()) < (5e-3 if layer.is_fp8 else 1e-5)


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("num_tokens", [1, 3, 5])
@pytest.mark.parametrize(
    ("sizes", "is_fp8"),
    [((40, 24, 24), False), ((130, 8, 24), False), ((256, 128, 128), True), ((128, 128, 256), True)],
)
def test_a_layer_of_experts_equals_the_reference(
    sizes: tuple[int, int, int], num_tokens: int, launches: Launches, *, is_fp8: bool
) -> None:
    layer = Layer(sizes, "cpu", is_fp8=is_fp8, is_gated=num_tokens > 1)
    check_layer(layer, num_tokens, launches, is_zero_centered=num_tokens == 3)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_router_s_launch_normalises_a_few_tokens(monkeypatch: pytest.MonkeyPatch, *, is_fp8: bool) -> None:
    layer = Layer((256, 128, 128), "cpu", is_fp8=is_fp8, is_gated=True)
    monkeypatch.setattr(norm_triton.NormLaunch, "run", None)
    check_layer(layer, 4, Launches.MEASURED, is_zero_centered=True)


def test_rows_whose_norm_no_product_computes_are_settled() -> None:
    x_TD, residual_TD, weight_D = torch.randn(3, 2, 130).unbind()
    arguments = (residual_TD, weight_D[0], EPS, NormKind(is_zero_centered=False, is_quantized=False))
    normed, _ = norm_triton.deferred_add_norm(x_TD.clone(), *arguments)
    expected_TD, _ = deferred_add_norm.reference(x_TD.clone(), *arguments)
    torch.testing.assert_close(normed.settle(normed), expected_TD)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_of_nan_leave_other_tokens_as_they_are(*, is_fp8: bool) -> None:
    layer = Layer((128, 128, 128), "cpu", is_fp8=is_fp8, is_gated=True)
    x_TD, residual_TD = torch.randn(2, 4, 128)
    x_TD[2:] = torch.nan
    options = {"is_zero_centered": True, "launches": Launches.MEASURED}
    whole = layer.run(x_TD, residual_TD, **options)
    for found, expected in zip(whole, layer.run(x_TD[:2], residual_TD[:2], **options), strict=True):
        torch.testing.assert_close(found[:2], expected)
        assert found[2:].isnan().all()


def test_experts_are_the_same_however_warps_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, options = Layer((128, 128, 128), "cpu", is_fp8=True, is_gated=True), {"is_zero_centered": True}
    x_TD, residual_TD = torch.randn(2, 3, 128).bfloat16()
    found = layer.run(x_TD.clone(), residual_TD, launches=Launches.MEASURED, **options)
    asked = []
    monkeypatch.setattr(few_triton, "can_choose_by_warp", lambda *of: asked.append(can_choose_by_warp(*of)))
    expected = layer.run(x_TD.clone(), residual_TD, launches=Launches.MEASURED, **options)
    assert asked == [True]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
