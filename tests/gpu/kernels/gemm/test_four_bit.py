"""Products in 4 bits and FP4 on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch

from strandline.device.dtypes import PRODUCT_CAPABILITY
from strandline.kernels.gemm import dequantizing_triton, four_bit_launches, four_bit_triton
from strandline.kernels.gemm.four_bit_launches import Launch
from strandline.kernels.gemm.rows_triton import Gemv
from tests.cpu.kernels.gemm.test_four_bit import SIZES
from tests.cpu.kernels.gemm.test_four_bit_triton import (
    FP4,
    INT4,
    Make,
    check_dequantized,
    check_gated,
    check_gemv,
    check_invariant,
    check_linear,
    check_parts,
    check_tile,
    make_x,
    of_every_format,
    of_some_formats,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < PRODUCT_CAPABILITY, reason="no products in 4 bits on this GPU"
)

DTYPES = [torch.float32, torch.bfloat16]
MODELS = [(1, 2048, 12288), (4, 4096, 2048), (16, 2048, 4096), (33, 5120, 1280), (300, 2048, 1024), (700, 512, 2048)]
TILES = {
    *four_bit_launches.TILES_NARROW.values(),
    *four_bit_launches.TILES_WIDE.values(),
    four_bit_launches.TILE_MANY,
}


@of_some_formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [*SIZES, *MODELS])
def test_products_are_as_exact_as_dequantised(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, make: Make
) -> None:
    check_linear(num_rows, num_inputs, num_outputs, dtype, "cuda", make)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("make", INT4.values(), ids=INT4)
@pytest.mark.parametrize("num_rows", [1, 16, 65])
def test_groups_are_as_exact_as_dequantised(num_rows: int, make: Make, *, symmetric: bool) -> None:
    options = {"symmetric": symmetric, "scale_dtype": torch.float16}
    check_linear(num_rows, 2048, 384, torch.bfloat16, "cuda", make, **options)


@of_some_formats
@pytest.mark.parametrize("num_rows", [1, 40])
def test_float16_rows_are_as_exact_as_dequantised(num_rows: int, make: Make) -> None:
    check_linear(num_rows, 2048, 384, torch.float16, "cuda", make)


@of_every_format
@pytest.mark.parametrize("spans", [1, 4])
@pytest.mark.parametrize("tile", [*sorted(TILES), Launch(16, 64, 128, 2, 3)], ids=str)
def test_tiles_are_as_exact_as_dequantised(tile: Launch, spans: int, make: Make) -> None:
    check_tile(tile, spans, 200, 1032, 392, torch.bfloat16, "cuda", make)


@pytest.mark.parametrize("make", [INT4["int4-32"], INT4["int4-128"], *FP4.values()], ids=["int4-32", "int4-128", *FP4])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("num_inputs", [520, 2048, 4104])
@pytest.mark.parametrize("gemv", [Gemv(4, 1024, 1), Gemv(2, 4096, 4), Gemv(1, 2048, 2)], ids=str)
def test_few_rows_are_as_exact_as_dequantised(gemv: Gemv, num_inputs: int, num_rows: int, make: Make) -> None:
    check_gemv(gemv, num_rows, num_inputs, 1153, torch.bfloat16, "cuda", make)


@of_some_formats
@pytest.mark.parametrize("num_rows", [1, 4, 20, 300])
@pytest.mark.parametrize("size", [100, 1024])
def test_gated_products_are_as_exact_as_dequantised(num_rows: int, size: int, make: Make) -> None:
    check_gated(num_rows, 2048, size, torch.bfloat16, "cuda", make)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_multiply_the_dequantised_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantizing_triton, "SCRATCH_CODES", 500 * 1000)
    check_dequantized(900, 1000, 1200, dtype, "cuda")


@of_some_formats
@pytest.mark.parametrize("sizes", [[130, 7], [12288, 64], [1024, 264], [256, 40, 384]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 64, 300])
def test_weights_of_parts_equal_the_reference(num_rows: int, sizes: list[int], make: Make) -> None:
    check_parts(num_rows, 2048, sizes, torch.bfloat16, "cuda", make)


@of_some_formats
def test_invariant_products_depend_on_their_row_alone(make: Make) -> None:
    check_invariant(300, 2056, 1000, "cuda", make)


@of_some_formats
@pytest.mark.parametrize("num_rows", [1, 16, 600])
def test_products_run_in_a_graph(num_rows: int, make: Make) -> None:
    x, weight = make_x(num_rows, 2048, torch.bfloat16, "cuda"), make(4096, 2048, device="cuda")
    expected = four_bit_triton.four_bit_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = four_bit_triton.four_bit_linear(x, weight)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
