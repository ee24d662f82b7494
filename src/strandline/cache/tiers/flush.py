"""The flush: writes what only the device or host memory has to the persistent tier before the process ends.

Entries of most worth are written first, as there may not be time for all. What the tier has already is not written
again, and what would not be loaded, or is worth less than everything in the tier, is not written at all. The device
retains its entries, so no host memory is needed.

Meanwhile no step runs and no request is admitted, so nothing needs to be pinned.
"""

from collections.abc import Iterator
from itertools import chain

from strandline.cache.index import PrefixIndex
from strandline.cache.tiers.device_entry import device_copy, device_entry
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.spills import MAX_SPILLS, Spills
from strandline.cache.tiers.stored import Copy
from strandline.cache.traversal import runs_below
from strandline.cache.tree import Run, Snapshot

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
        self._num_failed_before = spills.lower.num_failed_stores
        sources: list[tuple[float, Source]] = [(upper.worth(demoted), demoted) for demoted in upper.snapshots()]
        for entry in _entries(index, has_snapshots=upper.has_snapshots):
            sources.append((upper.worth(device_copy(entry)), entry))
        self._waiting = [source for _, source in sorted(sources, key=lambda pair: pair[0])]
        """By worth, the least first."""

    @property
    def num_left(self) -> int:
        """How much is not written yet, or was not refused."""
        return len(self._waiting) + len(self._spills)

    @property
    def num_failed(self) -> int:
        """How much could not be written."""
        return self._spills.lower.num_failed_stores - self._num_failed_before

    @property
    def failure(self) -> str:
        """Why the last of it could not be written."""
        return self._spills.lower.failure if self.num_failed else ""

    def begin(self) -> None:
        """Begin to write as much as may be on its way at once."""
        while self._waiting and len(self._spills) < MAX_SPILLS:
            source = self._waiting.pop()
            if not isinstance(source, Copy):
                self._spills.save(device_entry(source))
            elif source.column is not None and source.num_moves == 0:
                self._spills.spill(source)


def _entries(index: PrefixIndex, *, has_snapshots: bool) -> Iterator[Snapshot | Run]:
    """Yield the snapshots of the device or, without snapshots, the runs of whole blocks that paths end with."""
    for run in chain.from_iterable(map(runs_below, reversed(index.roots.values()))):
        if has_snapshots:
            yield from run.snapshots.values()
        elif run.parent is not None and not run.is_tail and all(child.is_tail for child in run.children.values()):
            yield run
