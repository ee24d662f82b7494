"""Triton's products of few rows on a GPU, at odd shapes and at those of Qwen3.5."""

import pytest
import torch

from strandline.kernels.gemm import linear_triton
from strandline.kernels.gemm.linear_triton import GEMV_LONG, GEMV_NARROW, GEMV_SMALL, GEMV_TINY, GEMV_WIDE, SKINNY
from strandline.kernels.gemm.rows_triton import Gemv
from tests.cpu.kernels.gemm.test_linear_triton import check_linear, check_linear_and_logits

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(2560, 12352), (4096, 2560), (2560, 9216), (9216, 2560), (2048, 12352), (4096, 2048), (2048, 1288)]
"""Inputs and outputs of the projections of Qwen3.5-4B and 35B-A3B."""

GEMVS = {"tiny": GEMV_TINY, "small": GEMV_SMALL, "narrow": GEMV_NARROW, "long": GEMV_LONG, "wide": GEMV_WIDE}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(1, 40, 1), (1, 64, 16), (3, 130, 33), (4, 1000, 70), (16, 96, 5)]
)
def test_products_of_few_rows_equal_float64(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cuda", GEMV_NARROW, linear_triton.Skinny(16, 32, 2, 2))


@pytest.mark.parametrize("num_rows", [1, 2, 4, 16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("gemv", GEMVS.values(), ids=GEMVS)
def test_products_of_few_rows_equal_float64_at_the_models_shapes(
    num_rows: int, num_inputs: int, num_outputs: int, gemv: Gemv
) -> None:
    check_linear(num_rows, num_inputs, num_outputs, torch.bfloat16, "cuda", gemv, SKINNY)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 64, 300])
@pytest.mark.parametrize("sizes", [(2688, 3712, 128), (2304, 2048, 256), (1000, 70, 12)])
def test_logits_are_computed_in_float32(num_rows: int, sizes: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        check_linear_and_logits(num_rows, sizes, dtype, "cuda", has_bias=num_rows == 2)


def test_products_in_a_graph_see_what_the_launch_before_wrote() -> None:
    weights = torch.randn(20, 1024, 1024, device="cuda").div_(32).bfloat16()
    x = torch.randn(1, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        out = x
        for weight in weights:
            out = linear_triton.linear(out, weight)
        return out

    expected = x
    for weight in weights:
        expected = torch.nn.functional.linear(expected, weight)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert float((out - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("num_rows", [1, 2])
def test_logits_of_a_large_vocabulary_equal_float64(num_rows: int) -> None:
    check_linear(num_rows, 2048, 248_320, torch.bfloat16, "cuda", GEMV_NARROW, SKINNY)
