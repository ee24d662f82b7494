"""Gates: rounded as their operations are one by one, whatever lies between the rows."""

import pytest
import torch
import torch.nn.functional as F

from strandline.kernels.rowwise import activation
from tests.bound import bound

geglu = bound(activation.geglu)
sigmoid_gate = bound(activation.sigmoid_gate)
swiglu = bound(activation.swiglu)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 8), (1, 6), (3, 130), (70, 64)]


def strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers from far below to far above 0, in rows that are cut out of wider ones of NaN."""
    x = torch.full((rows, columns + 3), torch.nan, dtype=dtype)
    x[:, 1:-2] = 10 * torch.randn(rows, columns)
    return x[:, 1:-2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_multiplies_the_silu_of_the_first_half(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = strided(*shape, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(swiglu(gate_up), expected)
    torch.testing.assert_close(swiglu(gate_up.contiguous()[None]), expected[None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.7, 4.0])
def test_swiglu_clamps_both_halves(limit: float, dtype: torch.dtype) -> None:
    gate_up = strided(3, 130, dtype)
    gate_up[0, ::17] = torch.nan
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    torch.testing.assert_close(swiglu(gate_up, limit), expected, equal_nan=True)
    assert not torch.equal(swiglu(gate_up, limit).nan_to_num(), swiglu(gate_up).nan_to_num())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_geglu_multiplies_the_gelu_of_the_first_half(
    shape: tuple[int, int], dtype: torch.dtype, approximate: str
) -> None:
    gate_up = strided(*shape, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.gelu(gate, approximate=approximate) * up
    is_tanh = approximate == "tanh"
    torch.testing.assert_close(geglu(gate_up, is_tanh=is_tanh), expected)
    torch.testing.assert_close(geglu(gate_up.contiguous()[None], is_tanh=is_tanh), expected[None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sigmoid_gate_works_in_place_and_writes_nothing_else(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = torch.full((shape[0], shape[1] + 4), 7.0, dtype=dtype)
    x = wide[:, 2:-2]
    x.copy_(torch.randn(shape))
    gate = strided(*shape, dtype)
    expected = x * gate.sigmoid()
    assert sigmoid_gate(x, gate).data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, expected)
    assert (wide[:, [0, 1, -2, -1]] == 7).all()


def test_nan_and_infinity_come_through() -> None:
    x = torch.tensor([[torch.nan, torch.inf, 200.0, -200.0, 0.0]])
    torch.testing.assert_close(swiglu(torch.cat((x, torch.ones_like(x)), -1)), F.silu(x), equal_nan=True)
    torch.testing.assert_close(sigmoid_gate(torch.ones_like(x), x), x.sigmoid(), equal_nan=True)
