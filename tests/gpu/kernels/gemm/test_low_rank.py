"""What adapters add to products on a GPU: the CPU's tests, shapes of published models, and CUDA graphs."""

from functools import partial

import pytest
import torch

from strandline.kernels.gemm.low_rank import NO_SLOT, TILE_ROWS, TiledRows
from strandline.kernels.gemm.low_rank_triton import add_low_rank
from strandline.kernels.operation import Launches
from tests.cpu.kernels.gemm.test_low_rank import CASES, Case, build, check_invariance, check_sums, random_slots, tiles

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


def test_graph_reads_slots_and_tables_when_it_is_replayed() -> None:
    case = Case([0] * 20, [0] * 300 + [1] * 200, [[0, 0], [0, 0]], 512)
    weights = build(case, torch.bfloat16, "cuda")
    x_TI = torch.randn(20, 512, device="cuda", dtype=torch.bfloat16)
    weight_OI = torch.randn(500, 512, device="cuda", dtype=torch.bfloat16)
    tiled = TiledRows(torch.zeros(4 * TILE_ROWS, device="cuda").long(), torch.zeros(4, device="cuda").long())
    out_TO = torch.empty(20, 500, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
        add_low_rank(out_TO, x_TI, weights, tiled)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    filled = build(case._replace(ranks_SP=[[3, 7], [16, 1]]), torch.bfloat16, "cuda")
    for ours, theirs in zip(
        (weights.down_SPRI, weights.up_SOR, weights.rank_SP),
        (filled.down_SPRI, filled.up_SOR, filled.rank_SP),
        strict=True,
    ):
        ours.copy_(theirs)
    for slots in (random_slots(20, 2), [NO_SLOT] * 20, [1] * 20):
        table = tiles(slots, 2, "cuda")
        tiled.slots_U.fill_(NO_SLOT)
        tiled.rows_M[: len(table.rows_M)], tiled.slots_U[: len(table.slots_U)] = table
        graph.replay()
        expected_TO = add_low_rank(x_TI @ weight_OI.t(), x_TI, weights, table)
        assert out_TO.equal(expected_TO)
