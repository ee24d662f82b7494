"""Paths of whole blocks in the tree, and the blocks of a path by runs."""

from typing import NamedTuple

from strandline.cache.tree import Run
from strandline.cache.walk import PathEnd


class Blocks(NamedTuple):
    """Consecutive blocks of a run."""

    run: Run
    start: int
    """The index of the first one in the run."""
    end: int


Block = tuple[Run, int]
"""A run, and the index in it of one of its blocks."""


def pieces(end: PathEnd, first: int = 0) -> list[Blocks]:
    """Return the blocks of a path from ``first`` on, in order."""
    found = list[Blocks]()
    for node in end.run.ancestry():
        start, stop = max(first, node.start_block), min(end.depth, node.end_block)
        if start < stop:
            found.append(Blocks(node, start - node.start_block, stop - node.start_block))
        if node.start_block <= first:
            break
    return found[::-1]


def path_to(run: Run) -> tuple[str, bytes]:
    """Return the salt of a run's tree, and the tokens up to the run's end, encoded."""
    path = run.ancestry()
    return path[-1].salt, b"".join(node.tokens for node in reversed(path))
