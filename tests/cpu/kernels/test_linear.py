"""Packing a weight changes no bit of a product in bfloat16, and in float32 the order of sums alone."""

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


@pytest.mark.parametrize("num_rows", [1, 2, 32, 100])
def test_a_packed_weight_in_float32_gives_the_same_product(num_rows: int) -> None:
    weight_OI, bias_O = torch.randn(WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    x = torch.randn(num_rows, 60)[:, :48]
    packed = pack(weight_OI)
    assert packed.stride() == (1, WEIGHT_OI[0])
    torch.testing.assert_close(linear(x, packed), F.linear(x, weight_OI), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x, packed, bias_O), F.linear(x, weight_OI, bias_O), rtol=1e-5, atol=1e-5)


def test_float32_is_packed_where_mkl_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda is_there=is_there: is_there)
        assert can_pack(torch.zeros(WEIGHT_OI)) is is_there


def test_float16_is_not_packed() -> None:
    assert not can_pack(torch.zeros(WEIGHT_OI).half())


def test_an_ordinary_weight_is_multiplied_with_as_it_is() -> None:
    x, weight_OI, bias_O = torch.randn(3, 48), torch.randn(WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    assert torch.equal(linear(x, weight_OI, bias_O), F.linear(x, weight_OI, bias_O))
