"""Triton's convolution of logged inputs and a step's own, on a GPU."""

import pytest
import torch

from tests.cpu.kernels.recurrences.test_conv1d_rerun_triton import LENGTHS, Lengths, check_rerun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [*LENGTHS, [(2, 3, 2)] * 64])
@pytest.mark.parametrize("sizes", [[8192, 32, 32], [6144, 64], [70]])
def test_outputs_logs_and_windows_are_torchs(sizes: list[int], lengths: Lengths, dtype: torch.dtype) -> None:
    check_rerun(lengths, sizes, 4, dtype, "cuda")
