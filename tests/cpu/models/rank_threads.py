"""Ranks that are threads of this process: what they compute together, they add up and join in its memory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from strandline.kernels.expert_choices import Summand, added_up
from strandline.kernels.ranks import FewRows, ManyRows, add_in_order

T = TypeVar("T")


class RankThreads:
    """A group of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size)

    def run(self, function: Callable[["RankThread"], T]) -> list[T]:
        """Call a function on every rank; return what it returned. If one fails, so do all that wait for it."""

        def call(rank: int) -> T:
            try:
                return function(RankThread(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            calls = [threads.submit(call, rank) for rank in range(self.size)]
            # The error of the rank that failed, not of those that waited for it.
            errors = sorted(filter(None, (done.exception() for done in calls)), key=lambda error: not error.args)
            if errors:
                raise errors[0]
            return [done.result() for done in calls]


class RankThread:
    """One rank, as layers see it."""

    few_rows: FewRows | None = None
    many_rows: ManyRows | None = None

    def __init__(self, group: RankThreads, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def connect(self) -> None:
        """Do nothing: threads share their memory."""

    def sum(self, x: Summand) -> Tensor:
        x = added_up(x)
        parts = self._exchange(x.clone())
        return add_in_order(parts) if x.is_floating_point() else torch.stack(parts).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x.clone()), dim=-1)

    def least(self, number: int) -> int:
        return int(min(self._exchange(torch.tensor(number))))

    def _exchange(self, value: Tensor) -> list[Tensor]:
        self._group.slots[self.rank] = value
        self._group.barrier.wait()
        values = list(self._group.slots)
        self._group.barrier.wait()
        return values
