"""The Triton filters and draws on a GPU, at a large vocabulary."""

from math import ceil

import pytest
import torch

from strandline.kernels.sampling import filters_triton, sampling_triton
from tests.cpu.kernels.sampling.test_sampling_triton import (
    ROWS,
    check_draws,
    check_filters,
    check_greedy,
    check_parts,
    check_rows_without_a_maximum,
    filters,
)

VOCAB = 248_320


@pytest.mark.parametrize("vocab", [1, 1000, VOCAB])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_filters_keep_what_the_torch_version_keeps(vocab: int, scale: float) -> None:
    check_filters(scale * torch.randn(len(ROWS), vocab, device="cuda"), ROWS)


def test_ties_keep_the_first_tokens_up_to_top_p() -> None:
    parameters = filters([{"top_p": 0.3}, {"top_k": 1000}, {}], "cuda")
    is_kept_NV = filters_triton.mask_top_k_top_p_min_p(torch.zeros(3, VOCAB, device="cuda"), *parameters).isfinite()
    expected_N = torch.tensor([ceil(float(parameters[1][0]) * VOCAB), 1000, VOCAB], device="cuda")
    assert torch.equal(is_kept_NV, torch.arange(VOCAB, device="cuda") < expected_N.unsqueeze(-1))


@pytest.mark.parametrize(("num_ranks", "num_sent"), [(2, 64), (4, 1024)])
def test_parts_of_ranks_give_what_whole_rows_give(num_ranks: int, num_sent: int) -> None:
    logits_NV = 3 * torch.randn(9, VOCAB, device="cuda")
    logits_NV[1, : VOCAB // 2] = -torch.inf
    logits_NV[2, 50:] = -torch.inf
    check_parts(logits_NV, num_ranks, num_sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 63])
def test_greedy_takes_the_first_of_the_largest(num_rows: int, dtype: torch.dtype) -> None:
    check_greedy(torch.randn(num_rows, VOCAB, device="cuda").to(dtype))


@pytest.mark.parametrize("vocab", [1000, VOCAB])
def test_rows_without_a_finite_maximum_give_no_token(vocab: int) -> None:
    check_rows_without_a_maximum(vocab, "cuda")


@pytest.mark.parametrize("vocab", [1, 5000, VOCAB])
def test_draws_invert_the_cumulated_distribution(vocab: int) -> None:
    logits_V = 2 * torch.randn(vocab, device="cuda")
    logits_V[vocab // 3 : vocab // 2] = -torch.inf
    check_draws(logits_V, 200)


def test_sampling_runs_in_a_graph() -> None:
    logits_NV = torch.randn(4, VOCAB, device="cuda")
    uniform_N = torch.rand(4, dtype=torch.float64, device="cuda")
    parameters = (
        torch.full((4,), 20, device="cuda"),
        torch.full((4,), 0.95, device="cuda"),
        torch.zeros(4, device="cuda"),
    )

    def choose() -> torch.Tensor:
        return sampling_triton.sample(filters_triton.mask_top_k_top_p_min_p(logits_NV, *parameters), uniform_N)

    expected_N = choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_N = choose()
    token_N.fill_(-1)
    graph.replay()
    assert torch.equal(token_N, expected_N)
