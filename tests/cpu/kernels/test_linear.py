"""Packing a weight changes no bit of a product in bfloat16, and in float32 the order of sums alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels import linear as linear_module
from strandline.kernels.linear import MAX_HALF_ERROR, can_halve, can_pack, halve, pack
from tests.bound import bound

gated_linear = bound(linear_module.gated_linear)
linear = bound(linear_module.linear)

WEIGHT_OI = (77, 48)

has_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="this CPU multiplies with no float16 weights"
)


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


def published(*shape: int) -> Tensor:
    """Return a weight as one in bfloat16 is read into float32, with numbers that float16 rounds, and its largest."""
    weight_OI = torch.randn(*shape).bfloat16().float()
    weight_OI[0, :3] = torch.tensor([2.0**-20 * 1.5078125, 2.0**-26, 65280.0])
    return weight_OI


@has_fbgemm
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 32, 100])
def test_a_halved_weight_gives_the_same_product(num_rows: int) -> None:
    weight_OI, bias_O = published(*WEIGHT_OI), torch.randn(WEIGHT_OI[0])
    x = torch.randn(num_rows, 60)[:, :48]
    halved = halve(weight_OI)
    expected = F.linear(x.double(), weight_OI.double())
    bound = x.abs().sum(-1, keepdim=True) * MAX_HALF_ERROR
    # What float32 loses in sums with numbers as large as 65,280 comes on top.
    loss = 1e-6 * F.linear(x.abs().double(), weight_OI.abs().double())
    assert bool(((linear(x, halved) - expected).abs() <= bound + loss).all())
    torch.testing.assert_close(linear(x, halved, bias_O), linear(x, halved) + bias_O)


@has_fbgemm
def test_a_halved_gate_is_multiplied_with() -> None:
    weight_OI = torch.randn(64, 48).bfloat16().float()
    x = torch.randn(5, 48)
    torch.testing.assert_close(gated_linear(x, halve(weight_OI)), gated_linear(x, weight_OI), rtol=1e-4, atol=1e-5)


@has_fbgemm
def test_a_packed_weight_can_be_halved() -> None:
    weight_OI, x = torch.randn(WEIGHT_OI).bfloat16().float(), torch.randn(3, 48)
    assert torch.equal(linear(x, halve(pack(weight_OI))), linear(x, halve(weight_OI)))


@has_fbgemm
def test_what_float16_would_change_is_not_halved() -> None:
    assert can_halve(published(*WEIGHT_OI))
    assert not can_halve(published(*WEIGHT_OI).bfloat16())
    for number in (1.0 + 2.0**-12, 65536.0, 1e30, torch.inf, torch.nan):
        weight_OI = published(*WEIGHT_OI)
        weight_OI[3, 4] = number
        assert not can_halve(weight_OI), number


def test_without_fbgemm_nothing_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantized:
        engine = "qnnpack"

    monkeypatch.setattr(torch.backends, "quantized", Quantized)
    assert not can_halve(published(*WEIGHT_OI))


@has_fbgemm
def test_the_stand_in_of_a_halved_weight_has_its_shape_and_no_numbers() -> None:
    stand_in = halve(published(*WEIGHT_OI))
    assert (stand_in.shape, stand_in.dtype) == (torch.Size(WEIGHT_OI), torch.float32)
    assert bool(stand_in.isnan().all())
    assert stand_in.untyped_storage().nbytes() == 4
