"""Batch-invariant products on a GPU: right, and of the same bits in every tile and for any number of rows."""

import pytest
import torch

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts.moe import ExpertWeights, Router, SharedOutput
from strandline.kernels.experts.moe_triton import mixture
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm import matmul_triton
from strandline.kernels.gemm.matmul_triton import head_linear_invariant, linear_invariant
from strandline.kernels.gemm.tiles_triton import launch_tiles
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from tests.cpu.kernels.gemm.test_matmul_triton import check_heads, check_product

SHAPES = [(12352, 2560), (2560, 9216), (2560, 4096), (97, 32), (1000, 130)]
"""Outputs and inputs: of Qwen3.5-4B, and odd ones."""

TILES = {name: tile for name, tile in vars(matmul_triton).items() if isinstance(tile, Launch)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 63, 65, 700])
def test_products_equal_float64s(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_product(num_rows, *shape, dtype, "cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_gives_the_same_bits(shape: tuple[int, int]) -> None:
    weight_OI = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x_TI = torch.randn(300, shape[1], device="cuda", dtype=torch.bfloat16)
    tiles = {name: tile for name, tile in TILES.items() if name != "TILE_FLOAT32"}
    results = {name: x_TI.new_empty(len(x_TI), len(weight_OI)) for name in tiles}
    for name, tile in tiles.items():
        launch_tiles(results[name], x_TI, DenseWeight(weight_OI), None, tile)
    assert len(results) == 4
    first = results["TILE_FEW"]
    assert {name: int((out != first).sum()) for name, out in results.items()} == dict.fromkeys(results, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_in_any_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_OI = torch.randn(*shape, device="cuda", dtype=dtype)
    x_TI = torch.randn(1200, shape[1], device="cuda", dtype=dtype)
    whole = linear_invariant(x_TI, weight_OI)
    for start, end in ((0, 1), (5, 6), (7, 40), (0, 64), (0, 65), (100, 612), (99, 613), (3, 1103)):
        assert torch.equal(linear_invariant(x_TI[start:end], weight_OI), whole[start:end]), (start, end)


@pytest.mark.parametrize("shape", [(32, 512, 128), (32, 128, 512), (3, 20, 12)], ids=str)
def test_rows_of_heads_are_the_same_in_any_company(shape: tuple[int, int, int]) -> None:
    num_heads, num_outputs, num_inputs = shape
    check_heads(70, *shape, "cuda")
    weight_HOI = torch.randn(num_heads, num_inputs, num_outputs, device="cuda").bfloat16().mT
    x_THI = torch.randn(700, num_heads, num_inputs, device="cuda").bfloat16()
    whole = head_linear_invariant(x_THI, weight_HOI)
    for start, end in ((0, 1), (5, 6), (7, 40), (0, 64), (0, 65), (100, 612), (99, 613)):
        assert torch.equal(head_linear_invariant(x_THI[start:end], weight_HOI), whole[start:end]), (start, end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "top_k", "hidden_size", "size"), [(8, 2, 256, 64), (64, 8, 2048, 512)])
def test_a_tokens_experts_give_the_same_bits_in_any_company(
    num_experts: int, top_k: int, hidden_size: int, size: int, dtype: torch.dtype
) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    gate_up = random(num_experts, 2 * size, hidden_size) * hidden_size**-0.5
    down = random(num_experts, hidden_size, size) * size**-0.5
    x_TD, shared_TD, gate_T1 = random(1500, hidden_size), random(1500, hidden_size), random(1500, 1)
    weights, logits_TE = ExpertWeights(DenseWeight(gate_up), DenseWeight(down)), random(1500, num_experts)
    routing = Routing(top_k, is_normalised=True)

    def run(rows: slice) -> torch.Tensor:
        router, shared = Router(logits_TE[rows], None, routing), SharedOutput(shared_TD[rows], gate_T1[rows])
        return added_up(mixture(x_TD[rows], weights, router, shared, launches=Launches.FIXED))

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(7, 10), slice(0, 5), slice(3, 70), slice(100, 800)):
        assert torch.equal(run(rows), whole[rows]), rows
