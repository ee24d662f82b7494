"""Products with weights of every format on a GPU: the shapes of the CPU's tests, and those of published models."""

import pytest
import torch
import torch.nn.functional as F

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from strandline.kernels.gemm import fp8, gemms_triton, launches, library_triton
from strandline.kernels.gemm.formats import dense, four_bit
from strandline.kernels.gemm.formats import fp8 as fp8_format
from strandline.kernels.gemm.formats.launches import FormatLaunches, Tiles, rows_launch
from strandline.kernels.gemm.launches import Kernel, Plan
from strandline.kernels.gemm.tiles_triton import launch_tiles
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.quantizing_triton import quantize_rows
from tests.cpu.kernels.gemm.formats import (
    CASES,
    CODED,
    DENSE,
    FORMATS,
    FP8,
    Case,
    error,
    of_every_format,
    of_quantized_formats,
    product,
)
from tests.cpu.kernels.gemm.test_formats import SIZES
from tests.cpu.kernels.gemm.test_gemms_triton import (
    PRELOADED,
    check_dequantized,
    check_fixed,
    check_gated,
    check_heads,
    check_linear,
    check_linear_and_logits,
    check_logits_of_many,
    check_parts,
    check_plan,
    check_quantized_inputs,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products with quantised weights on this GPU"
)

DTYPES = [torch.float32, torch.bfloat16]

MODELS = [(1, 2048, 12288), (4, 4096, 2048), (16, 2048, 4096), (33, 5120, 1280), (300, 2048, 1024), (700, 512, 2048)]
"""Rows, inputs and outputs."""

LIMITS = [(2, 2048, 512), (2, 2048, 20000), (3, 2048, 512), (3, 2048, 8192), (4, 2048, 512), (4, 2048, 8192)]
"""Shapes of few rows, on both sides of the size at which tiles take over."""

SHAPES = [(2560, 12352), (4096, 2560), (2560, 9216), (9216, 2560), (2048, 12352), (4096, 2048), (2048, 1288)]
"""Inputs and outputs of the projections of Qwen3.5-4B and 35B-A3B."""

DENSE_ROWS = [getattr(launches, f"DENSE_{name}") for name in ("TINY", "SMALL", "NARROW", "LONG", "WIDE")]


def linear_tiles(launches: FormatLaunches) -> Tiles:
    """Return the tiles of linear layers of a format that is quantised."""
    assert launches.linear is not None
    return launches.linear.tiles


def tiles_of(tiles: Tiles) -> list[Launch]:
    return sorted({*tiles.narrow.values(), *tiles.wide.values()})


