"""Processes of ranks leave NVLink multicast off, unless the user says otherwise, and choose how sums are taken.

Deterministic ones add in the order of the ranks, whatever the backend does.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from strandline.device.ranks import process_ranks
from strandline.device.ranks.process_ranks import INTERFACES, WITHOUT_MULTICAST, ProcessRanks, _loopback
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.kernels.expert_choices import added_up
from tests.cpu.kernels.collectives.test_rank_sums import choices_of
from tests.cpu.kernels.rank_processes import run_ranks
from tests.cpu.models.few_rows import CountingManyRows

NUM_ROWS = (1, 3, 64, 1000)
ORDERED = {
    torch.float32: ((1e8, 1.0, -1e8), 0.0),
    torch.float64: ((1e8, 1.0, -1e8), 1.0),
    torch.bfloat16: ((256.0, 1.0, 1.0), 258.0),
    torch.float16: ((2048.0, 1.0, 1.0), 2050.0),
    torch.int64: ((2**53, 1, 1), 2**53 + 2),
}
"""By dtype what three ranks add, and the sum: float32 first loses the 1; others lose one if they round each time."""


@pytest.mark.parametrize("is_set", [False, True])
def test_multicast_stays_off_unless_the_user_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, _loopback())
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT_MULTICAST}
    monkeypatch.setattr(os, "environ", environment)
    if is_set:
        environment["NCCL_NVLS_ENABLE"] = "1"
    (tmp_path / "ranks").mkdir()
    ranks = ProcessRanks(Rendezvous(0, 1, str(tmp_path / "ranks" / "meeting")), torch.device("cpu"))
    ranks.connect()
    ranks.close()
    assert environment["NCCL_NVLS_ENABLE"] == str(int(is_set))
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[ProcessRanks]:
    (tmp_path / "ranks").mkdir()
    ranks = ProcessRanks(Rendezvous(0, 1, str(tmp_path / "ranks" / "meeting")), torch.device("cpu"))
    ranks.connect()
    yield ranks
    ranks.close()


class Times:
    """Stands for sums and gathers of few rows, or of more."""

    def __init__(self, factor: int, max_rows: int) -> None:
        self._factor, self._max_rows = factor, max_rows

    def can_sum(self, x: torch.Tensor) -> bool:
        return len(x) <= self._max_rows

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._factor

    def can_gather(self, x: torch.Tensor) -> bool:
        return len(x) <= self._max_rows

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._factor


def test_backend_sums_and_gathers_what_kernels_do_not_take(
    one_rank: ProcessRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one_rank.few_rows is None
    assert one_rank.many_rows is None
    assert one_rank.sum(torch.ones(2, 4)).eq(1).all()
    monkeypatch.setattr(one_rank, "few_rows", Times(10, max_rows=2))
    assert one_rank.sum(torch.ones(2, 4)).eq(10).all()
    assert one_rank.sum(torch.ones(3, 4)).eq(1).all()
    assert one_rank.gather(torch.ones(2, 4)).eq(10).all()
    assert one_rank.gather(torch.ones(3, 4)).eq(1).all()
    monkeypatch.setattr(one_rank, "many_rows", Times(20, max_rows=3))
    assert [int(one_rank.sum(torch.ones(num_rows, 4))[0, 0]) for num_rows in (2, 3, 4)] == [10, 20, 1]
    assert one_rank.gather(torch.ones(3, 4)).eq(1).all()
    assert one_rank.least(7) == 7


def check_ordered_sums(rank: int, meeting: str) -> None:
    ranks = ProcessRanks(Rendezvous(rank, 3, meeting), torch.device("cpu"), is_deterministic=True)
    ranks.connect()
    backend = set()
    for part_bytes in (process_ranks.MAX_GATHERED_BYTES, 1000):
        process_ranks.MAX_GATHERED_BYTES = part_bytes
        for dtype, (values, total) in ORDERED.items():
            for num_rows in NUM_ROWS:
                x = torch.full((3, num_rows), values[rank], dtype=dtype).T
                assert ranks.sum(x.clone()).eq(total).all(), (dtype, num_rows)
                if dtype == torch.float32:
                    dist.all_reduce(x := x.contiguous())
                    backend |= set(x.flatten().tolist())
    assert ranks.sum(torch.ones(0, 4)).shape == (0, 4)
    assert ranks.sum(choices_of(2.0)).eq(2.0 * ranks.size).all()
    # Choices that a kernel does not take are added up for it.
    ranks.many_rows = CountingManyRows(ranks, 0)
    ranks.many_rows.can_sum = lambda x: isinstance(x, torch.Tensor)
    ranks.many_rows.sum = lambda x: added_up(x) + 1.0
    assert ranks.sum(choices_of(2.0)).eq(3.0).all()
    ranks.many_rows = None
    # What the test would miss if it could not fail: the backend adds in several orders.
    assert len(backend) > 1
    ranks.close()


def test_deterministic_ranks_add_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    assert run_ranks(check_ordered_sums, 3, str(tmp_path / "ranks" / "meeting")) == [0] * 3
