"""Triton's quantised rows have the bits of the reference implementation's.

The ``check_`` function runs on any device; tests/gpu runs it at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from strandline.kernels.rowwise.quantized_rows import QuantizedRows, quantize
from tests.cpu.kernels.gemm.formats import FP8
from tests.interpreter import convert_e4m3

pytest.importorskip("triton")

from strandline.kernels.rowwise import activation_triton, quantizing_triton
from strandline.kernels.rowwise.quantizing_triton import quantize_rows

convert_e4m3()


def check_quantizing(num_rows: int, num_inputs: int, dtype: torch.dtype, device: str) -> None:
    """Compare rows, gated linear units and gates that are quantised in the same launch with doing so afterwards."""
    gate_up = FP8["fp8"].make_x(num_rows, 2 * num_inputs, dtype, device).mul_(0.02)
    x, gate = gate_up.clone().chunk(2, dim=1)
    for rows, plain in (
        (quantize_rows(gate_up), gate_up),
        (quantizing_triton.swiglu_quantized(gate_up), activation_triton.swiglu(gate_up)),
        (quantizing_triton.sigmoid_gate_quantized(x, gate), activation_triton.sigmoid_gate(x.clone(), gate)),
    ):
        assert_quantized(rows, plain)


def assert_quantized(rows: QuantizedRows, plain: Tensor) -> None:
    """Compare every bit with the reference implementation's."""
    # On the CPU: on a GPU torch divides by multiplying with a rounded reciprocal.
    expected = quantize(plain.cpu())
    assert (len(rows), rows.dtype, rows.values_TI.is_contiguous()) == (len(plain), plain.dtype, True)
    assert len(rows.values_TI) == rows.scale_XT.shape[1] == -(-len(plain) // 4) * 4
    assert torch.equal(rows.values_TI[: len(rows)].view(torch.uint8).cpu(), expected.values_TI.view(torch.uint8))
    assert torch.equal(rows.scale_XT[:, : len(rows)].cpu(), expected.scale_XT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (5, 300), (2, 2100)])
def test_quantised_rows_equal_the_reference(num_rows: int, num_inputs: int, dtype: torch.dtype) -> None:
    check_quantizing(num_rows, num_inputs, dtype, "cpu")
