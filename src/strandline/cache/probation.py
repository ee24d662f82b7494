"""Probation: probes that no prompt has proven hold at most a share of the slots, and a new one replaces the oldest.

A probe is a guess where prompts will diverge. A prompt that resumes from it and matches deeper proves nothing about
its position: that prompt leaves a snapshot at the branch point itself, which serves all later ones.
"""

from typing import Final

from strandline.cache.memory import CacheMemory
from strandline.cache.tree import Snapshot
from strandline.records.account import SnapshotKind

PROBATION_SHARE: Final = 0.05
"""Share of the slots that unproven probes may hold."""


def max_probes(num_slabs: int) -> int:
    """Return how many unproven probes an arena of this size may hold."""
    return int(PROBATION_SHARE * num_slabs)


class Probation:
    """The unproven probes, oldest first. Each is also an ordinary entry, which eviction may take earlier."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self.max_probes = max_probes(memory.allocator.num_slabs)
        self._probes: list[Snapshot] = []

    def make_room(self, num_probes: int) -> None:
        """Evict the oldest probes, so that there is room for this many more, as far as probes can make it."""
        if len(self._probes) + num_probes <= self.max_probes:
            return
        self._probes = [each for each in self._probes if each.is_attached and each.kind is SnapshotKind.PROBE]
        while len(self._probes) > max(self.max_probes - num_probes, 0):
            self._memory.drop_snapshot(self._probes.pop(0))

    def enter(self, probe: Snapshot) -> None:
        """Add a new probe; evict the oldest ones that are too many, since others were taken at the same time."""
        self._probes.append(probe)
        self.make_room(0)
