"""Attention over latents in blocks against its definition, in steps of any kind; other memory is NaN.

Shape suffixes as in ``kernels/attention/latent_attention.py``.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from strandline.kernels.batch import AttentionBatch

NUM_HEADS, NUM_CHANNELS, VALUE_DIM, SCALE = 3, 10, 7, 0.4

TOLERANCE = 2e-6
"""Sums of at most some 200 products of numbers around 1, divided by their own scale."""


def make_batch(
    tables: Sequence[Sequence[int]], ranges: Sequence[tuple[int, int]], *, is_all_written: bool = True
) -> AttentionBatch:
    """Return a step of sequences with new tokens ``[start, end)``."""
    positions = [(i, position) for i, (start, end) in enumerate(ranges) for position in range(start, end)]
    starts = [0]
    for start, end in ranges:
        starts.append(starts[-1] + end - start)
    ends = [end for _, end in ranges]
    return AttentionBatch(
        query_starts=tuple(starts),
        context_lens=tuple(ends),
        query_starts_N1=torch.tensor(starts),
        context_lens_N=torch.tensor(ends),
        block_table_NM=torch.tensor(tables, dtype=torch.int32),
        write_blocks_T=torch.tensor([tables[i][position // BLOCK_TOKENS] for i, position in positions]),
        write_offsets_T=torch.tensor([position % BLOCK_TOKENS for _, position in positions]),
        is_all_written=is_all_written,
    )


def attend(q_THD: Tensor, latent_TD: Tensor, latent_BPD: Tensor, batch: AttentionBatch) -> Tensor:
    return latent_attention.reference(q_THD, latent_TD, latent_BPD, batch, 0, VALUE_DIM, scale=SCALE)


@pytest.mark.parametrize("bounds", [[130], [1, 130], [63, 64, 65, 130], [7, 100, 101, 102, 130]])
def test_steps_of_any_size_equal_the_definition(bounds: list[int]) -> None:
    length, others = 130, 70
    q_THD, latent_TD = torch.randn(length, NUM_HEADS, NUM_CHANNELS), torch.randn(length, NUM_CHANNELS)
    other_THD, other_TD = torch.randn(others, NUM_HEADS, NUM_CHANNELS), torch.randn(others, NUM_CHANNELS)
    latent_BPD, tables = torch.full((9, BLOCK_TOKENS, NUM_CHANNELS), torch.nan), [[4, 2, 7], [5, 1, 0]]
    outs, start = [], 0
    for end in bounds:
        batch = make_batch(tables, [(start, end), (0, others)])
        both = (torch.cat((q_THD[start:end], other_THD)), torch.cat((latent_TD[start:end], other_TD)))
        out_THV = attend(*both, latent_BPD, batch)
        outs.append(out_THV[: end - start])
        expected_THV = latent_attention_reference(other_THD, other_TD, VALUE_DIM, SCALE)
        torch.testing.assert_close(out_THV[end - start :], expected_THV, rtol=0, atol=TOLERANCE)
        start = end
    expected_THV = latent_attention_reference(q_THD, latent_TD, VALUE_DIM, SCALE)
    torch.testing.assert_close(torch.cat(outs), expected_THV, rtol=0, atol=TOLERANCE)


def test_rows_of_the_null_block_are_not_stored() -> None:
    latent_BPD = torch.full((3, BLOCK_TOKENS, NUM_CHANNELS), torch.nan)
    latent_BPD[1, :4] = torch.randn(4, NUM_CHANNELS)
    before_BPD = latent_BPD.clone()
    batch = make_batch([[1]], [(0, 4)], is_all_written=False)
    batch.write_blocks_T.fill_(NULL_BLOCK)
    out_THV = attend(torch.randn(4, NUM_HEADS, NUM_CHANNELS), torch.randn(4, NUM_CHANNELS), latent_BPD, batch)
    assert out_THV.isfinite().all()
    torch.testing.assert_close(latent_BPD, before_BPD, rtol=0, atol=0, equal_nan=True)
