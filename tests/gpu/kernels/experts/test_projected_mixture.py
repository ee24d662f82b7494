"""A layer of experts on a GPU, at the sizes of a published model: projections, norm and experts."""

import pytest
import torch

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from strandline.kernels.operation import Launches
from tests.cpu.kernels.experts.test_projected_mixture import Layer, check_layer


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("num_tokens", [1, 4, 5])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_layer_of_experts_equals_the_reference(num_tokens: int, launches: Launches, *, is_fp8: bool) -> None:
    if is_fp8 and torch.cuda.get_device_capability() < E4M3_CAPABILITY:
        pytest.skip("no products in e4m3 on this GPU")
    layer = Layer((2048, 512, 512), "cuda", is_fp8=is_fp8, is_gated=True)
    check_layer(layer, num_tokens, launches, is_zero_centered=True)
