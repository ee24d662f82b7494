"""The cases of attention to what an index chooses on a GPU, and steps at the shapes of published models."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from strandline.kernels.attention.indexed_attention import indexed_attention
from strandline.kernels.attention.indexed_attention_triton import indexed_attention as triton_attention
from tests.cpu.kernels.attention import test_indexed_attention as cases
from tests.cpu.kernels.attention.test_indexed_attention import BOUNDS, GROUPS, IndexedMemory, make_batch

EACH = pytest.mark.parametrize("version", [indexed_attention.reference, triton_attention], ids=["reference", "triton"])
"""The versions of the operation that a test runs."""

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@EACH
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("group_tokens", "max_groups"), GROUPS)
def test_steps_of_any_size_equal_the_definition(
    version: cases.Attend, bounds: list[int], group_tokens: int, max_groups: int
) -> None:
    cases.test_steps_of_any_size_equal_the_definition(version, bounds, group_tokens, max_groups)


@EACH
def test_prompts_are_attended_to_some_queries_at_a_time(version: cases.Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.test_prompts_are_attended_to_some_queries_at_a_time(version, monkeypatch)


@EACH
@pytest.mark.parametrize("bounds", [[130], [100, 129, 130]])
def test_contexts_within_the_budget_are_read_whole(version: cases.Attend, bounds: list[int]) -> None:
    cases.test_contexts_within_the_budget_are_read_whole(version, bounds)


def test_equal_scores_choose_the_earlier_groups() -> None:
    cases.test_equal_scores_choose_the_earlier_groups()


@pytest.mark.parametrize("ranges", [[(2999, 3000), (64, 65)], [(1500, 1504), (2900, 3000)]], ids=str)
def test_steps_at_the_shape_of_a_model_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(cases, "INDEX_DIM", 128)
    index, tables = cases.make_index(16, 32), [list(range(1, 48)), list(range(48, 95))]
    kv = cases.KVMemory(*torch.randn(2, 96, 64, KV_HEADS, HEAD_DIM).bfloat16())
    memory = IndexedMemory(kv, torch.randn(96, 64, 128).bfloat16())
    batch = make_batch(tables, ranges)
    num_rows = batch.query_starts[-1]
    q_THD, index_q_TJC = (torch.randn(num_rows, 16, size).bfloat16() for size in (HEAD_DIM, 128))

    def attend(version: cases.Attend) -> Tensor:
        return version(q_THD, index_q_TJC, memory, batch, index, scale=HEAD_DIM**-0.5).float()

    expected = attend(indexed_attention.reference)
    # A group whose score is nearly that of another one may be exchanged, in a few rows.
    difference_T = (attend(triton_attention) - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(difference_T.median()) < 1e-2
    assert float((difference_T > 1e-2).float().mean()) < 0.1
