"""The Triton gates of streams on a GPU, at odd shapes and at those of the published models."""

import pytest
import torch

from tests.cpu.kernels.streams.test_gates_triton import (
    Shape,
    check_added_outputs,
    check_features,
    check_first_streams,
    check_invariance,
    check_mixes,
)

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(1, 4, 2048), (1000, 4, 2048), (65, 3, 130), (5, 8, 4096)], ids=str)


@EACH_DTYPE
@SHAPES
def test_outputs_are_added_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_added_outputs(shape, dtype, "cuda")
    check_first_streams(shape, dtype, "cuda")


@EACH_DTYPE
@SHAPES
def test_streams_are_mixed_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_mixes(shape, dtype, "cuda")


@EACH_DTYPE
@SHAPES
def test_features_are_gated_as_in_torch(shape: Shape, dtype: torch.dtype) -> None:
    check_features(shape, dtype, "cuda")


@EACH_DTYPE
def test_token_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    check_invariance((1000, 4, 2048), dtype, "cuda")
