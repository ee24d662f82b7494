"""Indexed attention over blocks against its definition, in steps of any kind; other memory is NaN.

Shape suffixes as in ``kernels/attention/indexed_attention.py``.
"""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.attention import indexed_attention as definition
from strandline.kernels.attention.attention import paged_attention
from strandline.kernels.attention.indexed_attention import (
    GroupIndex,
    IndexedMemory,
    indexed_attention,
    indexed_attention_reference,
    seen_tokens,
)
from strandline.kernels.attention.qkv import write_kv
from strandline.kernels.attention.stored_tokens import store_tokens
from strandline.kernels.batch import KVMemory
from tests.cpu.kernels.attention.test_latent_attention import make_batch
from tests.poison import poisoned_memory

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.4
NUM_INDEX_HEADS, INDEX_DIM = 8, 10
TABLES = [[4, 2, 7], [5, 1, 0]]

TOLERANCE = 2e-6
"""Sums of at most some 200 products of numbers around 1, divided by their own scale."""

Tokens = tuple[Tensor, ...]
"""Queries, keys, values, index queries and index keys of some tokens."""


def make_index(group_tokens: int, max_groups: int) -> GroupIndex:
    inv_freq_F = torch.tensor([1.0, 0.1, 0.01])
    return GroupIndex(group_tokens, max_groups, 0.2 * torch.randn(INDEX_DIM), 1e-6, inv_freq_F, torch.zeros(0), 1.0)


def random_tokens(count: int) -> Tokens:
    shapes = ((NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_INDEX_HEADS, INDEX_DIM))
    return tuple(torch.randn(count, *shape) for shape in (*shapes, (INDEX_DIM,)))


def nan_memory() -> IndexedMemory:
    k_BPGD, v_BPGD = torch.full((2, 10, BLOCK_TOKENS, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    return IndexedMemory(KVMemory(k_BPGD, v_BPGD), torch.full((10, BLOCK_TOKENS, INDEX_DIM), torch.nan))


Attend = Callable[..., Tensor]


@pytest.fixture(params=["reference", "triton"])
def version(request: pytest.FixtureRequest) -> Attend:
    if request.param == "reference":
        return indexed_attention.reference
    pytest.importorskip("triton")
    return importlib.import_module("strandline.kernels.attention.indexed_attention_triton").indexed_attention


def attend(
    version: Attend, parts: list[tuple[Tokens, int, int]], memory: IndexedMemory, index: GroupIndex
) -> list[Tensor]:
    """Run a step over a range of each sequence's tokens; return the output of each."""
    batch = make_batch(TABLES, [(start, end) for _, start, end in parts])
    q, k, v, index_q, index_k = (
        torch.cat([x[start:end] for x, (_, start, end) in zip(xs, parts, strict=True)])
        for xs in zip(*(tokens for tokens, _, _ in parts), strict=True)
    )
    write_kv(k, v, memory.kv, batch)
    store_tokens.reference(index_k, memory.index_BPC, batch)
    with poisoned_memory():
        out_THD = version(q, index_q, memory, batch, index, scale=SCALE)
    return list(out_THD.split([end - start for _, start, end in parts]))


GROUPS = [(4, 3), (7, 10), (1, 5), (64, 1), (16, 8)]
"""Tokens of a group, and most groups of a query."""

BOUNDS = [[130], [1, 130], [63, 64, 65, 130], [7, 100, 101, 102, 130]]
INTERPRETED = [(BOUNDS[3], 4, 3), (BOUNDS[2], 7, 10), (BOUNDS[1], 64, 1)]
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
    version: Attend, bounds: list[int], group_tokens: int, max_groups: int
) -> None:
    tokens, others = random_tokens(130), random_tokens(70)
    index, memory = make_index(group_tokens, max_groups), nan_memory()
    outs, start = [], 0
    for end in bounds:
        out, other = attend(version, [(tokens, start, end), (others, 0, 70)], memory, index)
        torch.testing.assert_close(other, indexed_attention_reference(*others, index, SCALE), rtol=0, atol=TOLERANCE)
        outs.append(out)
        start = end
    expected = indexed_attention_reference(*tokens, index, SCALE)
    torch.testing.assert_close(torch.cat(outs), expected, rtol=0, atol=TOLERANCE)


def test_prompts_are_attended_to_some_queries_at_a_time(version: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "QUERY_TOKENS", 100)
    length, index, memory = 2 * 100 + 10, make_index(8, 5), nan_memory()
    tokens = random_tokens(length)
    batch = make_batch([[3, 8, 1, 2]], [(0, length)])
    write_kv(tokens[1], tokens[2], memory.kv, batch)
    store_tokens.reference(tokens[4], memory.index_BPC, batch)
    out = version(tokens[0], tokens[3], memory, batch, index, scale=SCALE)
    torch.testing.assert_close(out, indexed_attention_reference(*tokens, index, SCALE), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("bounds", [[130], [100, 129, 130]])
def test_contexts_within_the_budget_are_read_whole(version: Attend, bounds: list[int]) -> None:
    tokens, index, memory, start = random_tokens(130), make_index(10, 13), nan_memory(), 0
    assert index.is_whole(139)
    assert not index.is_whole(140)
    for end in bounds:
        [out] = attend(version, [(tokens, start, end)], memory, index)
        batch = make_batch(TABLES[:1], [(start, end)])
        expected = paged_attention.reference(tokens[0][start:end], memory.kv, batch, 0, scale=SCALE)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
        start = end


def test_a_query_reads_chosen_groups_and_the_rest() -> None:
    index, key_NC = make_index(4, 2), torch.randn(5, INDEX_DIM)
    index_q_TJC = torch.randn(22, NUM_INDEX_HEADS, INDEX_DIM)
    seen_TL = seen_tokens(index_q_TJC, key_NC, 0, 22, index)
    for position, seen_L in enumerate(seen_TL):
        num_complete = (position + 1) // 4
        assert int(seen_L.sum()) == 4 * min(2, num_complete) + (position + 1) % 4
        assert seen_L[4 * num_complete : position + 1].all()
        assert not seen_L[position + 1 :].any()


def test_equal_scores_choose_the_earlier_groups() -> None:
    index = make_index(4, 2)
    seen_TL = seen_tokens(torch.zeros(1, NUM_INDEX_HEADS, INDEX_DIM), torch.randn(5, INDEX_DIM), 20, 21, index)
    assert seen_TL[0].nonzero().squeeze(-1).tolist() == [*range(8), 20]


def test_index_keys_for_the_null_block_are_not_stored() -> None:
    index_BPC = torch.full((3, BLOCK_TOKENS, INDEX_DIM), torch.nan)
    batch = make_batch([[1]], [(0, 4)], is_all_written=False)
    batch.write_blocks_T[1:3] = NULL_BLOCK
    store_tokens.reference(torch.randn(4, INDEX_DIM), index_BPC, batch)
    assert index_BPC[NULL_BLOCK].isnan().all()
    assert index_BPC[1, :5].isnan().all(dim=-1).tolist() == [False, True, True, False, True]
