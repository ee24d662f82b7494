"""Attention to keys and values computed again from latents in blocks, against its definition; other memory is NaN.

The ``check`` functions run on any device, with the reference implementation and with Triton.

Shape suffixes as in ``kernels/attention/latent_expansion.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from strandline.kernels.attention.latent_expansion import expanded_latent_attention, is_expansion_worthwhile
from strandline.kernels.batch import AttentionBatch
from tests.cpu.kernels.attention.test_latent_attention import make_batch
from tests.cpu.kernels.attention.test_latent_attention_triton import Range, decodes, error, make_case
from tests.cpu.kernels.attention.test_latent_attention_triton import Shape as Latents
from tests.poison import poisoned_memory

SCALE = 0.3

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}
"""``|out - ref| / |ref|``: sums in another order; bfloat16 keys, values, weights and results, of 8 bits."""

Attend = Callable[..., Tensor]


class Shape(NamedTuple):
    """Heads, and channels of latents, shared keys, heads' keys and values."""

    num_heads: int = 3
    latent_dim: int = 7
    shared_dim: int = 4
    key_dim: int = 5
    value_dim: int = 6


@dataclass(frozen=True)
class Case:
    """A step, in which the latents are stored already."""

    shape: Shape
    ranges: tuple[Range, ...]
    num_decodes: int
    q_NTHD: list[Tensor]
    """Per prefill, of its new tokens."""
    latent_NTC: list[Tensor]
    """Per prefill, of all of its tokens."""
    latent_BPC: Tensor
    ups: tuple[Tensor, Tensor]
    batch: AttentionBatch

    def run(self, attend: Attend) -> Tensor:
        with poisoned_memory():
            return attend(torch.cat(self.q_NTHD), self.latent_BPC, *self.ups, self.batch, self.num_decodes, scale=SCALE)

    def expected(self) -> Tensor:
        """Return the definition's result in float64."""
        outs, (key_up, value_up) = [], (up.double().cpu() for up in self.ups)
        for q, latents in zip(self.q_NTHD, self.latent_NTC, strict=True):
            q_THD, num_later = q.double().cpu(), len(latents) - len(q)
            latent_LR, shared_LP = latents.double().cpu().split([self.shape.latent_dim, self.shape.shared_dim], dim=-1)
            k_LHK = torch.einsum("lr,hkr->lhk", latent_LR, key_up)
            v_LHV = torch.einsum("lr,hvr->lhv", latent_LR, value_up)
            k_LHD = torch.cat((k_LHK, shared_LP[:, None].expand(-1, self.shape.num_heads, -1)), dim=-1)
            is_later_TL = torch.ones(len(q), len(latents), dtype=torch.bool).triu_(1 + num_later)
            score_HTL = (torch.einsum("thd,lhd->htl", q_THD, k_LHD) * SCALE).masked_fill(is_later_TL, -torch.inf)
            outs.append(torch.einsum("htl,lhv->thv", score_HTL.softmax(-1), v_LHV))
        return torch.cat(outs)


def make(
    ranges: Sequence[Range],
    num_decodes: int = 0,
    *,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    shape = shape or Shape()
    latents = Latents(1, shape.latent_dim + shape.shared_dim, shape.latent_dim)
    stored = make_case(ranges, num_decodes, shape=latents, dtype=dtype, device=device)
    for latent_TC, table_M, (start, end) in zip(stored.latent_NTD, stored.batch.block_table_NM, ranges, strict=True):
        for position in range(start, end):
            stored.latent_BPD[table_M[position // 64], position % 64] = latent_TC[position]
    query_dim = shape.key_dim + shape.shared_dim
    ups = [
        (torch.randn(shape.num_heads, dim, shape.latent_dim) * shape.latent_dim**-0.5).to(device, dtype)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    # Queries lie between other channels, as a projection leaves them.
    q_NTHD = [
        torch.randn(end - start, shape.num_heads, query_dim + 2).to(device, dtype)[..., :query_dim]
        for start, end in ranges[num_decodes:]
    ]
    return Case(
        shape,
        tuple(ranges),
        num_decodes,
        q_NTHD,
        stored.latent_NTD[num_decodes:],
        stored.latent_BPD,
        (ups[0], ups[1]),
        stored.batch,
    )


def check(case: Case, attend: Attend) -> Tensor:
    found_THV, dtype = case.run(attend), case.latent_BPC.dtype
    assert found_THV.dtype == dtype
    assert error(found_THV, case.expected()) < TOLERANCES[dtype]
    return found_THV


RANGES: list[tuple[list[Range], int]] = [
    ([(0, 1)], 0),
    ([(0, 130)], 0),
    ([(0, 63), (90, 128), (0, 64)], 0),
    ([*decodes(1, 70), (63, 65), (100, 190), (0, 3)], 2),
]


@pytest.mark.parametrize(("ranges", "num_decodes"), RANGES, ids=str)
def test_prefills_equal_the_definition(ranges: list[Range], num_decodes: int) -> None:
    check(make(ranges, num_decodes), expanded_latent_attention.reference)


KIMI = {"latent_dim": 512, "shared_dim": 64, "key_dim": 128, "value_dim": 128}


@pytest.mark.parametrize(
    ("ranges", "is_worthwhile"),
    [([(0, 8192)], True), ([(0, 100)], False), ([(8000, 8100)], False), ([(8000, 8500)], True), ([(4, 5)] * 9, False)],
    ids=str,
)
def test_many_queries_are_worth_computing_keys_again(ranges: list[Range], is_worthwhile: bool) -> None:
    tables = [[1] * (end // 64 + 1) for _, end in ranges]
    batch = make_batch(tables, ranges)
    assert is_expansion_worthwhile(batch, 0, **KIMI) == is_worthwhile
    assert not is_expansion_worthwhile(replace(batch, is_padded=True), 0, **KIMI)
    assert not is_expansion_worthwhile(replace(batch, most_rows=4), 0, **KIMI)
    assert not is_expansion_worthwhile(batch, len(ranges), **KIMI)
