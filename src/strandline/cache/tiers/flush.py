"""The flush: writes what only the device or host memory has to the persistent tier before the process ends.

Entries of most worth are written first, as there may not be time for all. What the tier has already is not written
again, and what would not be loaded, or is worth less than everything in the tier, is not written at all. The device
retains its entries, so no host memory is needed.

Meanwhile no step runs and no request is admitted, so nothing needs to be pinned.
"""

from array import array
from collections.abc import Iterator

from strandline.cache.index import PrefixIndex
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.spills import MAX_SPILLS, DeviceEntry, Spills
from strandline.cache.tiers.stored_windows import ids_of
from strandline.cache.tiers.tier_tree import Copy, TierSnapshot, copy_of_device
from strandline.cache.tree import Run, Snapshot, child_with_prefix, path_blocks, path_to
from strandline.cache.window import NO_WINDOW
from strandline.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT, BlockId
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES

Source = Copy | Snapshot | Run
"""What is written: from host memory; from the device; or, without snapshots, a path of the device."""


class Flush:
    """Writes in order of worth.

    Args:
        index: that of the device.
        upper: the tier in host memory.
        spills: those from there to the persistent tier.
    """

    def __init__(self, index: PrefixIndex, upper: LowerTier, spills: Spills) -> None:
        self._spills = spills
        spills.is_final = True
        self._num_failed_before = spills.num_failed
        sources: list[tuple[float, Source]] = [(upper.worth(demoted), demoted) for demoted in upper.snapshots()]
        for entry in _entries(index, has_snapshots=upper.has_snapshots):
            sources.append((upper.worth(_as_demoted(entry)), entry))
        self._waiting = [source for _, source in sorted(sources, key=lambda pair: pair[0])]
        """By worth, the least first."""
        self.num_sources = len(sources)

    @property
    def num_left(self) -> int:
        """How much is not written yet, or was not refused."""
        return len(self._waiting) + len(self._spills)

    @property
    def num_failed(self) -> int:
        """How much could not be written."""
        return self._spills.num_failed - self._num_failed_before

    @property
    def failure(self) -> str:
        """Why the last of it could not be written."""
        return self._spills.failure if self.num_failed else ""

    def begin(self) -> None:
        """Begin to write as much as may be on its way at once."""
        while self._waiting and len(self._spills) < MAX_SPILLS:
            source = self._waiting.pop()
            if not isinstance(source, Copy):
                self._spills.save(_device_entry(source))
            elif source.column is not None and source.num_loads == 0:
                self._spills.spill(source)


def _entries(index: PrefixIndex, *, has_snapshots: bool) -> Iterator[Snapshot | Run]:
    """Yield the snapshots of the device or, without snapshots, the runs of whole blocks that paths end with."""
    waiting = list(index.roots.values())
    while waiting:
        run = waiting.pop()
        waiting.extend(run.children.values())
        if has_snapshots:
            yield from (*run.snapshots.values(), *run.stubs.values())
        elif run.parent is not None and not run.is_tail and all(child.is_tail for child in run.children.values()):
            yield run


def _as_demoted(entry: Snapshot | Run, key: bytes = b"") -> Copy:
    """Return the copy for a tier of an entry of the device.

    Args:
        key: the tokens between the end of the last whole block before it and its position, encoded.
    """
    if isinstance(entry, Run):
        end, num_tokens = TierSnapshot(entry.end_tokens, key), len(entry.blocks) * BLOCK_TOKENS
        return Copy(end, SnapshotKind.GENERATION_END, entry.use, num_tokens, is_shared=entry.is_shared)
    return copy_of_device(entry, key, entry.saved_tokens)


def _device_entry(entry: Snapshot | Run) -> DeviceEntry:
    """Return an entry of the device with all that it needs."""
    run, position = (entry, entry.end_tokens) if isinstance(entry, Run) else (entry.home, entry.position)
    whole = position // BLOCK_TOKENS
    salt, data = path_to(run)
    blocks = path_blocks(run)
    slot, window = NULL_SLOT, NO_WINDOW
    if isinstance(entry, Snapshot):
        slot, window = entry.slot, entry.window
        if entry.stub_key is not None:
            data += entry.stub_key
            child = child_with_prefix(run, entry.stub_key)
            blocks += child.blocks[:1] if child is not None else array("i")
    data = data[: position * TOKEN_BYTES]
    demoted = _as_demoted(entry, data[whole * BLOCK_KEY_BYTES :])
    tail = BlockId(blocks[whole]) if demoted.snapshot.has_tail else NULL_BLOCK
    return DeviceEntry(demoted, salt, data, tuple(map(BlockId, blocks[:whole])), slot, ids_of(window), tail)