FP8_WORSE = 1.05
"""Most that our error may be of torch's: both round to the output's dtype, and differ by the order of sums."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@of_every_format
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [*SIZES, *MODELS, *LIMITS])
def test_products_are_near_float64s(
    num_rows: int, num_inputs: int, num_outputs: int, case: Case, dtype: torch.dtype
) -> None:
    check_linear(case, num_rows, num_inputs, num_outputs, dtype, "cuda")


@pytest.mark.parametrize("num_rows", [1, 3, 16, 65])
@pytest.mark.parametrize("case", [*FP8.values(), *CODED.values()], ids=[*FP8, *CODED])
def test_scales_of_every_size_are_multiplied(num_rows: int, case: Case) -> None:
    check_linear(case, num_rows, 520, 384, torch.bfloat16, "cuda", scale_dtype=torch.float16)


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_float16_rows_are_near_float64s(num_rows: int, case: Case) -> None:
    check_linear(case, num_rows, 2048, 384, torch.float16, "cuda")


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", tiles_of(linear_tiles(fp8_format.LAUNCHES)), ids=str)
def test_tiles_in_fp8_are_near_float64s(tile: Launch, splits: int) -> None:
    check_plan(FP8["fp8"], Plan(Kernel.TILES, tile._replace(splits=splits)), 200, 1024, 384, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", FP8.values(), ids=FP8)
@pytest.mark.parametrize("num_rows", [2, 4, 7])
def test_preloaded_products_are_near_float64s(num_rows: int, case: Case) -> None:
    check_plan(case, Plan(Kernel.PRELOADED, PRELOADED.launch), num_rows, 2048, 1160, torch.bfloat16, "cuda")


@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", [*tiles_of(linear_tiles(four_bit.LAUNCHES)), Launch(16, 64, 128, 2, 3)], ids=str)
def test_tiles_of_codes_are_near_float64s(tile: Launch, splits: int, case: Case) -> None:
    check_plan(case, Plan(Kernel.TILES, tile._replace(splits=splits)), 200, 1032, 392, torch.bfloat16, "cuda")


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("num_inputs", [520, 2048, 4112])
@pytest.mark.parametrize("launch", [rows_launch(4, 512, 1), rows_launch(4, 4096, 4), rows_launch(1, 1024, 1)], ids=str)
def test_few_rows_are_near_float64s(launch: Launch, num_inputs: int, num_rows: int, case: Case) -> None:
    check_plan(case, Plan(Kernel.ROWS, launch), num_rows, num_inputs, 1152, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1000, 70), *SHAPES])
@pytest.mark.parametrize("launch", DENSE_ROWS, ids=str)
def test_few_rows_are_multiplied_by_dense_weights(
    num_rows: int, num_inputs: int, num_outputs: int, launch: Launch
) -> None:
    plan = Plan(Kernel.ROWS, launch)
    check_plan(DENSE["dense"], plan, num_rows, num_inputs, num_outputs, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(96, 5), *SHAPES])
@pytest.mark.parametrize("launch", [launches.SKINNY, launches.SKINNY_GATED, Launch(16, 32, 128, 4, 4, 3)], ids=str)
def test_skinny_products_are_near_float64s(num_rows: int, num_inputs: int, num_outputs: int, launch: Launch) -> None:
    plan = Plan(Kernel.SKINNY, launch)
    check_plan(DENSE["dense"], plan, num_rows, num_inputs, num_outputs, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 2])
def test_logits_of_a_large_vocabulary_are_near_float64s(num_rows: int) -> None:
    for case in (FORMATS["dense"], FORMATS["nvfp4"]):
        check_linear(case, num_rows, 2048, 248_320, torch.bfloat16, "cuda")


@of_every_format
@pytest.mark.parametrize("num_rows", [1, 4, 20, 300])
@pytest.mark.parametrize("size", [100, 1024, 4096])
def test_gated_products_are_near_float64s(num_rows: int, size: int, case: Case) -> None:
    case = CASES["fp8-channels"] if case is FP8["fp8"] and size % 128 else case
    check_gated(case, num_rows, 2048, size, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_multiply_the_dequantised_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_triton, "SCRATCH_CODES", 500 * 1000)
    check_dequantized(900, 1000, 1200, dtype, "cuda")


@of_quantized_formats
@pytest.mark.parametrize("sizes", [[130, 7], [12288, 64], [1024, 264], [256, 40, 384], [256, 7, 128]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 5, 16, 33, 64, 128, 303, 304])
def test_weights_of_parts_are_near_float64s(num_rows: int, sizes: list[int], case: Case) -> None:
    check_parts(case, num_rows, 2048, sizes, torch.bfloat16, "cuda")


@of_every_format
@pytest.mark.parametrize("shape", [(2560, 12352), (9216, 2560), (32, 97), (130, 1000)], ids=str)
def test_fixed_launches_multiply_each_row_alone(case: Case, shape: tuple[int, int]) -> None:
    check_fixed(case, 1200, *shape, torch.bfloat16, "cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_fixed_tile_of_dense_weights_gives_the_same_bits(shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    case, tiles = DENSE["dense"], tiles_of(dense.LAUNCHES.linear_fixed)
    weight = case.weight(num_outputs, num_inputs, dtype=torch.bfloat16, device="cuda")
    x = case.make_x(300, num_inputs, torch.bfloat16, "cuda")
    results = []
    for tile in tiles:
        results.append(x.new_empty(len(x), num_outputs))
        launch_tiles(results[-1], x, weight, None, tile)
    assert [int((out != results[0]).sum()) for out in results] == [0] * 4


@pytest.mark.parametrize("num_rows", [1, 6, 64, 300])
def test_quantised_rows_give_the_same_bits(num_rows: int) -> None:
    check_quantized_inputs(FP8["fp8-32"], num_rows, 2048, 512, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 64, 300])
@pytest.mark.parametrize("sizes", [(2688, 3712, 128), (2304, 2048, 256), (1000, 70, 12)])
def test_logits_are_computed_in_float32(num_rows: int, sizes: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        check_linear_and_logits(DENSE["dense"], num_rows, sizes, dtype, "cuda", has_bias=num_rows == 2)


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 64, 300])
def test_logits_beside_quantised_products_are_those_of_plain_rows(case: Case, num_rows: int) -> None:
    check_linear_and_logits(case, num_rows, (2688, 3712, 128), torch.bfloat16, "cuda", has_bias=num_rows == 2)


@pytest.mark.parametrize("sizes", [(2688, 128), (4096, 288), (1000, 12)])
def test_logits_of_many_rows_are_as_near_as_float32_gets(sizes: tuple[int, int]) -> None:
    check_logits_of_many(2100, *sizes, "cuda")


@pytest.mark.parametrize("shape", [(32, 512, 128), (32, 128, 512), (3, 20, 12)], ids=str)
def test_rows_of_heads_are_the_same_in_any_company(shape: tuple[int, int, int]) -> None:
    num_heads, num_outputs, num_inputs = shape
    check_heads(70, *shape, "cuda")
    weight_HOI = torch.randn(num_heads, num_inputs, num_outputs, device="cuda").bfloat16().mT
    x_THI = torch.randn(700, num_heads, num_inputs, device="cuda").bfloat16()
    whole = gemms_triton.head_linear(x_THI, weight_HOI, launches=Launches.FIXED)
    for start, end in ((0, 1), (5, 6), (7, 40), (0, 64), (0, 65), (100, 612), (99, 613)):
        found = gemms_triton.head_linear(x_THI[start:end], weight_HOI, launches=Launches.FIXED)
        assert torch.equal(found, whole[start:end]), (start, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 300, 2048])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2048, 4096), (17408, 256)])
def test_products_in_fp8_are_as_close_to_float64_as_torchs(
    num_inputs: int, num_outputs: int, num_rows: int, dtype: torch.dtype
) -> None:
    case = FP8["fp8"]
    x, weight = case.make_x(num_rows, num_inputs, dtype, "cuda"), case.weight(num_outputs, num_inputs, device="cuda")
    if not fp8.can_multiply_in_torch(x.bfloat16(), weight):
        pytest.skip("torch has no products with scales of blocks on this GPU")
    expected, theirs = product(x, weight), torch.empty(num_rows, num_outputs, dtype=dtype, device="cuda")
    try:
        fp8.multiply_in_torch(theirs, quantize_rows(x), weight, None)
    except (RuntimeError, ValueError) as refusal:
        if dtype == torch.bfloat16:
            raise
        pytest.skip(f"torch: {refusal}")
    most = FP8_WORSE * error(theirs, expected)
    for chosen in Launches:
        assert error(gemms_triton.linear(x, weight, launches=chosen), expected) <= most, chosen
    tile = linear_tiles(fp8_format.LAUNCHES).choose(num_rows, num_outputs, dtype)
    launch_tiles(theirs, x, weight, None, tile)
    assert error(theirs, expected) <= most, tile


@of_quantized_formats
@pytest.mark.parametrize("num_rows", [1, 16, 600])
def test_products_run_in_a_graph(num_rows: int, case: Case) -> None:
    x = case.make_x(num_rows, 2048, torch.bfloat16, "cuda")
    weight = case.weight(4096, 2048, device="cuda")
    expected = gemms_triton.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemms_triton.linear(x, weight)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


def test_products_in_a_graph_see_what_the_launch_before_wrote() -> None:
    weights = torch.randn(20, 1024, 1024, device="cuda").div_(32).bfloat16()
    x = torch.randn(1, 1024, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        out = x
        for weight in weights:
            out = gemms_triton.linear(out, DenseWeight(weight))
        return out

    expected = x
    for weight in weights:
        expected = F.linear(expected, weight)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert float((out - expected).norm() / expected.norm()) < 0.05
