"""Relative attention in Triton on a GPU, in steps of any kind and at Inkling's shapes."""

from dataclasses import replace

import pytest
import torch

from tests.cpu.kernels.attention.test_attention import decodes, make_case
from tests.cpu.kernels.attention.test_attention_triton import CASES
from tests.cpu.kernels.attention.test_relative_attention_triton import check, make_relative

DTYPES = [torch.float32, torch.bfloat16]
INKLING = [((8, 8, 128), 1024, None), ((16, 4, 128), 512, 512)]
"""Heads, distances and window of both kinds of layers."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_distances", [1, 40, 500])
@pytest.mark.parametrize(("ranges", "num_decodes", "window_tokens"), CASES)
def test_steps_equal_the_definition(
    ranges: list[tuple[int, int]],
    num_decodes: int,
    window_tokens: int | None,
    num_distances: int,
    dtype: torch.dtype,
) -> None:
    step = make_case(ranges, num_decodes, heads=(2, 3, 64), dtype=dtype, window_tokens=window_tokens)
    check(make_relative(step, num_distances, window_tokens), "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("most_rows", [None, 4])
@pytest.mark.parametrize(("heads", "num_distances", "window_tokens"), INKLING)
def test_steps_at_the_shapes_of_inkling_equal_the_definition(
    heads: tuple[int, int, int],
    num_distances: int,
    window_tokens: int | None,
    most_rows: int | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    ranges = [*decodes(2500, 1, 200), *([(1500, 1700), (0, 70), (5, 6)] if most_rows is None else [(1300, 1304)])]
    step = make_case(ranges, 3, heads=heads, dtype=dtype, window_tokens=window_tokens)
    step = replace(step, batch=replace(step.batch, most_rows=most_rows))
    check(make_relative(step, num_distances, window_tokens, num_profiles=16, has_sinks=has_sinks), "cuda")


def test_long_prompts_equal_the_definition() -> None:
    step = make_case([(3200, 4300)], heads=(1, 8, 128), dtype=torch.bfloat16)
    check(make_relative(step, 1024, num_profiles=16, has_sinks=True), "cuda")
