"""What a store holds of a prompt, as data."""

from dataclasses import dataclass
from typing import NamedTuple

from strandline.cache.account import SnapshotKind


class OfferedSnapshot(NamedTuple):
    """A snapshot in a store."""

    position: int
    place: int
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
    """The place of each block. Of the last one, only the tokens before ``position`` count."""
    snapshots: tuple[OfferedSnapshot, ...] = ()
    """By position; the last lies at ``position``. Empty for models that keep no states."""
