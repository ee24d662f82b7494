"""Indexed latent attention over blocks against its definition, in steps of any kind; other memory is NaN.

Shape suffixes as in ``kernels/attention/indexed_latent_attention.py``.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.indexed_latent_attention import (
    QUERY_TOKENS,
    PooledIndex,
    choose_groups,
    indexed_latent_attention,
    indexed_latent_attention_reference,
    seen_positions,
)
from strandline.kernels.attention.stored_tokens import store_tokens
from tests.cpu.kernels.attention.test_latent_attention import make_batch
from tests.poison import poisoned_memory

NUM_HEADS, LATENT_DIM, VALUE_DIM, SCALE = 4, 12, 10, 0.4
NUM_INDEX_HEADS, INDEX_DIM = 8, 10
TABLES = [[4, 2, 7], [5, 1, 0]]

TOLERANCE = 2e-6
"""Sums of at most some 200 products of numbers around 1, divided by their own scale."""

Tokens = tuple[Tensor, ...]
"""Queries, latents, index queries, weights of index heads, and index keys beside their gates, of some tokens."""

Version = tuple[Callable[..., Any], Callable[..., Any]]
"""The choice, and the attention."""


def make_index(group_tokens: int, max_groups: int) -> PooledIndex:
    return PooledIndex(group_tokens, max_groups, torch.randn(group_tokens, INDEX_DIM))


def random_tokens(count: int) -> Tokens:
    shapes = ((NUM_HEADS, LATENT_DIM), (LATENT_DIM,), (NUM_INDEX_HEADS, INDEX_DIM), (NUM_INDEX_HEADS,))
    return tuple(torch.randn(count, *shape) for shape in (*shapes, (2 * INDEX_DIM,)))


def nan_memory() -> tuple[Tensor, Tensor]:
    return tuple(torch.full((10, BLOCK_TOKENS, size), torch.nan) for size in (LATENT_DIM, 2 * INDEX_DIM))


@pytest.fixture(params=["reference", "triton"])
def version(request: pytest.FixtureRequest) -> Version:
    if request.param == "reference":
        return choose_groups.reference, indexed_latent_attention.reference
    pytest.importorskip("triton")
    module = importlib.import_module("strandline.kernels.attention.indexed_attention_triton")
    return module.choose_groups, module.indexed_latent_attention


def attend(
    version: Version, parts: list[tuple[Tokens, int, int]], memory: tuple[Tensor, Tensor], index: PooledIndex
) -> tuple[Tensor, ...]:
    """Run a step over a range of each sequence's tokens; return the output of each."""
    latent_BPD, index_BPX = memory
    batch = make_batch(TABLES, [(start, end) for _, start, end in parts])
    q, latent, index_q, weight, index_row = (
        torch.cat([x[start:end] for x, (_, start, end) in zip(xs, parts, strict=True)])
        for xs in zip(*(tokens for tokens, _, _ in parts), strict=True)
    )
    store_tokens.reference(latent, latent_BPD, batch)
    store_tokens.reference(index_row, index_BPX, batch)
    choose, attend_chosen = version
    with poisoned_memory():
        group_TK = choose(index_q, weight, index_BPX, batch, index)
        out_THV = attend_chosen(q, latent_BPD, group_TK, batch, index.group_tokens, VALUE_DIM, scale=SCALE)
    return out_THV.split([end - start for _, start, end in parts])


GROUPS = [(4, 3), (7, 10), (1, 5), (64, 1)]
"""Tokens of a group, and most groups of a query."""

BOUNDS = [[130], [7, 100, 101, 102, 130]]
INTERPRETED = [(BOUNDS[1], 4, 3), (BOUNDS[0], 7, 10)]
"""Steps for the interpreter, which takes long."""


@pytest.mark.parametrize(
    ("version", "bounds", "group_tokens", "max_groups"),
    [
        *(("reference", bounds, *groups) for bounds in BOUNDS for groups in GROUPS),
        *(("triton", *case) for case in INTERPRETED),
    ],
    indirect=["version"],
)
def test_steps_of_any_size_equal_the_definition(
    version: Version, bounds: list[int], group_tokens: int, max_groups: int
) -> None:
    tokens, others = random_tokens(130), random_tokens(70)
    index, memory = make_index(group_tokens, max_groups), nan_memory()
    outs, start = [], 0
    for end in bounds:
        out, other = attend(version, [(tokens, start, end), (others, 0, 70)], memory, index)
        expected = indexed_latent_attention_reference(*others, index, VALUE_DIM, SCALE)
        torch.testing.assert_close(other, expected, rtol=0, atol=TOLERANCE)
        outs.append(out)
        start = end
    assert max(bounds) > 2 * QUERY_TOKENS
    expected = indexed_latent_attention_reference(*tokens, index, VALUE_DIM, SCALE)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=0, atol=TOLERANCE)


def test_equal_scores_choose_the_earlier_groups(version: Version) -> None:
    index, batch = make_index(4, 2), make_batch(TABLES[:1], [(0, 21)])
    _, _, index_q_TJC, weight_TJ, index_TX = random_tokens(21)
    _, index_BPX = nan_memory()
    store_tokens.reference(index_TX, index_BPX, batch)
    group_TK = version[0](index_q_TJC, torch.zeros_like(weight_TJ), index_BPX, batch, index)
    assert group_TK[[2, 3, 20]].tolist() == [[-1, -1], [0, -1], [0, 1]]


def test_a_query_reads_chosen_groups_and_the_rest() -> None:
    group_TK = torch.tensor([[2, 0], [1, -1], [-1, -1]])
    found = [[x for x in row if x >= 0] for row in seen_positions(group_TK, 10, 3).tolist()]
    assert found == [[6, 7, 8, 0, 1, 2, 9, 10], [3, 4, 5], [12]]
