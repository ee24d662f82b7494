"""The cases of attention to latents that an index chooses on a GPU, and steps at the shape of GLM-5.3-Flash."""

from collections.abc import Iterator

import pytest
import torch

from strandline.kernels.attention.indexed_attention_triton import choose_groups, indexed_latent_attention
from strandline.kernels.attention.indexed_latent_attention import choose_groups as choose_operation
from strandline.kernels.attention.indexed_latent_attention import indexed_latent_attention as attend_operation
from tests.cpu.kernels.attention import test_group_choice_triton as choices
from tests.cpu.kernels.attention import test_indexed_latent_attention as cases
from tests.cpu.kernels.attention.test_indexed_latent_attention import BOUNDS, GROUPS, PooledIndex, make_batch

TRITON = choose_groups, indexed_latent_attention


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("group_tokens", "max_groups"), GROUPS)
def test_steps_of_any_size_equal_the_definition(bounds: list[int], group_tokens: int, max_groups: int) -> None:
    cases.test_steps_of_any_size_equal_the_definition(TRITON, bounds, group_tokens, max_groups)


def test_equal_scores_choose_the_earlier_groups() -> None:
    cases.test_equal_scores_choose_the_earlier_groups(TRITON)


@pytest.mark.parametrize("num_values", [0, 1, 3])
@pytest.mark.parametrize(("group_tokens", "max_groups"), [(1, 40), (3, 20), (4, 128), (16, 30), (64, 1)])
@pytest.mark.parametrize("ranges", [[(4999, 5000)], [(0, 1), (100, 170), (2040, 2044)], [(1, 2)] * 70], ids=str)
def test_any_choice_is_that_of_a_stable_sort(
    ranges: list[tuple[int, int]], group_tokens: int, max_groups: int, num_values: int
) -> None:
    with torch.device("cpu"):
        case = choices.make_case(ranges, group_tokens, max_groups, num_values, device="cuda")
    assert torch.equal(case.choose(), case.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_step(dtype: torch.dtype) -> None:
    with torch.device("cpu"):
        choices.check_bits("cuda", dtype)


@pytest.mark.parametrize("ranges", [[(2999, 3000), (64, 65)], [(1500, 1504), (2900, 3000)]], ids=str)
def test_steps_at_the_shape_of_a_model_equal_the_reference(ranges: list[tuple[int, int]]) -> None:
    tables = [list(range(1, 48)), list(range(48, 95))]
    index = PooledIndex(16, 32, torch.randn(16, 128).bfloat16())
    latent_BPD, index_BPX = torch.randn(96, 64, 512).bfloat16(), torch.randn(96, 64, 256).bfloat16()
    batch = make_batch(tables, ranges)
    num_rows = batch.query_starts[-1]
    q_THD, index_q_TJC = (torch.randn(num_rows, *shape).bfloat16() for shape in ((64, 512), (32, 128)))
    asked = (index_q_TJC, torch.randn(num_rows, 32).bfloat16(), index_BPX, batch, index)
    found_TK, expected_TK = choose_groups(*asked), choose_operation.reference(*asked)
    # A group whose score is nearly that of another one may be exchanged.
    is_common_TK = (found_TK.unsqueeze(-1) == expected_TK.unsqueeze(1)).any(-1)
    assert float(is_common_TK.float().mean()) > 0.98
    out, expected = (
        attend(q_THD, latent_BPD, found_TK, batch, 16, 512, scale=512**-0.5).float()
        for attend in (indexed_latent_attention, attend_operation.reference)
    )
    assert float((out - expected).norm() / expected.norm()) < 1e-2
