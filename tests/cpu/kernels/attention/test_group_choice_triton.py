"""The choice of groups in Triton is that of a stable sort, to the last tie, and depends on a row's sequence alone.

The ``check_`` functions run on any device. Memory that no sequence owns is NaN.

Shape suffixes as in ``kernels/attention/indexed_latent_attention.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.indexed_attention import GroupIndex, IndexedMemory
from strandline.kernels.attention.indexed_attention import indexed_attention as indexed_attention_operation
from strandline.kernels.attention.indexed_latent_attention import PooledIndex
from strandline.kernels.attention.indexed_latent_attention import choose_groups as choose_groups_operation
from strandline.kernels.attention.stored_tokens import store_tokens
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import Launches
from tests.cpu.kernels.attention.test_latent_attention import make_batch
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import group_choice_triton
from strandline.kernels.attention.indexed_attention_triton import (
    choose_groups,
    indexed_attention,
    indexed_latent_attention,
)

Range = tuple[int, int]


@dataclass
class Case:
    """A step whose rows choose groups."""

    q_TJC: Tensor
    weight_TJ: Tensor
    index_BPX: Tensor
    batch: AttentionBatch
    index: PooledIndex

    def choose(self) -> Tensor:
        """Return what the kernels choose."""
        with poisoned_memory():
            return choose_groups(self.q_TJC, self.weight_TJ, self.index_BPX, self.batch, self.index)

    def expected(self) -> Tensor:
        """Return the reference implementation's choice in the order of groups, with -1 after them."""
        found_TK = choose_groups_operation.reference(self.q_TJC, self.weight_TJ, self.index_BPX, self.batch, self.index)
        last = 2**40
        ordered_TK = found_TK.masked_fill(found_TK < 0, last).sort(dim=-1).values
        return ordered_TK.masked_fill(ordered_TK == last, -1)


def make_case(
    ranges: Sequence[Range], group_tokens: int, max_groups: int, num_values: int, *, device: str = "cpu"
) -> Case:
    """Return a step whose scores are integers, exact in any order of sums, of few values: many are equal.

    Args:
        num_values: numbers that index keys consist of.
    """
    num_heads, dim = 4, 16
    num_blocks = [-(-end // BLOCK_TOKENS) for _, end in ranges]
    order = (torch.randperm(sum(num_blocks)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] + [0] * (max(num_blocks) - count) for count in num_blocks]
    index_BPX = torch.full((sum(num_blocks) + 1, BLOCK_TOKENS, 2 * dim), torch.nan)
    for table, (_, end) in zip(tables, ranges, strict=True):
        whole = make_batch([table], [(0, end)])
        keys = torch.randint(-num_values, num_values + 1, (end, dim)).float()
        # One gate outweighs the others of its group: its token's key is the group's.
        gates = torch.full((end, dim), -200.0)
        gates[::group_tokens] = 200.0
        store_tokens.reference(torch.cat((keys, gates), dim=-1), index_BPX, whole)
    num_rows = sum(end - start for start, end in ranges)
    batch = make_batch(tables, ranges)
    moved = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in moved.items()}
    return Case(
        torch.randint(-2, 3, (num_rows, num_heads, dim)).float().to(device),
        torch.randint(-2, 3, (num_rows, num_heads)).float().to(device),
        index_BPX.to(device),
        AttentionBatch(**moved),
        PooledIndex(group_tokens, max_groups, torch.zeros(group_tokens, dim, device=device)),
    )


@settings(max_examples=12, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), min_size=1, max_size=3),
    group_tokens=st.sampled_from([1, 3, 4, 16, 64]),
    max_groups=st.integers(1, 40),
    num_values=st.integers(0, 3),
    block=st.sampled_from([16, 64]),
)
def test_any_choice_is_that_of_a_stable_sort(
    ranges: list[Range], group_tokens: int, max_groups: int, num_values: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_choice_triton, "BLOCK_S", block)
        case = make_case([(start, start + count) for start, count in ranges], group_tokens, max_groups, num_values)
        assert torch.equal(case.choose(), case.expected())


def test_signs_and_scales_of_scores_are_ordered() -> None:
    case = make_case([(120, 121)], 1, 7, 3)
    keys_LC = case.index_BPX[case.batch.block_table_NM[0].long()].flatten(0, 1)[:121, :16]
    keys_LC.zero_()[:, 0] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1.0, -1.0, 1e-30]).repeat(14)[:121]
    case.index_BPX[case.batch.block_table_NM[0].long(), :, :16] = torch.nn.functional.pad(
        keys_LC, (0, 0, 0, 7)
    ).unflatten(0, (2, 64))
    for weight in (1.0, -1.0):
        case.q_TJC.zero_()[..., 0] = 1.0
        case.weight_TJ.zero_()[:, 0] = weight
        assert torch.equal(case.choose(), case.expected())


