"""The Triton norms and gates on a GPU, at odd shapes and at those of the published models."""

import pytest
import torch

from tests.cpu.kernels.rowwise.test_norm_triton import (
    check_gated_norm,
    check_gates,
    check_norm_of_gated,
    check_norms,
    check_norms_of_choices,
    check_norms_of_weighed_sums,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (65, 130), (1, 2048), (130, 2560), (1000, 2048), (63, 16, 256)], ids=str)
def test_norms_equal_the_torch_versions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norms(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 3072), (65, 2048), (5, 130)])
def test_norms_add_up_parts_with_factors(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    check_norms_of_weighed_sums(num_tokens, size, dtype, "cuda")


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 128), (65, 32, 128), (5, 33)], ids=str)
def test_the_gated_norm_equals_the_torch_version(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    check_gated_norm(shape, dtype, weight_dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size", "num_groups"), [(1, 4096, 8), (65, 4096, 8), (5, 63, 3), (130, 8192, 1)])
def test_norm_of_gated_rows_equals_the_torch_version(
    num_rows: int, size: int, num_groups: int, dtype: torch.dtype
) -> None:
    check_norm_of_gated(num_rows, size, num_groups, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 9216), (130, 512), (1000, 4096)])
def test_gates_equal_the_torch_versions(num_rows: int, size: int, dtype: torch.dtype) -> None:
    check_gates(num_rows, size, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(5, 2048), (300, 2560), (1000, 2048)])
def test_norms_add_up_choices_of_experts(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    check_norms_of_choices(num_tokens, size, dtype, "cuda")
