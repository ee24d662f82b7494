"""Stores in simulated time: transfers of each kind end one after the other, at the rate of a bus or a disk."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from strandline.records.actions import Action, Completion, LoadIn, SnapshotCopy, StoredPath, StoreOut
from strandline.specs import ModelSpec

HOST_BYTES_PER_S: Final = 5.5e10
"""Pinned host memory to an H200, measured."""
LATENCY_S: Final = 2e-4
"""The time to begin the copies of a transfer, and to notice their end, while no others are under way."""


class EndedTransfer(NamedTuple):
    """A transfer that has ended, and what it was."""

    completion: Completion
    store: str
    num_bytes: int


class SimulatedStores:
    """Ends loads in the order in which they began, and stores to a disk likewise, beside them.

    What is stored to host memory takes no time, as it does not hold up a load.

    Args:
        spec: spec of blocks and slots as they are stored.
        bytes_per_s: by store.
    """

    def __init__(self, spec: ModelSpec, bytes_per_s: Mapping[str, float]) -> None:
        self._spec = spec
        self._snapshots = spec.stored_snapshots("float32")
        """Their sizes: the states' dtypes are those of the spec."""
        self._bytes_per_s = bytes_per_s
        self._ends: list[tuple[float, EndedTransfer]] = []
        self._free_at_s = defaultdict[tuple[str, type[Action]], float](float)
        """By store and kind of transfer: when the last one ends."""
        self.loaded_bytes = 0

    def begin(self, actions: Iterable[Action], now_s: float) -> None:
        """Begin the transfers among some actions, after those that are under way."""
        for action in actions:
            match action:
                case LoadIn(blocks=blocks, snapshots=snapshots):
                    num_bytes = len(blocks) * self._spec.block_bytes + sum(map(self._bytes_of, snapshots))
                    self.loaded_bytes += num_bytes
                    self._begin(action, num_bytes, now_s)
                case StoreOut(path=StoredPath() as path):
                    num_blocks = len(path.addresses) + (path.tail_address > 0)
                    num_bytes = num_blocks * self._spec.block_bytes
                    num_bytes += (path.address > 0) * self._snapshots.bytes_at(path.position)
                    self._begin(action, num_bytes, now_s)
                case _:
                    pass

    def _bytes_of(self, copy: SnapshotCopy) -> int:
        """Return the stored bytes of a snapshot."""
        sizes = zip(copy.windows, self._snapshots.windows, strict=True)
        return self._snapshots.slot_bytes + sum(len(window) * size.block_bytes for window, size in sizes)

    def _begin(self, action: LoadIn | StoreOut, num_bytes: int, now_s: float) -> None:
        lane = action.store, type(action)
        latency_s = 0.0 if self._free_at_s[lane] > now_s else LATENCY_S
        seconds = latency_s + num_bytes / self._bytes_per_s[action.store]
        end_s = self._free_at_s[lane] = max(now_s, self._free_at_s[lane]) + seconds
        completion = Completion(action.transfer, is_done=True, seconds=seconds)
        heapq.heappush(self._ends, (end_s, EndedTransfer(completion, action.store, num_bytes)))

    @property
    def next_end_s(self) -> float:
        """When the next transfer ends; infinity when none is under way."""
        return self._ends[0][0] if self._ends else float("inf")

    def take_ended(self, now_s: float) -> list[EndedTransfer]:
        """Return the transfers that have ended by now."""
        ended = []
        while self.next_end_s <= now_s:
            ended.append(heapq.heappop(self._ends)[1])
        return ended
