"""Snapshots as stores have them: the slot, encoded, if there is one, and then the window blocks, unchanged.

Shape suffixes: X bytes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from strandline.device.stores.snapshot_encoding import AS_IS, Encoding
from strandline.ids import NULL_SLOT, BlockId, Lifetime, SlotId
from strandline.kernels.arena import ArenaTensors

Windows = Sequence[Sequence[BlockId]]
"""The window blocks of a snapshot, for each size of windows."""


class ArenaSnapshots:
    """The snapshots of an arena.

    Args:
        slots: encodes their slots.
    """

    def __init__(self, arena: ArenaTensors, slots: Encoding) -> None:
        self._arena = arena
        self._slots = slots

    def parts(self, slot: SlotId, windows: Windows) -> Iterator[tuple[Tensor, Encoding]]:
        """Yield the bytes of a snapshot in the arena, part by part, and the encoding of each; none of the null slot."""
        if slot != NULL_SLOT:
            yield self._arena.slot(slot), self._slots
        for number, window in enumerate(windows, 1):
            for block in window:
                yield self._arena.block(block, Lifetime(number)), AS_IS

    def encode(self, slot: SlotId, windows: Windows) -> Tensor:
        """Return a snapshot's stored bytes, in new memory or the arena's."""
        parts_X = [encoding.encode(part_X) for part_X, encoding in self.parts(slot, windows)]
        return torch.cat(parts_X) if any(windows) else parts_X[0]

    def decode(self, slot: SlotId, windows: Windows, stored: Iterable[Tensor]) -> None:
        """Write a snapshot from its stored bytes, given in pieces, by asynchronous copies."""
        parts = [(part_X, encoding, encoding.room(part_X)) for part_X, encoding in self.parts(slot, windows)]
        copy_pieces(stored, [rest_X for *_, rest_X in parts])
        for part_X, encoding, rest_X in parts:
            encoding.decode(rest_X, part_X)

    def num_bytes(self, slot: SlotId, windows: Windows) -> int:
        """Return how many bytes are stored of a snapshot."""
        return sum(encoding.num_bytes(part_X) for part_X, encoding in self.parts(slot, windows))


def copy_pieces(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copy bytes that are in some pieces to as many bytes in others."""
    left = iter(targets)
    target_X = next(left)
    for source_X in sources:
        start = 0
        while start < len(source_X):
            if not len(target_X):
                target_X = next(left)
            count = min(len(target_X), len(source_X) - start)
            target_X[:count].copy_(source_X[start : start + count], non_blocking=True)
            target_X, start = target_X[count:], start + count
