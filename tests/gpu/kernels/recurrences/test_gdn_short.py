"""Triton's Gated DeltaNet over rerun rows, on a GPU, as it is launched and as benchmarks may choose."""

import pytest
import torch

from strandline.kernels.recurrences.gdn_short_triton import FEW, MANY, Short
from tests.cpu.kernels.recurrences import test_gdn_short_triton as cases
from tests.cpu.kernels.recurrences.test_conv1d_rerun_triton import LENGTHS, Lengths
from tests.cpu.kernels.recurrences.test_gdn_prefill_triton import BFLOAT16_ERROR, FLOAT32_ERROR, REAL, Shape

LAUNCHES = [FEW, MANY, Short(32, 2, None, skips_logged=True), Short(8, 1, None, skips_logged=True)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, FLOAT32_ERROR), (torch.bfloat16, BFLOAT16_ERROR)])
@pytest.mark.parametrize("lengths", [cases.ALL_LENGTHS, *LENGTHS, [(2, 3, 2)] * 64], ids=len)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_own_outputs_and_states_are_torchs(launch: Short, lengths: Lengths, dtype: torch.dtype, limit: float) -> None:
    cases.check_rerun(lengths, REAL, "cuda", dtype, limit, 5, launch)


@pytest.mark.parametrize("shape", [Shape(1, 3, 5, 7), Shape(2, 2, 24, 40)], ids=str)
@pytest.mark.parametrize("num_fillers", [1, 40])
def test_odd_sizes_and_rows_of_no_token_are_torchs(num_fillers: int, shape: Shape) -> None:
    cases.check_rerun(cases.ALL_LENGTHS, shape, "cuda", torch.float32, FLOAT32_ERROR, num_fillers)
