"""What a store holds of a prompt, as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from strandline.records.account import SnapshotKind


class OfferedSnapshot(NamedTuple):
    """A snapshot in a store."""

    position: int
    address: int
    kind: SnapshotKind


@dataclass(frozen=True, slots=True)
class Offer:
    """What a store holds of a prompt's prefix: enough to resume at ``position``, with what the device holds."""

    store: str
    """Names it in ``LoadIn``."""
    position: int
    """Tokens of the prefix."""
    first_block: int
    """The first block that is offered, counted from the prompt's beginning; the last is that of ``position - 1``."""
    blocks: tuple[int, ...]
    """The address of each block; 0: it is not offered. Of the last one, only the tokens before ``position`` count."""
    snapshots: tuple[OfferedSnapshot, ...] = ()
    """By position; the last one is at ``position``. Empty where prompts resume without snapshots."""
    limit_s: float = float("inf")
    """How long computing would take."""

    def addresses(self, indices: Iterable[int]) -> dict[int, int]:
        """Return the addresses of blocks, counted from the prompt's beginning; 0: it is not offered."""
        blocks, first, end = self.blocks, self.first_block, self.first_block + len(self.blocks)
        return {index: blocks[index - first] if first <= index < end else 0 for index in indices}
