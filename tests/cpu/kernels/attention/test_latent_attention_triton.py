"""Attention over latents in Triton equals its definition, and sees nothing but the sequence's own latents.

The ``check_`` functions run on any device: tests/gpu runs them at a model's shape. Memory that no sequence owns is NaN.

Shape suffixes as in ``kernels/attention/latent_attention.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.attention.attention_splits import DecodePlan
from strandline.kernels.attention.latent_attention import latent_attention_reference
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.gpu import GPUS, standing_for
from strandline.kernels.operation import Launches
from tests.cpu.kernels.attention.test_latent_attention import make_batch
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import attention_splits
from strandline.kernels.attention import latent_attention_triton as kernels

SCALE = 0.3

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""``|out - ref| / |ref|``: sums in another order; bfloat16 weights and results, of 8 bits."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """Heads, and the channels of a latent and of its value."""

    num_heads: int = 3
    num_channels: int = 10
    value_dim: int = 7


SMALL = Shape()


@dataclass(frozen=True)
class Case:
    """A step: what all sequences have, and which rows are new."""

    shape: Shape
    ranges: tuple[Range, ...]
    num_decodes: int
    q_NTHD: list[Tensor]
    """Per sequence, of all of its tokens."""
    latent_NTD: list[Tensor]
    latent_BPD: Tensor
    """Strided, with the latents before the step; NaN elsewhere."""
    batch: AttentionBatch

    def run(self, launches: Launches = Launches.MEASURED) -> Tensor:
        """Return what the kernels give for the new rows."""
        q_THD, latent_TD = (
            torch.cat([x[start:end] for x, (start, end) in zip(xs, self.ranges, strict=True)])
            for xs in (self.q_NTHD, self.latent_NTD)
        )
        with poisoned_memory():
            return kernels.latent_attention(
                q_THD,
                latent_TD,
                self.latent_BPD,
                self.batch,
                self.num_decodes,
                self.shape.value_dim,
                scale=SCALE,
                launches=launches,
            )

    def expected(self) -> Tensor:
        """Return the definition's result in float64."""
        outs = []
        for q_THD, latent_TD, (start, end) in zip(self.q_NTHD, self.latent_NTD, self.ranges, strict=True):
            out_THV = latent_attention_reference(
                q_THD[:end].double().cpu(), latent_TD[:end].double().cpu(), self.shape.value_dim, SCALE
            )
            outs.append(out_THV[start:])
        return torch.cat(outs)


