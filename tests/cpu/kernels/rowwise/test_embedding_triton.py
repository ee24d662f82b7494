"""Triton's embeddings and rotary tables equal the reference implementations.

The ``check_`` functions run on any device; tests/gpu runs them at larger sizes.
"""

import pytest
import torch

from strandline.ids import FIRST_VIRTUAL_ID
from strandline.kernels.rowwise import embedding, rotary
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.rowwise import embedding_triton, rotary_triton


def check_embedding(num_tokens: int, num_channels: int, dtype: torch.dtype, device: str) -> None:
    """Tokens of this rank, those of others, and none that a spare row stands for."""
    embed_ZE = torch.randn(40, num_channels).to(device, dtype)
    embed_ZE[37:] = torch.nan
    token_ids_T = torch.randint(60, 140, (num_tokens,), device=device)
    with poisoned_memory():
        found_TE = embedding_triton.embed_held(token_ids_T, embed_ZE, 80, 37)
    assert torch.equal(found_TE, embedding.embed_held.reference(token_ids_T, embed_ZE, 80, 37))

    encoded_XE = torch.randn(9, num_channels).to(device, dtype)
    token_ids_T[::3] = FIRST_VIRTUAL_ID + torch.randint(9, token_ids_T[::3].shape, device=device)
    with poisoned_memory():
        found_TE = embedding_triton.embed_held(token_ids_T, embed_ZE, 80, 37, encoded_XE)
    assert torch.equal(found_TE, embedding.embed_held.reference(token_ids_T, embed_ZE, 80, 37, encoded_XE))
    assert torch.equal(found_TE[::3], encoded_XE[token_ids_T[::3] - FIRST_VIRTUAL_ID])


def check_rotary_table(num_rows: int, num_pairs: int, factor: float, device: str, *, last: int) -> None:
    """Positions up to ``last``: their angles are large."""
    positions_T = torch.randint(last + 1, (num_rows,), device=device)
    inv_freq_F = rotary.default_frequencies(1e6, 2 * num_pairs).to(device)
    with poisoned_memory():
        found = rotary_triton.rotary_table(positions_T, inv_freq_F, factor)
    expected = rotary.rotary_table.reference(positions_T, inv_freq_F, factor)
    for found_T12F, expected_T12F in zip(found, expected, strict=True):
        torch.testing.assert_close(found_T12F, expected_T12F, rtol=0, atol=3e-7)


def check_rotary_table_3d(num_rows: int, num_pairs: int, factor: float, device: str, *, last: int) -> None:
    """Positions of pictures, and of text, whose table is that of one dimension to the bit."""
    inv_freq_F = rotary.default_frequencies(1e6, 2 * num_pairs).to(device)
    dimension_F = rotary.interleaved_dimensions(num_pairs, (num_pairs, 3, 2)).to(device)
    positions_T = torch.randint(last + 1, (num_rows,), device=device)
    offsets_3T = torch.randint(-last, 1, (3, num_rows), device=device)
    with poisoned_memory():
        found = rotary_triton.rotary_table_3d(positions_T, offsets_3T, dimension_F, inv_freq_F, factor)
        of_text = rotary_triton.rotary_table_3d(positions_T, 0 * offsets_3T, dimension_F, inv_freq_F, factor)
        expected_of_text = rotary_triton.rotary_table(positions_T, inv_freq_F, factor)
    expected = rotary.rotary_table_3d.reference(positions_T, offsets_3T, dimension_F, inv_freq_F, factor)
    for found_T12F, expected_T12F in zip(found, expected, strict=True):
        torch.testing.assert_close(found_T12F, expected_T12F, rtol=0, atol=3e-7)
    assert all(map(torch.equal, of_text, expected_of_text))


@pytest.mark.parametrize("num_channels", [24, 1100])
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_embeddings_equal_the_reference(num_tokens: int, num_channels: int) -> None:
    check_embedding(num_tokens, num_channels, torch.float32, "cpu")


@pytest.mark.parametrize(("num_rows", "num_pairs", "factor"), [(0, 8, 1.0), (1, 12, 1.0), (19, 32, 1.2)])
def test_rotary_tables_equal_the_reference(num_rows: int, num_pairs: int, factor: float) -> None:
    check_rotary_table(num_rows, num_pairs, factor, "cpu", last=300_000)


@pytest.mark.parametrize(("num_rows", "num_pairs", "factor"), [(0, 8, 1.0), (1, 12, 1.0), (19, 32, 1.2)])
def test_rotary_tables_of_three_dimensions_equal_the_reference(num_rows: int, num_pairs: int, factor: float) -> None:
    check_rotary_table_3d(num_rows, num_pairs, factor, "cpu", last=300_000)
