"""Traversal of whole trees: of what the device has, and of that with *demoted* runs, which only tiers below it have.

What the device has is the beginning of every path: demoted runs follow it, and nothing that it has follows them. Their
blocks are null blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from strandline.cache.tree import Run, SnapshotKey
from strandline.ids import NULL_BLOCK


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


def continuations(run: Run) -> Iterator[Run]:
    """Yield the runs after a run, on the device or not."""
    return chain(run.children.values(), demoted_after(run).values())


def demoted_after(run: Run) -> Mapping[bytes, Run]:
    """Return the continuations of a run that the device does not have, by their first blocks."""
    return {} if run.stored is None else run.stored.demoted


def stored_keys(run: Run) -> Sequence[SnapshotKey]:
    """Return the keys of the snapshots of a run that tiers have, sorted."""
    return () if run.stored is None else run.stored.keys


def is_on_device(run: Run) -> bool:
    """Return whether the device has the blocks of a run; otherwise tiers alone do."""
    return run.parent is None or run.blocks[0] != NULL_BLOCK
