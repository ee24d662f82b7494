"""The Triton experts on a GPU, at odd shapes and at those of Qwen3.5-35B-A3B."""

import pytest
import torch

from strandline.kernels.expert_choices import added_up
from strandline.kernels.experts.moe import ExpertWeights, Router, SharedOutput
from strandline.kernels.experts.moe_triton import mixture
from strandline.kernels.experts.router import Routing
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.formats.launches import few_pair
from strandline.kernels.gemm.weights import DenseWeight
from strandline.kernels.launch import Pair
from strandline.kernels.operation import Launches
from tests.cpu.kernels.experts.test_moe_triton import (
    Mixture,
    check_experts,
    check_experts_without_gate,
    check_list,
    check_mixture,
    inputs,
)

FEW = few_pair((2, 1024, 1), 4, 4)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [(1, 8, 3, 12, 7), (5, 16, 2, 48, 32), (65, 3, 2, 130, 63), (130, 40, 6, 96, 80)],
)
def test_experts_equal_a_loop_in_float64(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, size: int, dtype: torch.dtype
) -> None:
    arguments = inputs(num_tokens, num_experts, top_k, hidden_size, size, dtype, "cuda")
    tiles = DENSE.launches.experts.float32
    assert tiles is not None
    check_experts(arguments, tiles)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 65, 1000, 5000])
@pytest.mark.parametrize(
    "tiles",
    [DENSE.launches.experts.decode, DENSE.launches.experts.middle, DENSE.launches.experts.prefill],
    ids=["decode", "middle", "prefill"],
)
def test_experts_equal_a_float64_loop_at_model_shape(num_tokens: int, tiles: Pair) -> None:
    arguments = inputs(num_tokens, 256, 8, 2048, 512, torch.bfloat16, "cuda")
    check_experts(arguments, tiles)


@pytest.mark.parametrize("num_tokens", [1, 16, 1000, 4000])
def test_experts_without_gate_equal_a_float64_loop_at_model_shape(num_tokens: int) -> None:
    check_experts_without_gate(inputs(num_tokens, 128, 6, 2688, 1856, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "shape"),
    [(1, (8, 3, 12, 7, 5)), (3, (16, 2, 48, 32, 16)), (7, (20, 6, 130, 63, 70)), (70, (20, 6, 130, 63, 70))],
)
def test_the_mixture_equals_a_loop_in_float64(
    num_tokens: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, is_gated: bool
) -> None:
    check_mixture(num_tokens, shape, FEW, dtype, "cuda", is_gated=is_gated)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 16, 300])
@pytest.mark.parametrize(
    ("shape", "is_gated"),
    [((256, 8, 2048, 512, 512), True), ((128, 6, 2688, 1856, 3712), False)],
    ids=["Qwen3.5-35B-A3B", "Nemotron-3-Nano"],
)
def test_mixture_equals_a_float64_loop_at_model_shape(
    num_tokens: int, shape: tuple[int, int, int, int, int], is_gated: bool
) -> None:
    check_mixture(num_tokens, shape, FEW, torch.bfloat16, "cuda", is_gated=is_gated)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(
    "tiles", [(1, 512, 1, 1, 1), (1, 2048, 1, 2, 2), (2, 512, 1, 2, 1), (2, 512, 1, 1, 4)], ids=str
)
def test_other_tiles_of_few_tokens_equal_a_float64_loop(num_tokens: int, tiles: tuple[int, int, int, int, int]) -> None:
    check_mixture(
        num_tokens, (256, 8, 2048, 512, 512), few_pair(tiles[:3], *tiles[3:]), torch.bfloat16, "cuda", is_gated=True
    )


@pytest.mark.parametrize("num_tokens", [1, 65, 1000, 8192])
def test_choices_are_listed_by_expert(num_tokens: int) -> None:
    check_list(torch.rand(num_tokens, 256, device="cuda").topk(8).indices, 256)


def test_experts_run_in_a_graph() -> None:
    for num_tokens in (1, 40):
        mixture = Mixture(num_tokens, (16, 4, 256, 128, 128), torch.bfloat16, "cuda", is_gated=True)
        expected_TD = mixture.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TD = mixture.run()
        out_TD.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out_TD, expected_TD)


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
