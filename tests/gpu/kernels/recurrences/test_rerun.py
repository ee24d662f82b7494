"""The cases of Triton's ``insert_logged`` on a GPU, and at a published model's sizes."""

import pytest
import torch

from tests.cpu.kernels.recurrences.test_rerun_triton import LENGTHS, check_insert


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [*LENGTHS, [(2, 3, 2)] * 64])
@pytest.mark.parametrize("sizes", [[1500], [8192, 32, 32], [8, 70, 3, 1030]])
def test_rows_and_log_are_torchs(sizes: list[int], lengths: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    check_insert(sizes, lengths, dtype, "cuda")
