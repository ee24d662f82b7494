"""The window blocks of one running request or snapshot."""

from array import array
from collections.abc import Sequence
from typing import Final

from strandline.ids import NULL_BLOCK, BlockId


class Window:
    """Consecutive window blocks of a path.

    Attributes:
        blocks: by their index in the path; the null block before ``first``.
        first: the index of the first block.
        is_pinned: whether a running request needs them; else they are those of a snapshot that may be evicted.
    """

    __slots__ = ("blocks", "first", "is_pinned")

    def __init__(self, first: int = 0, blocks: Sequence[int] = (), *, is_pinned: bool = True) -> None:
        self.blocks = array("i", [NULL_BLOCK]) * first + array("i", blocks)
        self.first = first
        self.is_pinned = is_pinned

    @property
    def held(self) -> "array[int]":
        """Its blocks without the null blocks."""
        return self.blocks[self.first :]

    @property
    def ids(self) -> tuple[BlockId, ...]:
        """Its blocks without the null blocks, for actions."""
        return tuple(map(BlockId, self.held))

    @property
    def packed(self) -> bytes:
        """The index of its first block, then its blocks, int32 each; empty: it has none."""
        return array("i", [self.first, *self.held]).tobytes() if self.blocks else b""


NO_WINDOW: Final = Window()
"""That of all snapshots and requests where there are no window blocks."""