def test_passes_over_rows_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(69, 70), (100, 140), (0, 3)], 4, 5, 2)
    expected_TK = case.choose()
    monkeypatch.setattr(group_choice_triton, "SCORE_BYTES", 7 * 4 * 48)
    monkeypatch.setattr(group_choice_triton, "MANY_ROWS", 2)
    assert torch.equal(case.choose(), expected_TK)
    assert torch.equal(expected_TK, case.expected())


def check_bits(device: str, dtype: torch.dtype) -> None:
    """Assert that a token's choice and result are the same, to the bit, whatever step computes it."""
    length, dim, index = 150, 16, PooledIndex(4, 6, torch.randn(4, 16, device=device))
    latent_BPD, index_BPX = (torch.full((4, BLOCK_TOKENS, 2 * dim), torch.nan, device=device) for _ in range(2))
    rows = torch.randn(length, 2 * dim, device=device)
    table = [[3, 1, 2]]
    tensors = [torch.randn(length, *shape, device=device) for shape in ((4, 2 * dim), (8, dim), (8,))]
    tensors, index_BPX, latent_BPD = [x.to(dtype) for x in tensors], index_BPX.to(dtype), latent_BPD.to(dtype)
    with torch.device(device):
        for memory in (latent_BPD, index_BPX):
            store_tokens.reference(rows.to(dtype), memory, make_batch(table, [(0, length)]))

    def run(start: int, end: int, *others: Range) -> tuple[Tensor, Tensor]:
        ranges = [(start, end), *others]
        with torch.device(device):
            batch = make_batch(table * len(ranges), ranges)
        q_THD, index_q_TJC, weight_TJ = (torch.cat([x[slice(*each)] for each in ranges]) for x in tensors)
        group_TK = choose_groups(index_q_TJC, weight_TJ, index_BPX, batch, index)
        chosen = (group_TK, batch, 4, dim)
        out_THV = indexed_latent_attention(q_THD, latent_BPD, *chosen, scale=0.3, launches=Launches.FIXED)
        return group_TK[: end - start], out_THV[: end - start]

    expected = run(0, length)
    for step in [(149, 150), (20, 21), (60, 90), (149, 150, (0, 7)), (3, 6, (100, 101), (0, 2))]:
        start, end = step[:2]
        for found, whole in zip(run(*step), expected, strict=True):
            assert torch.equal(found, whole[start:end])


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_step(dtype: torch.dtype) -> None:
    check_bits("cpu", dtype)


def test_positions_that_are_stored_turn_keys_of_groups() -> None:
    dim, length, pairs = 16, 120, 3
    frequencies, dimension_F = torch.tensor([1.0, 0.1, 0.01]), torch.tensor([0, 2, 1])
    index = GroupIndex(8, 3, 0.2 * torch.randn(dim), 1e-6, frequencies, dimension_F, 1.5)
    assert len(frequencies) == pairs
    kv = KVMemory(*torch.full((2, 4, BLOCK_TOKENS, 2, 8), torch.nan))
    memory = IndexedMemory(
        kv, torch.full((4, BLOCK_TOKENS, dim), torch.nan), torch.full((4, BLOCK_TOKENS, 3), torch.nan)
    )
    whole = make_batch([[2, 3]], [(0, length)])
    assert memory.position_BP3 is not None
    for stream, shape in ((kv.k_BPGD, (2, 8)), (kv.v_BPGD, (2, 8)), (memory.index_BPC, (dim,))):
        store_tokens.reference(torch.randn(length, *shape), stream, whole)
    store_tokens.reference(torch.randint(0, 500, (length, 3)).float(), memory.position_BP3, whole)
    batch = make_batch([[2, 3]], [(length - 5, length)])
    q_THD, index_q_TJC = torch.randn(5, 4, 8), torch.randn(5, 6, dim)
    found, expected = (
        attend(q_THD, index_q_TJC, memory, batch, index, scale=0.3)
        for attend in (indexed_attention, indexed_attention_operation.reference)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    plain = indexed_attention(q_THD, index_q_TJC, replace(memory, position_BP3=None), batch, index, scale=0.3)
    assert not torch.allclose(plain, expected)


def test_rows_of_empty_sequences_give_zeros_and_choose_nothing() -> None:
    case = make_case([(69, 70), (0, 1)], 4, 5, 2)
    case.batch.context_lens_N[1] = 0
    case.batch.block_table_NM[1] = 0
    group_TK = case.choose()
    assert group_TK[1].tolist() == [-1] * 5
    chosen = (group_TK, case.batch, 4, 8)
    with poisoned_memory():
        out_THV = indexed_latent_attention(torch.randn(2, 3, 16), case.index_BPX[..., :16], *chosen, scale=0.3)
    assert out_THV[0].isfinite().all()
    assert out_THV[1].count_nonzero() == 0
