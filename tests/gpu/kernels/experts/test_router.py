"""The Triton router on a GPU, at the sizes of published models."""

import pytest
import torch

from strandline.kernels.experts import router_triton
from strandline.kernels.experts.router import Routing
from tests.cpu.kernels.experts.test_router_triton import (
    ROUTINGS,
    check_choices_by_warp,
    check_padding_rows,
    check_router,
    logits_of,
    narrow_logits,
)

MODELS = {
    "Qwen3.5-35B-A3B": (256, Routing(8, True)),
    "Nemotron-3-Nano": (128, Routing(6, True, "sigmoid", 1e-20, 2.5)),
    "Nemotron-3-Super": (512, Routing(22, True, "sigmoid", 1e-20, 5.0)),
    "Kimi-Linear": (256, Routing(8, True, "sigmoid", 1e-20, 2.446)),
    "groups": (256, Routing(8, True, "sigmoid", 1e-20, 2.5, num_groups=8, top_groups=4)),
}


@pytest.mark.parametrize("num_tokens", [1, 63, 1000])
@pytest.mark.parametrize("model", MODELS)
def test_router_equals_the_torch_version(model: str, num_tokens: int) -> None:
    num_experts, routing = MODELS[model]
    logits_TE, bias_E = logits_of(num_tokens, num_experts, "cuda"), torch.randn(num_experts, device="cuda") / 4
    check_router(logits_TE, None, routing)
    if routing.scores == "sigmoid":
        check_router(logits_TE, bias_E, routing)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_router_equals_the_torch_version_of_any_kind(routing: Routing) -> None:
    check_router(logits_of(65, 40, "cuda"), torch.randn(40, device="cuda"), routing)


def test_bfloat16_logits_are_ordered_by_their_own_bits() -> None:
    logits_TE = torch.stack([torch.randperm(256, device="cuda") for _ in range(63)]).bfloat16() / 8 - 16
    check_router(logits_TE, None, Routing(8, True))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_rows_of_nan_take_experts_that_exist(routing: Routing) -> None:
    check_padding_rows(routing, "cuda")


def test_router_runs_in_a_graph() -> None:
    logits_TE, bias_E, routing = logits_of(5, 128, "cuda"), torch.randn(128, device="cuda"), ROUTINGS[3]
    expected = router_triton.route(logits_TE, bias_E, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = router_triton.route(logits_TE, bias_E, routing)
    for part in found:
        part.fill_(-1)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("num_experts", "num_warps"), [(256, 4), (512, 4), (128, 2), (60, 4)])
def test_every_warp_chooses_what_one_warp_does(num_experts: int, num_warps: int) -> None:
    check_choices_by_warp(narrow_logits(9, num_experts, "cuda"), Routing(8, True), num_warps)
