"""Triton's products of few rows equal float64's, gated or not.

The ``check_`` functions run on any device; tests/gpu runs them at larger shapes.
"""

import pytest
import torch
from torch import Tensor

from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.gemm import linear_and_logits_triton, linear_triton
from strandline.kernels.gemm.linear_triton import Skinny
from strandline.kernels.gemm.rows_triton import Gemv, launch_gemv
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.rowwise.quantized_rows import new_output

GEMV, SKINNY = Gemv(4, 32, 1), Skinny(16, 32, 1, 1)

ERROR_RATIO = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
ERROR_RATIO_INTERPRETER = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""``|out - ref| / |ref|``, ref in float64. The interpreter cuts bfloat16 off where a GPU rounds it."""


def check_near(actual: Tensor, expected: Tensor) -> None:
    limits = ERROR_RATIO if actual.is_cuda else ERROR_RATIO_INTERPRETER
    ratio = float((actual.double() - expected).norm() / expected.norm())
    assert ratio < limits[actual.dtype], ratio


def multiply_gemv(x: Tensor, weight: Tensor, bias: Tensor | None, gemv: Gemv, *, is_gated: bool = False) -> Tensor:
    out = new_output(x, len(weight) // (1 + is_gated))
    launch_gemv(out, x, DenseWeight(weight), bias, gemv, is_gated=is_gated)
    return out


def check_linear(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: str, gemv: Gemv, skinny: Skinny
) -> None:
    """Compare all ways with float64; x is a view of wider rows, poisoned beside it."""
    x = torch.full((num_rows, num_inputs + 8), torch.nan, device=device, dtype=dtype)[:, 4 : num_inputs + 4].normal_()
    weight = torch.randn(2 * num_outputs, num_inputs, device=device, dtype=dtype).mul_(num_inputs**-0.5)
    bias = torch.randn(2 * num_outputs, device=device, dtype=dtype)
    product = x.double() @ weight.double().t()
    gate, up = product.chunk(2, dim=-1)
    gated = gate * gate.sigmoid() * up
    with poisoned_memory():
        check_near(linear_triton.linear(x, weight, bias), product + bias.double())
        check_near(linear_triton.gated_linear(x, weight), gated)
        if num_rows <= 8:
            check_near(multiply_gemv(x, weight, bias, gemv), product + bias.double())
            check_near(multiply_gemv(x, weight, None, gemv, is_gated=True), gated)
        if num_rows <= linear_triton.MAX_ROWS_SKINNY:
            check_near(linear_triton.launch_skinny(x, weight, bias, skinny, is_gated=False), product + bias.double())
            check_near(linear_triton.launch_skinny(x, weight, None, skinny, is_gated=True), gated)
            split = skinny._replace(spans=3)
            check_near(linear_triton.launch_skinny(x, weight, bias, split, is_gated=False), product + bias.double())


def check_linear_and_logits(
    num_rows: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str, *, has_bias: bool
) -> None:
    """Compare with float64, whose logits are as near as float32 gets; sizes are inputs, outputs and experts."""
    num_inputs, num_outputs, num_experts = sizes
    x = torch.full((num_rows, num_inputs + 8), torch.nan, device=device, dtype=dtype)[:, 4 : num_inputs + 4].normal_()
    weight = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype).mul_(num_inputs**-0.5)
    router = torch.randn(num_experts, num_inputs, device=device).mul_(num_inputs**-0.5)
    bias = torch.randn(num_outputs, device=device, dtype=dtype) if has_bias else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    for name in ("linear_and_logits", "linear_and_logits_invariant"):
        with poisoned_memory():
            out, logits = getattr(linear_and_logits_triton, name)(x, weight, bias, router)
        assert (out.dtype, logits.dtype) == (dtype, torch.float32)
        check_near(out, expected)
        check_near(logits, x.double() @ router.double().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(1, (40, 3, 5)), (3, (130, 33, 7)), (4, (64, 16, 1)), (21, (300, 4, 3)), (70, (20, 4, 3))]
)
def test_logits_are_computed_in_float32(num_rows: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_linear_and_logits(num_rows, sizes, dtype, "cpu", has_bias=num_rows == 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(1, 64, 16), (1, 40, 1), (3, 130, 33), (4, 64, 32), (16, 96, 5)]
)
def test_products_of_few_rows_equal_float64(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cpu", GEMV, SKINNY)


def test_a_row_s_bits_do_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(4, 70), torch.randn(20, 70)
    order = torch.tensor([2, 0, 3, 1])
    for product in (
        lambda x: multiply_gemv(x, weight, None, GEMV),
        lambda x: linear_triton.launch_skinny(x, weight, None, SKINNY, is_gated=False),
    ):
        assert torch.equal(product(x[order]), product(x)[order])


def test_torch_multiplies_many_rows_and_dense_batches() -> None:
    weight = torch.randn(20, 70)
    for x in (torch.randn(40, 70), torch.randn(2, 3, 70), torch.randn(0, 70)):
        assert torch.equal(linear_triton.linear(x, weight), torch.nn.functional.linear(x, weight))