def make_case(
    ranges: Sequence[Range],
    num_decodes: int,
    *,
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Return random sequences; those before ``num_decodes`` have one new token each."""
    num_blocks = [ceil(end / BLOCK_TOKENS) for _, end in ranges]
    order = (torch.randperm(sum(num_blocks)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] + [0] * (max(num_blocks) - count) for count in num_blocks]
    q_NTHD = [torch.randn(end, shape.num_heads, shape.num_channels).to(device, dtype) for _, end in ranges]
    latent_NTD = [torch.randn(end, shape.num_channels).to(device, dtype) for _, end in ranges]
    arena = torch.full((sum(num_blocks) + 1, 2, BLOCK_TOKENS, shape.num_channels), torch.nan)
    latent_BPD = arena.to(device, dtype)[:, 0]
    for latent_TD, table, (start, _) in zip(latent_NTD, tables, ranges, strict=True):
        for position in range(start):
            latent_BPD[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = latent_TD[position]
    batch = make_batch(tables, ranges)
    moved = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in moved.items()}
    return Case(shape, tuple(ranges), num_decodes, q_NTHD, latent_NTD, latent_BPD, AttentionBatch(**moved))


def decodes(*contexts: int) -> list[Range]:
    """Return the last token of each context."""
    return [(context - 1, context) for context in contexts]


def error(found: Tensor, expected: Tensor) -> float:
    """Return ``|found - expected| / |expected|``."""
    return float((found.double().cpu() - expected).norm() / expected.norm())


def check(case: Case) -> None:
    found_THV, dtype = case.run(), case.latent_BPD.dtype
    assert found_THV.dtype == dtype
    assert error(found_THV, case.expected()) < TOLERANCES[dtype]
    for i, (start, end) in enumerate(case.ranges):
        for position in {start, end - 1}:
            block = case.batch.block_table_NM[i, position // BLOCK_TOKENS]
            assert torch.equal(case.latent_BPD[block, position % BLOCK_TOKENS], case.latent_NTD[i][position])


def check_padding(shape: Shape, dtype: torch.dtype, device: str) -> None:
    """Assert that decodes of an empty context, as a graph's room to spare has them, give zeros and store nothing."""
    case = make_case(decodes(70, 1, 1), 3, shape=shape, dtype=dtype, device=device)
    expected_THV, batch = case.expected(), case.batch
    for x in (batch.context_lens_N, batch.block_table_NM, batch.write_blocks_T):
        x[1:] = 0
    before_PD = case.latent_BPD[0].clone()
    out_THV = case.run()
    assert error(out_THV[:1], expected_THV[:1]) < TOLERANCES[dtype]
    assert out_THV[1:].count_nonzero() == 0
    assert torch.equal(case.latent_BPD[0].nan_to_num(9.0), before_PD.nan_to_num(9.0))


def check_invariance(shape: Shape, dtype: torch.dtype, device: str, ranges: Sequence[Range], num_decodes: int) -> None:
    """Assert that a sequence alone, and a prompt in two steps, have the bits that they have in a batch."""
    case = make_case(ranges, num_decodes, shape=shape, dtype=dtype, device=device)
    whole_THV, starts = case.run(Launches.FIXED), case.batch.query_starts
    for i, (start, end) in enumerate(ranges):
        alone = replace(case, q_NTHD=case.q_NTHD[i : i + 1], latent_NTD=case.latent_NTD[i : i + 1])
        rows_THV = whole_THV[starts[i] : starts[i + 1]]
        middle = (start + end) // 2
        parts = [(start, end)] if i < num_decodes else [(start, end), (start, middle), (middle, end)]
        for first, last in parts:
            if first == last:
                continue
            table = case.batch.block_table_NM[i, : ceil(end / BLOCK_TOKENS)].tolist()
            batch = make_batch([table], [(first, last)])
            moved = {field.name: getattr(batch, field.name) for field in fields(batch)}
            moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in moved.items()}
            step = replace(
                alone, ranges=((first, last),), num_decodes=int(i < num_decodes), batch=AttentionBatch(**moved)
            )
            assert torch.equal(step.run(Launches.FIXED), rows_THV[first - start : last - start]), (i, first, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decodes_equal_the_definition_and_see_no_nan(dtype: torch.dtype) -> None:
    check(make_case(decodes(1, 63, 64, 65, 130), 5, dtype=dtype))


@pytest.mark.parametrize("ranges", [[(0, 1)], [(0, 63), (90, 128)], [(63, 65), (130, 150)]], ids=str)
def test_prefills_equal_the_definition_and_see_no_nan(ranges: list[Range]) -> None:
    check(make_case(ranges, 0))


@pytest.mark.parametrize("shape", [Shape(1, 5, 4), Shape(5, 20, 16), Shape(17, 24, 16)], ids=str)
def test_mixed_steps_keep_the_order_of_rows(shape: Shape) -> None:
    check(make_case([*decodes(130, 1), (0, 20), (60, 70), (0, 1)], 2, shape=shape))


@pytest.mark.parametrize("most_rows", [None, 4])
def test_mixed_steps_in_bfloat16_stay_close_to_the_definition(most_rows: int | None) -> None:
    case = make_case([*decodes(200, 70), (100, 104), (0, 2)], 2, shape=Shape(4, 24, 16), dtype=torch.bfloat16)
    check(replace(case, batch=replace(case.batch, most_rows=most_rows)))


@pytest.mark.parametrize("num_splits", [1, 2, 9])
def test_the_result_does_not_depend_on_the_splits(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    monkeypatch.setattr(kernels, "plan_decodes", lambda *_, **__: DecodePlan(num_splits, 0))
    monkeypatch.setattr(attention_splits, "num_prefill_splits", lambda *_: num_splits)
    check(make_case([*decodes(1, 200), (100, 110)], 2))


def test_empty_contexts_give_zeros_and_store_nothing() -> None:
    check_padding(SMALL, torch.float32, "cpu")


def test_rows_of_the_null_block_are_not_stored() -> None:
    case = make_case([(0, 4)], 0)
    case.run()
    before_BPD = case.latent_BPD.clone()
    case.batch.write_blocks_T.fill_(NULL_BLOCK)
    changed = replace(case, latent_NTD=[torch.randn_like(x) for x in case.latent_NTD])
    assert changed.run().isfinite().all()
    assert torch.equal(case.latent_BPD.nan_to_num(9.0), before_BPD.nan_to_num(9.0))


@pytest.mark.usefixtures("rows_alike")
def test_deterministic_bits_do_not_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_splits, "FIXED_SPLIT_BLOCKS", 1)
    check_invariance(SMALL, torch.float32, "cpu", [*decodes(30, 140), (0, 70), (64, 100)], 2)


@pytest.mark.parametrize(("architecture", "rows"), [("sm_80", 64), ("sm_86", 32), ("sm_90", 64), ("sm_120", 32)])
def test_prefills_take_the_rows_that_fit(architecture: str, rows: int) -> None:
    q_THD = torch.empty(70, 32, 576, dtype=torch.bfloat16, device="meta")
    with standing_for(GPUS[architecture]):
        assert kernels._tile(q_THD, kernels.PREFILL_TILE, None).rows == rows
        assert kernels._tile(q_THD[:, :16], kernels.PREFILL_TILE, 1).rows == 16
