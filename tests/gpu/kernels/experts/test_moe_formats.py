"""Experts in FP8 and in 4 bits on a GPU: the shapes of the CPU's tests, and those of published models."""

from functools import partial
from typing import Any

import pytest
import torch

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from strandline.kernels.experts.moe_triton import mixture
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT
from strandline.kernels.gemm.formats.fp8 import FP8
from strandline.kernels.gemm.formats.launches import ExpertLaunches
from strandline.kernels.operation import Launches
from tests.cpu.kernels.experts.test_moe_formats import (
    FORMATS,
    SHAPES,
    Case,
    Shape,
    check_experts,
    check_joined,
    check_mixture,
    check_ranks,
)
from tests.cpu.kernels.gemm import test_low_rank as low_rank

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no products in e4m3 on this GPU"
)

DTYPES = [torch.float32, torch.bfloat16]
LAUNCHES: dict[str, ExpertLaunches] = {"fp8": FP8.launches.experts, "4 bits": FOUR_BIT.launches.experts}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 150])
@pytest.mark.parametrize("name", FORMATS)
def test_the_mixture_equals_a_loop_in_float64(name: str, num_tokens: int, shape: Shape, dtype: torch.dtype) -> None:
    options = {"is_shared_dense": num_tokens == 3, "has_shared_gate": dtype == torch.bfloat16}
    check_mixture(name, num_tokens, shape, dtype, "cuda", **options)


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 300])
@pytest.mark.parametrize("symmetric", [True, False, None])
def test_mixture_equals_a_float64_loop_at_model_shape(num_tokens: int, symmetric: bool | None) -> None:
    name, options = "fp8", dict[str, Any]()
    if symmetric is not None:
        name, options = "4 bits", {"group": 128, "symmetric": symmetric}
    check_mixture(name, num_tokens, (32, 8, 2048, 512, 512), torch.bfloat16, "cuda", **options)


@pytest.mark.parametrize("shape", [(32, 6, 2688, 1856, 3712), (32, 6, 2688, 1856, 0)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_without_gate_equal_a_float64_loop_at_model_shape(name: str, num_tokens: int, shape: Shape) -> None:
    options = {"is_gated": False, "has_shared_gate": False, "has_bias": True}
    check_mixture(name, num_tokens, shape, torch.bfloat16, "cuda", **options)


@pytest.mark.parametrize("options", [{"limit": 1.5}, {"are_dense": True}], ids=["clamped", "shared-alone"])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_clamped_and_dense_experts_equal_a_float64_loop(name: str, num_tokens: int, options: dict[str, Any]) -> None:
    check_mixture(name, num_tokens, (32, 8, 2048, 512, 512), torch.bfloat16, "cuda", **options)


@pytest.mark.parametrize("shared_size", [256, 512])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_the_experts_of_two_ranks_add_up_to_all(name: str, num_tokens: int, shared_size: int) -> None:
    check_ranks(name, num_tokens, (32, 8, 2048, 512, shared_size), torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_tokens", [5, 16, 64, 70, 256])
def test_shared_expert_of_the_same_size_is_one_more_expert(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_joined(num_tokens, (32, 8, 2048, 512, 512), torch.bfloat16, "cuda", monkeypatch)


@pytest.mark.parametrize("load", ["decode", "middle", "prefill"])
@pytest.mark.parametrize("num_tokens", [1, 65, 500])
@pytest.mark.parametrize("name", FORMATS)
def test_tiles_of_experts_equal_the_reference(name: str, num_tokens: int, load: str) -> None:
    tiles = getattr(LAUNCHES[name], load)
    check_experts(name, num_tokens, (16, 4, 1024, 384, 128), tiles, torch.bfloat16, "cuda")


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 400])
@pytest.mark.parametrize("name", FORMATS)
def test_fixed_launches_depend_on_their_token_alone(name: str, num_tokens: int) -> None:
    case, fixed = Case(name, 400, (16, 4, 512, 256, 128), torch.bfloat16, "cuda"), Launches.FIXED
    run = partial(case.run, partial(mixture, launches=fixed))
    assert torch.equal(run(num_tokens=num_tokens), run()[:num_tokens])


@pytest.mark.parametrize("name", FORMATS)
def test_mixture_runs_in_a_graph(name: str) -> None:
    for num_tokens in (1, 40):
        case = Case(name, num_tokens, (16, 4, 512, 256, 128), torch.bfloat16, "cuda")
        expected_TD = case.run(mixture)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TD = case.run(mixture)
        out_TD.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out_TD, expected_TD)


@pytest.mark.parametrize("are_dense", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_adapters_add_to_a_shared_expert(name: str, num_tokens: int, are_dense: bool) -> None:
    slots = [1, low_rank.NONE, 0, 1][:num_tokens] + [1] * (num_tokens - 4)
    adapters = low_rank.Case(slots, [0] * 2048, [[7], [16]], 512)
    options = {"adapters": adapters, "are_dense": are_dense, "is_shared_dense": are_dense}
    check_mixture(name, num_tokens, (32, 8, 2048, 512, 512), torch.bfloat16, "cuda", **options)
