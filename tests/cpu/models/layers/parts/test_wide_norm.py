"""Norms over the channels of several ranks: deterministic, a row's mean square has the same bits beside any others.

The ``check_`` function runs on any device.
"""

from collections.abc import Iterator

import pytest
import torch

from strandline.models.layers.parts.wide_norm import sum_in_halves


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check_rows(device: str) -> None:
    x_TO = torch.randn(70, 40_000, generator=torch.Generator().manual_seed(1)).to(device)
    sum_T = sum_in_halves(x_TO)
    torch.testing.assert_close(sum_T.double(), x_TO.double().sum(-1), rtol=1e-5, atol=1e-2)
    for num_rows in (1, 2, 64):
        assert torch.equal(sum_in_halves(x_TO[:num_rows]), sum_T[:num_rows])
    # What the test would miss if it could not fail.
    assert not torch.equal(torch.stack([x_O.sum() for x_O in x_TO]), x_TO.sum(-1))


@pytest.mark.usefixtures("two_threads")
def test_sums_of_rows_depend_on_no_other_row() -> None:
    check_rows("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65])
def test_sums_include_all_channels(size: int) -> None:
    x_TO = torch.arange(3 * size).view(3, size).float()
    assert torch.equal(sum_in_halves(x_TO), x_TO.sum(-1))
