"""Triton's quantised rows have the bits of the reference implementation's.

The ``check_`` function runs on any device; tests/gpu runs it at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.rowwise.activation import swiglu
from strandline.kernels.rowwise.quantized_rows import QuantizedRows, quantize
from tests.cpu.kernels.gemm.formats import FP8

pytest.importorskip("triton")

from strandline.kernels.rowwise import activation_triton, quantizing_triton
from strandline.kernels.rowwise.quantizing_triton import quantize_rows


def check_quantizing(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare rows, gated linear units and gates that are quantised in the same launch with doing so afterwards."""
    gate_up = FP8["fp8"].make_x(num_rows, 2 * num_inputs, dtype, device).mul_(0.02)
    x, gate = gate_up.clone().chunk(2, dim=1)
    for rows, plain in (
        (quantize_rows(gate_up), gate_up),
        (quantizing_triton.swiglu_quantized(gate_up), activation_triton.swiglu(gate_up)),
        (quantizing_triton.swiglu_quantized(gate_up, 0.01), activation_triton.swiglu(gate_up, 0.01)),
        (quantizing_triton.swiglu_quantized(gate_up, None, 0.6), activation_triton.swiglu(gate_up, None, 0.6)),
        (quantizing_triton.sigmoid_gate_quantized(x, gate), activation_triton.sigmoid_gate(x.clone(), gate)),
    ):
        assert_quantized(rows, plain)


def check_clamped_swiglu(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare with the reference implementation at limits that the dtype rounds up, down and not; NaN stays NaN."""
    gate_up = torch.randn(num_rows, 2 * num_inputs, device=device).mul_(3).to(dtype)
    gate_up[0, ::17] = torch.nan
    for limit in (0.6, 0.7, 2.0):
        expected = swiglu.reference(gate_up, limit)
        # The interpreter cuts bfloat16 off where a GPU rounds it: the silu and the result lose 2**-7 each.
        rtol = 2**-5 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(
            activation_triton.swiglu(gate_up, limit), expected, rtol=rtol, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clamped_swiglu_equals_the_reference(dtype: torch.dtype) -> None:
    check_clamped_swiglu(3, 130, dtype, "cpu")


def assert_quantized(rows: QuantizedRows, plain: Tensor) -> None:
    """Compare every bit with the reference implementation's."""
    # On the CPU: on a GPU torch divides by multiplying with a rounded reciprocal.
    expected = quantize(plain.cpu())
    assert (len(rows), rows.dtype, rows.values_TI.is_contiguous()) == (len(plain), plain.dtype, True)
    # Kernels are compiled by whether 16 divides the scales' stride; torch multiplies many rows, the more the slower.
    divisor = 16 if 4 < len(plain) <= 128 else 4
    assert len(rows.values_TI) == rows.scale_XT.shape[1] == -(-len(plain) // divisor) * divisor
    assert torch.equal(rows.values_TI[: len(rows)].view(torch.uint8).cpu(), expected.values_TI.view(torch.uint8))
    assert torch.equal(rows.scale_XT[:, : len(rows)].cpu(), expected.scale_XT)


@pytest.mark.parametrize("num_rows", [4, 5, 128, 129, 150])
def test_memory_of_quantised_rows(num_rows: int) -> None:
    x = torch.randn(num_rows, 128)
    assert_quantized(quantize_rows(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (2, 2100)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cpu")
