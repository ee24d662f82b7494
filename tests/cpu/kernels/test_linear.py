"""Packing a weight changes no bit of a product."""

import pytest
import torch
import torch.nn.functional as F

from strandline.kernels.linear import can_pack, linear, pack

WEIGHT_OI = (77, 48)


@pytest.mark.parametrize("num_rows", [1, 2, 32, 100])
@pytest.mark.skipif(not can_pack(torch.zeros(WEIGHT_OI).bfloat16()), reason="this CPU packs no bfloat16")
def test_a_packed_weight_gives_the_same_bits(num_rows: int) -> None:
    weight_OI, bias_O = torch.randn(WEIGHT_OI).bfloat16(), torch.randn(WEIGHT_OI[0]).bfloat16()
    # A slice of wider rows, as projections hand them on.
    x = torch.randn(num_rows, 60).bfloat16()[:, :48]
    packed = pack(weight_OI)
    assert torch.equal(linear(x, packed), F.linear(x, weight_OI))
    torch.testing.assert_close(linear(x, packed, bias_O), F.linear(x, weight_OI, bias_O), rtol=0.01, atol=0.01)


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(torch.zeros(WEIGHT_OI))
    assert not can_pack(torch.zeros(WEIGHT_OI).half())


def test_an_ordinary_weight_is_multiplied_with_as_it_is() -> None:
    x, weight_OI, bias_O = torch.randn(3, 48), torch.randn(WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    assert torch.equal(linear(x, weight_OI, bias_O), F.linear(x, weight_OI, bias_O))
