"""Symmetric memory is used by all ranks or by none, and only after it has been tried.

Ranks are threads, and the kernel is replaced: its sums are those of the threads.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from strandline.device.ranks import symmetric_memory
from strandline.device.ranks.symmetric_memory import CHECK_MAX_POLLS, SymmetricSums, TorchSymmetricMemory, connect_sums
from strandline.kernels.collectives import many_row_sums, rank_sums
from strandline.kernels.collectives.connection import Connection
from tests.cpu.models.rank_threads import RankThread, RankThreads

MANY = "of many rows"
"""Ends the name of a step that fails for many rows, and not for few."""


class FakeMemory:
    """Buffers of ranks that are threads."""

    device = torch.device("cpu")

    def __init__(self, rank: int, failing: str = "") -> None:
        self._rank, self._failing = rank, failing
        self.calls = list[str]()

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        self._call("allocate")
        return torch.zeros((), dtype=torch.int64).expand(shape)

    def exchange(self, buffer: Tensor) -> tuple[list[int], object]:
        self._call("exchange")
        return [10 * rank for rank in range(3)], buffer

    def _call(self, name: str) -> None:
        self.calls.append(name)
        step = name if self.calls.count(name) == 1 else f"{name} {MANY}"
        if self._rank > 0 and step == self._failing:
            raise RuntimeError(f"cannot {name}")


class FakeSums:
    """Stands for ``FewRowSums``: sums that are right, or wrong on one rank from the fourth on."""

    ranks: ClassVar[dict[int, RankThread]] = {}
    is_wrong = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.polls = list[int]()

    def sum(self, x: Tensor, max_polls: int = -1) -> Tensor:
        self.polls.append(max_polls)
        if max_polls == 0:
            return x
        total = self.ranks[self.connection.rank].sum(x)
        if self.is_wrong and self.connection.rank == 2 and len(self.polls) > 6:
            total[-1, 5] += 1
        return total

    def gather(self, x: Tensor, max_polls: int = -1) -> Tensor:
        self.polls.append(max_polls)
        return x


class FakeManySums(FakeSums):
    """Stands for ``ManyRowSums``."""

    is_wrong = False


Connect = Callable[[str], list[SymmetricSums]]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setattr(symmetric_memory, "FewRowSums", FakeSums)
    monkeypatch.setattr(symmetric_memory, "ManyRowSums", FakeManySums)
    monkeypatch.setattr(FakeSums, "ranks", {})

    def run(failing: str) -> list[SymmetricSums]:
        monkeypatch.setattr(FakeSums, "is_wrong", failing == "sums")
        monkeypatch.setattr(FakeManySums, "is_wrong", failing == f"sums {MANY}")

        def call(ranks: RankThread) -> SymmetricSums:
            FakeSums.ranks[ranks.rank] = ranks
            return connect_sums(ranks, FakeMemory(ranks.rank, failing))

        return RankThreads(3).run(call)

    return run


FAILURES = [
    ("allocate", "rank 1: RuntimeError: cannot allocate"),
    ("exchange", "rank 1: RuntimeError: cannot exchange"),
    ("sums", "rank 2: RuntimeError: wrong sums in torch.float32"),
]


@pytest.mark.parametrize(("failing", "reason"), FAILURES)
def test_failure_on_one_rank_is_one_for_all(
    connect: Connect, failing: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert connect(failing) == [SymmetricSums()] * 3
    assert caplog.messages == [f"few rows are not summed in symmetric memory: it fails on {reason}"]


@pytest.mark.parametrize(("failing", "reason"), FAILURES)
def test_few_rows_are_summed_where_many_cannot_be(
    connect: Connect, failing: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        connected = connect(f"{failing} {MANY}")
    assert [(type(few), many) for few, many in connected] == [(FakeSums, None)] * 3
    assert caplog.messages == [f"many rows are not summed in symmetric memory: it fails on {reason}"]


def test_memory_that_works_is_tried_and_not_logged(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        connected = connect("")
    assert not caplog.messages
    for rank, (few, many) in enumerate(connected):
        assert isinstance(few, FakeSums)
        assert isinstance(many, FakeManySums)
        # Kernels are compiled without a wait, then no wait is endless.
        assert few.polls == [0, 0, 0] + [CHECK_MAX_POLLS] * 6
        assert many.polls == [0, 0] + [CHECK_MAX_POLLS] * 6
        for sums, shape in ((few, rank_sums.counter_shape(3)), (many, many_row_sums.counter_shape(3))):
            assert sums.connection.rank == rank
            assert sums.connection.address_N.tolist() == [0, 10, 20]
            assert sums.connection.counter.shape == shape
            assert not sums.connection.counter.any()


class FakeHandle:
    """Buffers as torch gives them; this rank's own may be another tensor."""

    rank = 1

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._tensors[rank].view(dtype).view(shape)


def test_addresses_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(2, 8, dtype=torch.int64) for _ in range(2)]
    distributed = SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="all")))
    monkeypatch.setattr(symmetric_memory, "dist", distributed)
    torch_memory = SimpleNamespace(rendezvous=lambda _, name: FakeHandle(tensors) if name == "all" else None)
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", torch_memory)
    memory = TorchSymmetricMemory(torch.device("cpu"), 2)
    addresses, _ = memory.exchange(tensors[1])
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(RuntimeError, match="another address"):
        memory.exchange(tensors[0])


def test_memory_needs_triton() -> None:
    memory = TorchSymmetricMemory(torch.device("cpu"), 2)
    with pytest.raises(RuntimeError, match="there is no working Triton for cpu here"):
        memory.allocate((2, 2, 4, 8))
