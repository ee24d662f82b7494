"""Embeddings and rotary tables on a GPU: the checks of the CPU's tests at the sizes of models."""

import pytest
import torch

from tests.cpu.kernels.rowwise.test_embedding_triton import (
    check_embedding,
    check_rotary_table,
    check_rotary_table_3d,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_channels", [2048, 5120])
@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
def test_embeddings_equal_the_reference(num_tokens: int, num_channels: int, dtype: torch.dtype) -> None:
    check_embedding(num_tokens, num_channels, dtype, "cuda")


@pytest.mark.parametrize("num_rows", [1, 64, 3000])
@pytest.mark.parametrize(("num_pairs", "factor"), [(32, 1.0), (40, 1.3), (128, 1.0)])
def test_rotary_tables_equal_the_reference(num_rows: int, num_pairs: int, factor: float) -> None:
    check_rotary_table(num_rows, num_pairs, factor, "cuda", last=1_000_000)
    check_rotary_table_3d(num_rows, num_pairs, factor, "cuda", last=1_000_000)
