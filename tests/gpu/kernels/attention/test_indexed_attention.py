"""The cases of indexed attention on a GPU."""

from collections.abc import Iterator

import pytest
import torch

from tests.cpu.kernels.attention import test_indexed_attention as cases


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("bounds", [[130], [1, 130], [63, 64, 65, 130], [7, 100, 101, 102, 130]])
@pytest.mark.parametrize(("group_tokens", "max_groups"), [(4, 3), (7, 10), (1, 5), (64, 1), (16, 8)])
def test_steps_of_any_size_equal_the_definition(bounds: list[int], group_tokens: int, max_groups: int) -> None:
    cases.test_steps_of_any_size_equal_the_definition(bounds, group_tokens, max_groups)


def test_prompts_are_masked_some_queries_at_a_time() -> None:
    cases.test_prompts_are_masked_some_queries_at_a_time()


@pytest.mark.parametrize("bounds", [[130], [100, 129, 130]])
def test_contexts_within_the_budget_are_read_whole(bounds: list[int]) -> None:
    cases.test_contexts_within_the_budget_are_read_whole(bounds)


def test_equal_scores_choose_the_earlier_groups() -> None:
    cases.test_equal_scores_choose_the_earlier_groups()
