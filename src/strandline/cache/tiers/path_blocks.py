"""Blocks of a path that a move brings or takes."""

from collections.abc import Iterable
from typing import NamedTuple

from strandline.cache.tiers.paths import Block
from strandline.cache.tiers.stored import TierSnapshot


class PathBlocks(NamedTuple):
    """Some of the whole blocks before a snapshot, which is pinned."""

    snapshot: TierSnapshot
    indices: list[int]
    """In its path."""

    def locate(self) -> dict[int, Block]:
        """Return the blocks by index, in order of the path."""
        return self.snapshot.locate(set(self.indices))


def located(paths: Iterable[PathBlocks]) -> set[Block]:
    """Return all blocks of some paths."""
    return {block for blocks in paths for block in blocks.locate().values()}
