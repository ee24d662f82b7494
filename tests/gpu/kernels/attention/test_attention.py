"""Attention in Triton on a GPU: the steps of the CPU's tests, and some at the shapes of published models."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from strandline.device.hardware.dtypes import E4M3_CAPABILITY
from strandline.kernels.attention import attention_prefix_triton, attention_triton
from strandline.kernels.batch import KVMemory
from tests.cpu.kernels.attention.test_attention import decodes, make_case
from tests.cpu.kernels.attention.test_attention_triton import BEHIND_PREFIXES, CASES, check, check_padding, check_views

DTYPES = [torch.float32, torch.bfloat16]
MODEL_HEADS = [(4, 4, 256), (2, 8, 256), (8, 4, 128), (2, 6, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 3, 64), (1, 5, 16), (2, 2, 12)])
@pytest.mark.parametrize(("ranges", "num_decodes", "window_tokens"), CASES)
def test_steps_equal_the_oracle_and_see_no_nan(
    ranges: list[tuple[int, int]],
    num_decodes: int,
    window_tokens: int | None,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    case = make_case(ranges, num_decodes, heads=heads, dtype=dtype, window_tokens=window_tokens)
    check(case, "cuda", window_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", MODEL_HEADS)
@pytest.mark.parametrize("window_tokens", [None, 300])
def test_steps_at_the_shapes_of_models_equal_the_oracle(
    heads: tuple[int, int, int], dtype: torch.dtype, window_tokens: int | None
) -> None:
    ranges = [*decodes(1152, 1, 200), (900, 1028), (0, 70), (5, 6)]
    check(make_case(ranges, 3, heads=heads, dtype=dtype, window_tokens=window_tokens), "cuda", window_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", MODEL_HEADS)
@pytest.mark.parametrize("window_tokens", [None, 300])
@pytest.mark.parametrize("most_rows", [None, 17])
def test_rows_that_see_to_the_end_equal_the_oracle(
    heads: tuple[int, int, int], dtype: torch.dtype, window_tokens: int | None, most_rows: int | None
) -> None:
    ranges = [(900, 917), (0, 4), (1136, 1153), (60, 70)]
    case = make_case(ranges, heads=heads, dtype=dtype, window_tokens=window_tokens)
    case = replace(case, batch=replace(case.batch, most_rows=most_rows))
    check(case, "cuda", window_tokens, is_causal=False)


@pytest.mark.skipif(torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="no conversions from e4m3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", MODEL_HEADS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.01, 0.02)])
def test_e4m3_memory_gives_what_its_values_give(
    heads: tuple[int, int, int], dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    ranges = [*decodes(1152, 1, 200), (900, 1028), (0, 70), (5, 6)]
    check(make_case(ranges, 3, heads=heads, dtype=dtype, scales=scales), "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_rows_of_a_graph_give_zeros(dtype: torch.dtype) -> None:
    check_padding(make_case(decodes(70, 1, 700), 3, heads=(2, 8, 256), dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_wider_rows_are_read_in_place(dtype: torch.dtype) -> None:
    check_views(make_case([*decodes(70, 3), (0, 9)], 2, heads=(2, 8, 256), dtype=dtype), "cuda")


@pytest.mark.skipif(
    torch.cuda.get_device_capability() != attention_prefix_triton.CAPABILITY, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("scales", [None, (0.01, 0.02)])
@pytest.mark.parametrize("heads", [(2, 8, 256), (4, 4, 256), (1, 3, 128), (2, 2, 64)])
@pytest.mark.parametrize(
    ("ranges", "num_decodes"), [*BEHIND_PREFIXES, ([*decodes(300), (2100, 2400), (200, 400), (5000, 5017)], 1)]
)
def test_prefills_behind_the_prefix_kernel_equal_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    ranges: list[tuple[int, int]],
    num_decodes: int,
    heads: tuple[int, int, int],
    scales: tuple[float, float] | None,
) -> None:
    # Of keys and values in e4m3, spans of one block or of 20, so that there are several.
    span_blocks = 1 if max(end for _, end in ranges) < 2000 else 20
    attend = attention_prefix_triton.attend_prefix

    def attend_spans(q_THD: Tensor, memory: KVMemory, table_M: Tensor, num_blocks: int, scale: float, _: int) -> Any:
        return attend(q_THD, memory, table_M, num_blocks, scale, span_blocks)

    prefix = Mock(side_effect=attend_spans)
    monkeypatch.setattr(attention_triton, "attend_prefix", prefix)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_QUERIES", 3)
    monkeypatch.setattr(attention_triton, "MIN_PREFIX_BLOCKS", 1)
    # The first time, the kernel is checked before it is used.
    for _ in range(2):
        prefix.reset_mock()
        check(make_case(ranges, num_decodes, heads=heads, dtype=torch.bfloat16, scales=scales), "cuda")
    num_behind = sum(end - start > 2 and start >= 64 for start, end in ranges)
    assert prefix.call_count == num_behind
