"""The Triton hyper-connections on a GPU, at odd shapes and at those of the published models."""

import pytest
import torch

from strandline.kernels.operation import Launches
from tests.cpu.kernels.streams.test_hyper_connections_triton import check_invariance, check_parts

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_streams", "size"),
    [(1, 4, 4096), (64, 4, 4096), (1000, 4, 4096), (65, 3, 130), (300, 2, 1000), (300, 8, 2048), (5, 1, 40)],
)
def test_parts_are_connected_as_in_torch(
    num_tokens: int, num_streams: int, size: int, dtype: torch.dtype, launches: Launches
) -> None:
    check_parts(num_tokens, num_streams, size, dtype, "cuda", launches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_streams", "size"), [(4, 4096), (3, 130)])
def test_token_does_not_depend_on_its_neighbours(num_streams: int, size: int, dtype: torch.dtype) -> None:
    check_invariance(1000, num_streams, size, dtype, "cuda")
