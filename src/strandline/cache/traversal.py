"""Traversal of whole trees: of what the device has, and of that with what only tiers below it have."""

from collections.abc import Iterator

from strandline.cache.stored import continuations
from strandline.cache.tree import Run


def runs_below(root: Run) -> Iterator[Run]:
    """Yield a run and all below it that the device has, each after the one above it."""
    waiting = [root]
    while waiting:
        run = waiting.pop()
        yield run
        waiting += run.children.values()


def all_runs_below(root: Run) -> Iterator[Run]:
    """Yield a run and all below it, on the device or not, each after the one above it."""
    waiting = [root]
    while waiting:
        run = waiting.pop()
        yield run
        waiting += continuations(run)
