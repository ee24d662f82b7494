"""What adapters add to products on a GPU: the CPU's tests, shapes of published models, and CUDA graphs."""

from functools import partial

import pytest
import torch
from torch import Tensor

from strandline.kernels.gemm.gemms_triton import gated_linear, linear
from strandline.kernels.gemm.low_rank import NO_SLOT, TILE_ROWS, AdapterWeights, LowRankTerm, TiledRows
from strandline.kernels.gemm.low_rank_triton import add_low_rank
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.norm_triton import rms_norm
from tests.cpu.kernels.gemm import formats
from tests.cpu.kernels.gemm.formats import of_every_format, of_quantized_formats
from tests.cpu.kernels.gemm.test_low_rank import (
    CASES,
    PRODUCTS,
    Case,
    build,
    check_invariance,
    check_products,
    check_sums,
    random_slots,
    tiles,
)

DTYPES = [torch.float32, torch.bfloat16]

SHAPES = {
    "in": (2560, [0] * 8192 + [1] * 4096 + [2] * 32 + [3] * 32),
    "gate and up": (2560, [0] * 9216 + [1] * 9216),
    "down": (9216, [0] * 2560),
    "q and its gate": (2048, [0] * 4096 + [1] * 512 + [2] * 512 + [0] * 4096),
}
"""Inputs, and parts of the outputs."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sums_are_near_those_of_float64(name: str, dtype: torch.dtype) -> None:
    check_sums(add_low_rank, CASES[name], dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 64, 1000])
@pytest.mark.parametrize("name", SHAPES)
def test_sums_at_shapes_of_models(name: str, num_rows: int, dtype: torch.dtype) -> None:
    num_inputs, part_O = SHAPES[name]
    num_parts = max(part_O) + 1
    ranks = [[16] * num_parts, [8] * num_parts, [12] * num_parts]
    check_sums(add_low_rank, Case(random_slots(num_rows, 3), part_O, ranks, num_inputs), dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_depend_on_themselves_alone(dtype: torch.dtype) -> None:
    check_invariance(partial(add_low_rank, launches=Launches.FIXED), dtype, "cuda", num_inputs=2560)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
@of_every_format
def test_products_with_adapters_are_near_float64s(case: formats.Case, name: str, dtype: torch.dtype) -> None:
    check_products(case, PRODUCTS[name], dtype, "cuda")


@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("name", SHAPES)
@of_every_format
def test_products_with_adapters_at_shapes_of_models(case: formats.Case, name: str, num_rows: int) -> None:
    num_inputs, part_O = SHAPES[name]
    ranks = [[16] * (max(part_O) + 1), [8] * (max(part_O) + 1)]
    check_products(case, Case([1, 0, NO_SLOT, 1][:num_rows], part_O, ranks, num_inputs), torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_rows", [1, 3])
@of_quantized_formats
def test_adapters_add_to_every_part_of_a_weight(case: formats.Case, num_rows: int) -> None:
    num_inputs, part_O = SHAPES["in"]
    adapted = Case([1, 0, NO_SLOT][:num_rows], part_O, [[16] * 4, [8] * 4], num_inputs)
    check_products(case, adapted, torch.bfloat16, "cuda", parts=(12288, 64))


@pytest.mark.parametrize("num_rows", [1, 4, 20])
def test_graph_reads_slots_and_tables_when_it_is_replayed(num_rows: int) -> None:
    case = Case([0] * num_rows, [0] * 300 + [1] * 200, [[0, 0], [0, 0]], 512)
    weights = build(case, torch.bfloat16, "cuda")
    x_TI = torch.randn(num_rows, 512, device="cuda", dtype=torch.bfloat16)
    weight = formats.dense_weight(500, 512, dtype=torch.bfloat16, device="cuda")
    gain_I = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    num_tiles = min(num_rows, 4)
    tiled = TiledRows(
        *(torch.zeros(length, device="cuda").long() for length in (num_tiles * TILE_ROWS, num_tiles, num_rows))
    )
    outputs = list[Tensor]()

    def run(weights: AdapterWeights, tiled: TiledRows) -> list[Tensor]:
        # The norm before the product releases the launches after it before it has written.
        x, term = rms_norm(x_TI, gain_I, 1e-6), LowRankTerm(weights, tiled)
        return [linear(x, weight, None, term), gated_linear(x, weight, term)]

    run(weights, tiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs += run(weights, tiled)
    filled = build(case._replace(ranks_SP=[[3, 7], [16, 1]]), torch.bfloat16, "cuda")
    for ours, theirs in zip(
        (weights.down_SPRI, weights.up_SOR, weights.rank_SP),
        (filled.down_SPRI, filled.up_SOR, filled.rank_SP),
        strict=True,
    ):
        ours.copy_(theirs)
    for slots in (random_slots(num_rows, 2), [NO_SLOT] * num_rows, [1] * num_rows):
        table = tiles(slots, 2, "cuda")
        tiled.slots_U.fill_(NO_SLOT)
        for ours, theirs in zip(tiled, table, strict=True):
            ours[: len(theirs)] = theirs
        graph.replay()
        expected = run(filled, table)
        assert [found.equal(own) for found, own in zip(outputs, expected, strict=True)] == [True, True]
