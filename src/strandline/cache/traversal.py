"""Traversal of whole trees of runs: that of the device, and that of the tiers."""

from collections.abc import Iterator, Mapping
from typing import Protocol, Self, TypeVar


class Branching(Protocol):
    """A run of a tree."""

    @property
    def children(self) -> Mapping[bytes, Self]: ...


Run_t = TypeVar("Run_t", bound=Branching)


def runs_below(root: Run_t) -> Iterator[Run_t]:
    """Yield a run and all below it, each after the one above it."""
    waiting = [root]
    while waiting:
        run = waiting.pop()
        yield run
        waiting += run.children.values()
